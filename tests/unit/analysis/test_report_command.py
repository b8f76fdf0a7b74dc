"""The ``report`` command, run on profile files."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from otel_kprofiler.cli import diff
from otel_kprofiler.cli.main import main
from otel_kprofiler.cli.report import command
from otel_kprofiler.formats import html
from otel_kprofiler.model import (
    PYTHON_SIDE,
    USER_SIDE,
    Frame,
    Line,
    ProfileKind,
    SpanLink,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import decode_windows
from tests.commands import invoke
from tests.page import data
from tests.windows import LIBC, make_frame, make_profile, make_stack, make_window, write_otlp

PEER = Path(__file__).parents[2] / "data" / "otlp" / "ebpf-profiler.otlp.gz"
TICK = 50_000_000  # nanoseconds between samples

SECOND = 10**9
START = 1_600_000_000 * SECOND


def stack(*names, user=("read", "main")):
    program = [make_frame(name, USER_SIDE, LIBC) for name in user]
    return Stack.from_frames([*make_stack(*names).frames, *program])


READ = stack("vfs_read", "__x64_sys_read", "do_syscall_64")
WRITE = stack("vfs_write", "__x64_sys_write", "do_syscall_64")
USER = stack(user=("compute", "main"))


@pytest.fixture
def profile(tmp_path):
    """Writes six 1 s samples from nginx: 3 in read, 2 in write, 1 in user mode."""
    groups = [
        ({"process.pid": 7, "process.executable.name": "nginx"}, [
            WindowSample(READ, 7, "nginx", 0, SpanLink(b"\1" * 16, b"\2" * 8, "GET /\x1b"),
                         [START, START + SECOND]),
            WindowSample(READ, 7, "nginx", 0, SpanLink(b"\1" * 16, b"\2" * 8),
                         [START + 2 * SECOND]),
            WindowSample(USER, 7, "nginx", 1, None, [START]),
        ]),
        ({"process.pid": 8, "process.executable.name": "dd\x1b[2J"}, [
            WindowSample(WRITE, 8, "dd", 1, None, [START], (), (("tenant.id", "acme"),)),
            WindowSample(WRITE, 8, "dd", 1, None, [START + SECOND]),
        ]),
    ]  # fmt: skip
    window = make_window(START, START + 3 * SECOND, *groups, period_ns=SECOND, taken=6)
    return write_otlp(tmp_path / "profile.otlp", window)


def report(*arguments):
    return invoke(command, *arguments).output


def fails(*arguments):
    done = invoke(command, *arguments, status=1)
    return str(done.exception), done.exception.hint


def rows(*arguments):
    (kind,) = json.loads(report("--json", *arguments))["kinds"]
    return {row["name"]: (row["self"], row["total"]) for row in kind["groups"]}


def test_the_function_table_shows_milliseconds_and_percentages(profile):
    assert report("-n", 3, profile).splitlines() == [
        "on_cpu: 6 samples, 6,000.0 ms, 2.0 s from 2020-09-13 12:26:40 UTC, 0 lost",
        "self ms   self  total ms  total  module     function",
        "3,000.0  50.0%   3,000.0  50.0%  vmlinux    vfs_read",
        "2,000.0  33.3%   2,000.0  33.3%  vmlinux    vfs_write",
        "1,000.0  16.7%   1,000.0  16.7%  libc.so.6  compute",
        "5 more; --limit 0 shows all",
    ]
    assert rows(profile)["main"] == (0, 6 * SECOND)


def test_kinds_with_equal_names_and_different_units_are_separate(tmp_path):
    """A kind of sample is identified by its unit, too, and its name is not a pattern."""
    kinds = [
        ("wall", "nanoseconds", 5_000_000),
        ("wall", "microseconds", 700),
        ("w*", "count", 3),
    ]
    profiles = []
    for name, unit, value in kinds:
        sample = WindowSample(READ, 7, "a", 0, None, [START], [value])
        profiles.append(
            make_profile(({}, [sample]), kind=ProfileKind(name, name, unit), period_ns=0)
        )
    path = write_otlp(tmp_path / "a.otlp", Window(START, START + SECOND, profiles))
    results = json.loads(report("--json", path))["kinds"]
    assert [(kind["kind"], kind["unit"], kind["total"]) for kind in results] == kinds
    compared = json.loads(invoke(diff.command, "--json", path, path).output)["kinds"]
    assert [kind["before"]["samples"] for kind in compared] == [1, 1, 1]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("syscall", {"read": 3, "write": 2, "user mode": 1}),
        ("process", {"nginx (7)": 4, "dd\x1b[2J (8)": 2}),
        ("cpu", {"0": 3, "1": 3}),
        ("module", {"vmlinux": 5, "libc.so.6": 1}),
        ("span", {"02" * 8: 3, "[no span]": 3}),
        ("endpoint", {"GET /\x1b": 3, "-": 3}),
        ("otel_kprofiler.local_root_span.name", {"GET /\x1b": 3, "-": 3}),
        ("tenant.id", {"acme": 1, "-": 5}),
        ("label:tenant.id", {"acme": 1, "-": 5}),
        ("label:process.pid", {"-": 6}),
        ("thread", {"nginx (7)": 4, "dd (8)": 2}),
        ("comm", {"nginx": 4, "dd": 2}),
        ("service", {"-": 6}),
    ],
)
def test_samples_can_be_grouped_by_every_key(profile, by, expected):
    assert {name: own // SECOND for name, (own, _) in rows("--by", by, profile).items()} == expected


def test_lines_or_functions_are_listed_per_span(profile):
    lines = report("--by", "span", profile).splitlines()
    assert lines[1].split() == ["ms", "share", "kernel", "samples", "trace", "endpoint", "span"]
    row = ["3,000.0", "50.0%", "100%", "3", "01" * 16, "GET", "/\\x1b", "02" * 8]
    assert row in [line.split() for line in lines]
    assert "    3,000.0 ms in vfs_read" in lines
    (kind,) = json.loads(report("--json", "--by", "span", profile))["kinds"]
    results = {one["name"]: one.get("endpoint") for one in kind["groups"]}
    assert results == {"02" * 8: "GET /\x1b", "[no span]": None}


def test_samples_with_a_label_are_selected(profile, tmp_path):
    path = tmp_path / "acme.otlp"
    report("--attribute", "tenant.id=ac*", "-o", path, profile)
    assert rows("--by", "tenant.id", path) == {"acme": (SECOND, SECOND)}


def test_samples_can_be_filtered_by_endpoint(profile):
    assert rows("--endpoint", "GET *", "--by", "syscall", profile) == {
        "read": (3 * SECOND, 3 * SECOND)
    }
    assert fails("--endpoint", "POST *", profile) == (
        "no sample matches --endpoint POST *", "existing values: GET /\\x1b"
    )  # fmt: skip


def test_percentages_of_callers_and_callees_are_relative_to_the_function(profile):
    assert report("--callers", "do_syscall_64", profile).splitlines()[1:] == [
        "callers of do_syscall_64: 5,000.0 ms, 83.3% of all",
        "     ms   share  samples  module     callers",
        "5,000.0  100.0%        5  libc.so.6  read",
    ]
    assert report("--callees", "do_*", profile).splitlines()[3:] == [
        "3,000.0  60.0%        3  vmlinux  __x64_sys_read",
        "2,000.0  40.0%        2  vmlinux  __x64_sys_write",
    ]


def test_the_duration_of_a_profile_without_times_is_that_of_its_window(tmp_path):
    sample = WindowSample(READ, 7, "a", 0, None, [START, START])
    window = make_window(START, START + 30 * SECOND, ({}, [sample]), period_ns=SECOND)
    assert "30.0 s from 2020-09-13 12:26:40 UTC" in report(write_otlp(tmp_path / "a", window))


def test_callers_of_an_unknown_function_are_an_error(profile):
    message, hint = fails("--callers", "vfs_reed", profile)
    assert message == "no sample matches --callers vfs_reed"
    assert hint.startswith("existing values: vfs_read, ")
    assert fails("--callees", "main\x1b", profile)[0] == "no sample matches --callees main\\x1b"


def test_time_in_omitted_kernel_frames_counts_as_the_user_callers_self_time(profile):
    seconds = {name: own // SECOND for name, (own, _) in rows("--side", "user", profile).items()}
    assert seconds == {"read": 5, "compute": 1, "main": 0}


def test_omitting_kernel_frames_does_not_change_the_time_in_the_kernel(profile):
    for by in ("process", "line", "span"):
        whole, part = (
            json.loads(report("--json", "--by", by, *side, profile))["kinds"][0]["groups"]
            for side in ((), ("--side", "user"))
        )
        assert {(row["name"], row["kernel"]) for row in part} == {
            (row["name"], row["kernel"]) for row in whole
        }
        assert sum(row["kernel"] for row in part) == 5 * SECOND


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        (("--from", "1s"), 3),
        (("--to", "1"), 3),
        (("--from", "12:26:41", "--to", "12:26:42"), 2),
        (("--from", "2020-09-13T14:26:42+02:00"), 1),
        (("--from", "1500ms", "-p", "nginx"), 1),
    ],
)
def test_time_ranges_are_relative_or_absolute(profile, options, samples):
    assert sum(own for own, _ in rows(*options, profile).values()) == samples * SECOND


@pytest.mark.parametrize("times", [("--from", "1h"), ("--from", "2s", "--to", "1s")])
def test_a_time_range_without_samples_is_an_error(profile, tmp_path, times):
    for options in ([], ["-o", tmp_path / "a.html"]):
        message, hint = fails(*times, *options, profile)
        assert message == "no sample is in the time range of --from and --to"
        assert "2020-09-13T12:26:40 to 2020-09-13T12:26:42 (UTC)" in hint
    assert list(tmp_path.glob("*.html")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from", "noon"],
        ["--by", "colour"],
        ["--callers", "a", "--callees", "b"],
        ["--by", "syscall", "--side", "user"],
        ["--callers", "vfs_read", "-o", "a.html"],
        ["--by", "process", "-f", "folded"],
        ["--json", "-o", "-", "-f", "folded"],
        [],
    ],
)
def test_invalid_options_are_usage_errors(profile, arguments):
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments, *([profile] if arguments else [])])
    assert stop.value.code == 2


def test_samples_are_grouped_and_filtered_by_attribute(profile):
    by = ("--by", "process.executable.name")
    assert rows(*by, "--attribute", "process.executable.name=ng*", profile) == {
        "nginx": (4 * SECOND, 4 * SECOND)
    }


def test_profile_files_are_merged_and_filtered(profile):
    assert rows("-p", "nginx", "--by", "syscall", profile, profile) == {
        "read": (6 * SECOND, 6 * SECOND), "user mode": (2 * SECOND, 2 * SECOND)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("-p", "ngnix"), "--process ngnix", "existing values: nginx, dd, dd\\x1b[2J"),
        (("-p", "sshd", "-p", "cron"), "--process sshd or --process cron", "existing values: "),
        (("--function", "vfs_raed"), "--function vfs_raed", "existing values: vfs_read, vfs_write"),
        (("--module", "ext4"), "--module ext4", "existing values: libc.so.6, vmlinux"),
        (("--thread", "9"), "--thread 9", "existing values: nginx, dd"),
        (("--cpus", "7"), "--cpus 7", "existing values: 0, 1"),
        (("--kind", "off_cpu"), "--kind off_cpu", "existing values: on_cpu"),
        (("--span", "ff"), "--span ff", "existing values: " + "02" * 8),
        (("--service", "shop"), "--service shop", "no sample has a value for --service to match"),
        (("--attribute", "tenant.id=x"), "--attribute tenant.id=x", "existing values: tenant.id="),
        (("-p", "nginx", "--function", "vfs_write"), "all of --process, --function",
         "omit one of them"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "more", [(), ("--json",), ("-f", "folded"), ("--by", "part"), ("--by", "trace")]
)
def test_a_filter_without_matches_fails_and_lists_valid_values(profile, words, message, hint, more):
    result, fix = fails(*words, *more, profile)
    assert message in result
    assert fix.startswith(hint)


def test_processes_can_be_selected_by_thread_name_or_part_of_a_process_name(tmp_path):
    server = {"process.executable.name": "gunicorn (python3.11)", "process.pid": 7}
    threads = [
        WindowSample(READ, tid, name, 0, None, [START])
        for tid, name in ((7, "master"), (8, "pool-1"))
    ]
    shell = {"process.executable.name": "sh", "process.pid": 9}
    groups = [(server, threads), (shell, [WindowSample(WRITE, 9, "sh", 0, None, [START])])]
    window = make_window(START, START + SECOND, *groups, period_ns=SECOND, taken=3)
    path = tmp_path / "server.otlp"
    write_otlp(path, window)
    for name in ("gunicorn", "python3.11", "gunicorn (python3.11)", "pool-*", "7"):
        assert rows("-p", name, "--by", "comm", path) == {
            "master": (SECOND, SECOND),
            "pool-1": (SECOND, SECOND),
        }, name


def test_line_tables_are_sorted_by_total_and_other_tables_as_requested(tmp_path):
    def stack(name, line, kernel):
        frames = [make_frame("vfs_read")] if kernel else []
        lines = (Line(name, file="/srv/app.py", line=line),) if name else ()
        return Stack.from_frames([*frames, Frame(None, 2, lines, 0, PYTHON_SIDE)])

    samples = [
        WindowSample(stack("busy", 1, False), 7, "app", 0, None, [START] * 5),
        WindowSample(stack("reads", 2, True), 7, "app", 0, None, [START] * 3),
        WindowSample(stack("", 0, False), 7, "app", 0, None, [START] * 9),
    ]
    group = {"process.pid": 7}, samples
    window = make_window(START, START + SECOND, group, period_ns=SECOND, taken=17)
    path = tmp_path / "lines.otlp"
    write_otlp(path, window)

    def order(*words):
        return list(rows("--by", "line", *words, path))

    assert order() == ["busy (app.py:1)", "reads (app.py:2)", "[no line]"]
    assert order("--sort", "kernel") == ["reads (app.py:2)", "busy (app.py:1)", "[no line]"]
    assert list(rows("--by", "comm", "--sort", "name", path)) == ["app"]


def test_selected_samples_can_be_written_in_every_record_format(profile, tmp_path, capfd):
    report("--function", "vfs_*", "-o", tmp_path / "kept.otlp", profile)
    (window,) = decode_windows((tmp_path / "kept.otlp").read_bytes())
    assert window.sample_count == window.profiles[0].taken == 5
    main(["report", "--cpus", "1", "-f", "folded", profile])
    assert capfd.readouterr().out == (
        "dd\\x1b[2J;main;read;do_syscall_64_[k];__x64_sys_write_[k];vfs_write_[k] 2\n"
        "nginx;main;compute 1\n"
    )


@pytest.mark.parametrize("suffix", ["otlp", "otlp.jsonl"])
def test_several_windows_are_written_to_one_file(profile, tmp_path, suffix):
    report("-o", tmp_path / f"merged.{suffix}", profile, profile)
    assert rows("--by", "syscall", tmp_path / f"merged.{suffix}")["read"][0] == 6 * SECOND


def test_narrow_terminals_still_show_the_module(profile, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.cli.report.terminal_width", lambda: 60)
    assert report("-n", 1, profile).splitlines()[1].split()[-2:] == ["module", "function"]


def test_names_are_escaped_before_they_reach_the_terminal(profile):
    assert "dd\\x1b[2J (8)" in report("--by", "process", profile)


@pytest.mark.parametrize("width", [20, 40, 60, 100])
def test_report_lines_fit_the_terminal_width(profile, width, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.cli.report.terminal_width", lambda: width)
    for by in ("function", "process", "span", "line"):
        lines = report("--by", by, profile).splitlines()[1:]
        assert max(map(len, lines)) <= max(width, 26)
        assert all("%" in line or line.endswith(by) or " ms in " in line for line in lines)


def test_the_error_for_a_file_that_is_not_a_profile_states_the_cause_and_the_fix(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text(html([]))
    with pytest.raises(SystemExit) as stop:
        main(["report", str(path)])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: this is not a supported profile, but HTML")
    assert "\nfix: " in error


@pytest.mark.parametrize(("name", "cause"), [("gone", "No such file"), (".", "Is a directory")])
def test_unreadable_files_are_reported_without_a_traceback(tmp_path, capsys, name, cause):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / name)])
    assert f"error: cannot read {tmp_path / name}: {cause}" in capsys.readouterr().err


@pytest.mark.system
def test_a_closed_pipe_ends_the_command_quietly(profile):
    command = f"{sys.executable} -m otel_kprofiler report {profile} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_request_from_another_profiler_is_rendered_correctly_as_a_table():
    def samples(*options):
        return {name: (own / TICK, total / TICK) for name, (own, total) in rows(*options).items()}

    functions = samples(PEER)
    assert functions["read_zero"] == (90, 94)
    assert functions["get_random_bytes_user"] == (11, 85)
    assert functions["read_urandom"] == (0, 86)
    assert functions["count"] == (3, 19)
    assert functions["main"] == (0, 105)
    assert samples("--by", "syscall", PEER)["read"] == (182, 182)
    assert samples("--by", "line", PEER)["read_urandom (app.py:5)"] == (86, 86)
    processes = samples("--by", "process", PEER)
    assert {name.split()[0] for name in processes} == {"python3.11", "dd", "kdamond.0"}


def test_a_request_from_a_different_profiler_is_rendered_correctly_as_a_page(tmp_path):
    path = tmp_path / "peer.html"
    report("-o", path, PEER)
    result = data(path.read_text())
    names, frames, nodes = result["strings"], result["frames"]["name"], result["nodes"]["frame"]
    own = Counter()
    for node, count in zip(result["samples"]["node"], result["samples"]["count"], strict=True):
        own[names[frames[nodes[node]]]] += count
    assert own.total() == 209
    assert (own["read_zero"], own["chacha_permute"]) == (90, 51)
