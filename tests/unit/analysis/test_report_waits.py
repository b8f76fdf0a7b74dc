"""Tests ``report`` with wait profiles: causes, states, idle waits and exact totals."""

import json
from dataclasses import replace

import pytest

from otel_kprofiler.analysis import Filter
from otel_kprofiler.cli.diff import command as diff
from otel_kprofiler.cli.report import command
from otel_kprofiler.cli.view_sources import choose_by, open_saved
from otel_kprofiler.model import (
    OFF_CPU,
    LossCause,
    WaitCause,
    WaitState,
    WaitTotals,
    WindowSample,
    WindowWait,
    WindowWaker,
)
from otel_kprofiler.otlp import read_profiles
from tests.commands import invoke
from tests.page import data, unpacked
from tests.windows import make_stack, make_window, write_otlp

MS = 1_000_000
START = 1_600_000_000_000_000_000
PIPE = WindowWait(WaitState.INTERRUPTIBLE, WaitCause.PIPE, True, WindowWaker(3, 4, "writer"))
QUEUE = WindowWait(WaitState.RUNNABLE, WaitCause.RUN_QUEUE)
POLL = WindowWait(WaitState.INTERRUPTIBLE, WaitCause.POLL, is_ended=False)


def sample(function, wait, *values):
    times = [START + at * MS for at in range(len(values))]
    return WindowSample(make_stack(function), 7, "nginx", 0, None, times, values, (), wait)


@pytest.fixture
def profile(tmp_path):
    """Writes waits of 10 s (poll), 3 + 3 ms (pipe) and 1 + 4 ms (CPU). The threshold is 3 ms."""
    nginx = {"process.pid": 7, "process.executable.name": "nginx"}
    quiet = {"process.pid": 8, "process.executable.name": "quiet"}
    samples = [
        sample("do_sys_poll", POLL, 10_000 * MS),
        sample("anon_pipe_read", PIPE, 3 * MS, 3 * MS),
        sample("anon_pipe_read", QUEUE, 1 * MS, 4 * MS),
    ]
    groups = [
        (nginx, samples, WaitTotals((4 * MS, 10_008 * MS, 0, 0, 0), 9)),
        (quiet, [], WaitTotals((0, 0, 2 * MS, 0, 0), 1, 2 * MS)),
    ]
    facts = {"kind": OFF_CPU, "period_ns": 0, "taken": 5, "threshold_ns": 3 * MS}
    return write_otlp(tmp_path / "waits.otlp", make_window(START, START + 10**10, *groups, **facts))


def report(*arguments):
    return invoke(command, *arguments)


# The ± value is √(2 (3² + 3² + 1²)); waits longer than the threshold contribute no error.
TOTALS = (
    "all waits: 10,014.0 ms exactly (runnable 4.0, interruptible 10,008.0, uninterruptible 2.0); "
    "by samples 10,011.0 ± 6.2 ms"
)


def test_idle_waits_are_counted_but_not_listed_in_reports_by_cause(profile):
    assert report("--by", "cause", profile).output.splitlines() == [
        "off_cpu: 4 samples, 11.0 ms, 0.0 s from 2020-09-13 12:26:40 UTC, 0 lost",
        TOTALS,
        "idle waits, not shown without --idle: 1 sample, 10,000.0 ms",
        " ms  share  kernel  samples  cause",
        "6.0  54.5%    100%        2  pipe",
        "5.0  45.5%    100%        2  run_queue",
    ]


def test_idle_waits_are_shown_on_request(profile):
    lines = report("--by", "cause", "--idle", profile).output.splitlines()
    assert lines[:2] == [
        "off_cpu: 5 samples, 10,011.0 ms, 0.0 s from 2020-09-13 12:26:40 UTC, 0 lost",
        TOTALS,
    ]
    assert [line.split()[-1] for line in lines[3:]] == ["poll", "pipe", "run_queue"]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("state", {"interruptible": 6 * MS, "runnable": 5 * MS}),
        ("waker", {"writer (4)": 6 * MS, "-": 5 * MS}),
        ("function", {"anon_pipe_read": 11 * MS}),
        ("otel_kprofiler.wait.cause", {"pipe": 6 * MS, "run_queue": 5 * MS}),
    ],
)
def test_waits_can_be_grouped_by_every_key(profile, by, expected):
    (kind,) = json.loads(report("--by", by, "--json", profile).output)["kinds"]
    assert {row["name"]: row["self"] for row in kind["groups"]} == expected
    assert kind["waits"] == {
        "exact_ns": {"runnable": 4 * MS, "interruptible": 10_008 * MS, "uninterruptible": 2 * MS},
        "switches": 10,
        "below_ns": 2 * MS,
        "estimate_ns": 10_011 * MS,
        "standard_error_ns": pytest.approx(6.164 * MS, rel=1e-3),
        "threshold_ns": 3 * MS,
        "idle_samples": 1,
        "idle_ns": 10_000 * MS,
    }


def test_on_cpu_samples_are_not_grouped_with_waits(profile, tmp_path):
    stack = sample("vfs_read", None, 1)._replace(values=())
    window = make_window(START, START + MS, ({"process.pid": 7}, [stack]))
    path = write_otlp(tmp_path / "running.otlp", window)
    kinds = json.loads(report("--by", "state", "--json", path, profile).output)["kinds"]
    assert [kind["kind"] for kind in kinds] == ["off_cpu"]
    kinds = json.loads(report("--by", "state", "--json", path).output)["kinds"]
    assert [kind["kind"] for kind in kinds] == ["on_cpu"]


def test_a_recording_with_only_idle_waits_is_reported_without_a_table(profile):
    lines = report("--function", "do_sys_poll", profile).output.splitlines()
    assert lines[0].startswith("off_cpu: 0 samples, 0.0 ms")
    assert lines[1:] == [
        "these waits: by samples 10,000.0 ± 0.0 ms",  # above the threshold
        "idle waits, not shown without --idle: 1 sample, 10,000.0 ms",
    ]


def test_exact_wait_totals_cover_only_the_selected_processes(profile):
    assert report("--process", "7", profile).output.splitlines()[1] == (
        "all waits: 10,012.0 ms exactly (runnable 4.0, interruptible 10,008.0); "
        "by samples 10,011.0 ± 6.2 ms"
    )
    for chosen in (["--function", "anon_pipe_read"], ["--from", "0s"], ["--cpus", "0"]):
        assert report(*chosen, profile).output.count("exactly") == 0
        done = report("--json", *chosen, profile)
        assert [load["waits"]["exact_ns"] for load in json.loads(done.output)["kinds"]] in (
            [],
            [None],
        )


def test_estimates_have_no_error_bound_if_samples_were_lost(profile, tmp_path):
    (window,) = read_profiles(profile)
    of_lost = replace(window.profiles[0], taken=9, lost={LossCause.RING_FULL: 4})
    path = write_otlp(tmp_path / "lost.otlp", replace(window, profiles=[of_lost]))
    assert "by samples 10,011.0 ms, without the 4 lost samples" in report(path).output
    (kind,) = json.loads(report("--json", path).output)["kinds"]
    assert kind["waits"]["standard_error_ns"] is None


def test_graphs_omit_idle_waits_and_note_the_omission(profile, tmp_path):
    done = report("-o", tmp_path / "page.html", profile)
    assert "1 idle wait left out, 10.0 s; --idle shows them" in done.stderr
    result = data((tmp_path / "page.html").read_text())
    assert "without idle waits" in result["title"]
    assert sum(result["samples"]["count"]) == 11 * MS
    done = report("-o", tmp_path / "all.html", "--idle", profile)
    assert done.stderr == ""
    result = data((tmp_path / "all.html").read_text())
    assert sum(result["samples"]["count"]) == 10_011 * MS


def test_profile_files_include_idle_waits(profile, tmp_path):
    assert report("-o", tmp_path / "again.otlp", profile).stderr == ""
    windows = [read_profiles(path)[0] for path in (profile, str(tmp_path / "again.otlp"))]
    first, again = (
        [
            (resource.resource.attributes["process.pid"], resource.waits)
            for resource in window.profiles[0].resources
        ]
        for window in windows
    )
    assert first == again
    assert len(first) == 2
    assert [one.wait for _, one in windows[1].samples] == [POLL, PIPE, QUEUE]


def test_comparisons_omit_idle_waits_by_default(profile):
    times = ["--time-before", "0s..1s", "--time-after", "0s..1s"]
    without = invoke(diff, profile, "--by", "cause", "--json", *times)
    assert "1 idle wait left out; --idle shows them" in without.stderr
    rows = json.loads(without.stdout)["kinds"][0]["groups"]
    assert {row["name"] for row in rows} == {"pipe", "run_queue"}
    with_idle = invoke(diff, profile, "--by", "cause", "--idle", "--json", *times)
    assert with_idle.stderr == ""
    rows = json.loads(with_idle.stdout)["kinds"][0]["groups"]
    assert {row["name"] for row in rows} == {"pipe", "run_queue", "poll"}


@pytest.mark.parametrize(("idle", "weight_ms"), [(False, 11), (True, 10_011)])
def test_pages_omit_idle_waits_unless_they_are_requested(profile, idle, weight_ms, capsys):
    none = dict.fromkeys([*Filter.__dataclass_fields__, "start", "end", "sides"], ())
    (shown,) = open_saved([profile], none, idle=idle).answer("")
    assert sum(unpacked(json.loads(shown))["samples"]["count"]) == weight_ms * MS
    assert ("--idle shows them" in capsys.readouterr().err) is not idle
    (chosen,) = choose_by(none, idle=idle)(read_profiles(profile))
    assert sum(sample.weight for _, sample in chosen.samples) == weight_ms * MS
