"""The command ``diff`` compares profile files."""

import json
from collections import Counter

import pytest
from click.testing import CliRunner

from otel_kprofiler.cli.diff import command
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import OFF_CPU, ON_CPU, ProfileKind, Window, WindowSample
from tests.page import data
from tests.windows import make_profile, make_stack, make_window, write_otlp

SECOND = 10**9
START = 1_600_000_000 * SECOND
PERIOD = SECOND // 100


def write(path, parts, *, pid=7, idle_s=0):
    """Writes a profile with 100 samples per second. Each part is (seconds, percentage of reads)."""
    times = {"read": [], "write": []}
    now = START
    for seconds, percent in parts:
        for number in range(seconds * 100):
            times["read" if number * 37 % 100 < percent else "write"].append(now)
            now += PERIOD
    samples = [
        WindowSample(make_stack(f"vfs_{name}", f"__x64_sys_{name}"), pid, "dd", 0, None, result, [])
        for name, result in times.items()
    ]
    group = {"process.pid": pid}, samples
    return write_otlp(path, make_window(START, now + idle_s * SECOND, group, period_ns=PERIOD))


@pytest.fixture
def files(tmp_path):
    return write(tmp_path / "a", [(20, 20)]), write(tmp_path / "b", [(20, 60)])


def run(*words):
    return CliRunner().invoke(command, words)


def test_the_largest_increase_is_listed_first_with_both_percentages(files):
    done = run(*files, "--by", "syscall")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    side = "2,000 samples in 20.0 s (1,000.0 ms/s)"
    assert f"on_cpu: {side} -> {side}, by percentage of all samples" in lines[0]
    assert lines[1].startswith("2 of 2 changed")
    rows = {line.split()[-1]: line.split() for line in lines[3:]}
    assert rows["read"][0] == "+40.00%"
    assert rows["write"][0] == "-40.00%"
    assert rows["read"][2:4] == ["20.00%", "60.00%"]


def test_functions_are_compared_by_self_and_total_time(files):
    (kind,) = json.loads(run(*files, "--json").output)["kinds"]
    results = {group["name"]: group for group in kind["groups"]}
    assert results["__x64_sys_read"]["self"]["change"] == 0
    assert results["__x64_sys_read"]["total"]["change"] == pytest.approx(0.4)
    assert results["vfs_read"]["self"]["change"] == pytest.approx(0.4)
    assert all(group["changed"] for group in kind["groups"])


def test_the_per_time_option_compares_milliseconds_per_second(files):
    (kind,) = json.loads(run(*files, "--by", "syscall", "--per", "time", "--json").output)["kinds"]
    results = {group["name"]: group["self"] for group in kind["groups"]}
    assert results["read"]["before"] == pytest.approx(0.2e9, rel=0.01)
    assert results["read"]["after"] == pytest.approx(0.6e9, rel=0.01)


@pytest.fixture
def loads(tmp_path):
    """Writes two 20 s profiles with equal percentages: 20 s of work in one, 4 s in the other."""
    return write(tmp_path / "a", [(20, 50)]), write(tmp_path / "b", [(4, 50)], idle_s=16)


def test_a_load_change_is_reported_even_if_percentages_are_equal(loads):
    lines = run(*loads, "--by", "syscall").output.splitlines()
    assert (
        "2,000 samples in 20.0 s (1,000.0 ms/s) -> 400 samples in 20.0 s (200.0 ms/s)" in lines[0]
    )
    assert lines[1].endswith("compare it with --per time")
    assert lines[2].startswith("nothing changed")
    lines = run(*loads, "--by", "syscall", "--per", "time").output.splitlines()
    assert lines[1].startswith("2 of 2 changed")


def test_a_profile_without_samples_can_be_compared_only_per_unit_of_time(files, tmp_path):
    empty = write(tmp_path / "empty", [(20, 50)], pid=8)
    words = (files[0], empty, "--by", "syscall", "--process", "7")
    lines = run(*words).output.splitlines()
    assert "2,000 samples in 20.0 s (1,000.0 ms/s) -> 0 samples in 20.0 s (0.0 ms/s)" in lines[0]
    assert lines[1:] == [
        "the after side has no samples; --per time compares the other side with zero"
    ]
    lines = run(*words, "--per", "time").output.splitlines()
    assert lines[2].startswith("2 of 2 changed")
    assert [line.split()[0] for line in lines[4:]] == ["-800.00", "-200.00"]


def test_the_sample_kind_to_compare_can_be_selected(files):
    assert "read" in run(*files, "--by", "syscall", "--kind", "on_cpu").output
    assert "no sample matches --kind off_cpu" in str(run(*files, "--kind", "off_cpu").exception)


def test_a_diff_of_identical_profiles_reports_no_changes(files):
    done = run(files[0], files[0])
    assert "nothing changed by more than chance" in done.output
    assert all(line.startswith("~") for line in done.output.splitlines()[3:])


def test_two_intervals_in_one_profile_are_compared(tmp_path):
    path = write(tmp_path / "c", [(10, 20), (10, 60)])
    times = ("--time-before", "0s..10s", "--time-after", "10s..20s")
    (kind,) = json.loads(run(path, *times, "--by", "syscall", "--json").output)["kinds"]
    assert [kind[side]["samples"] for side in ("before", "after")] == [1000, 1000]
    assert kind["groups"][0]["changed"]


def test_profiles_without_a_common_kind_are_an_error(files, tmp_path):
    sample = WindowSample(make_stack("f"), 7, "dd", 0, None, [START], [5])
    window = make_window(START, START + SECOND, ({}, [sample]), kind=OFF_CPU, period_ns=0)
    done = run(files[0], write_otlp(tmp_path / "c", window), "--fail-above", "0")
    assert (done.exit_code, str(done.exception)) == (
        1, "the profiles have no sample kind in common"
    )  # fmt: skip
    assert "BEFORE has on_cpu (nanoseconds), and AFTER has off_cpu" in done.exception.hint


@pytest.mark.parametrize("times", ["30s..40s", "3s..1s", "2s..2s", "10:00:00..11:00:00"])
def test_a_time_range_outside_the_profile_is_an_error(tmp_path, times):
    path = write(tmp_path / "c", [(10, 20)])
    done = run(path, "--time-before", "0s..5s", "--time-after", times, "--fail-above", "0")
    assert (done.exit_code, str(done.exception)) == (
        1, "no sample is in the time range of --time-after"
    )  # fmt: skip
    assert "from 0s to 10.0s after the first sample" in done.exception.hint


def test_offsets_are_relative_to_the_first_sample_of_any_kind(tmp_path):
    """Waits begin 5 s after the on-CPU samples."""
    profiles = []
    for kind, start in ((ON_CPU, START), (OFF_CPU, START + 5 * SECOND)):
        times = [start + at * SECOND for at in range(5)]
        sample = WindowSample(make_stack("f"), 7, "dd", 0, None, times, [])
        profiles.append(make_profile(({}, [sample]), kind=kind, period_ns=10 * (kind == ON_CPU)))
    path = write_otlp(tmp_path / "c", Window(START, START + 10 * SECOND, profiles))
    done = run(path, "--time-before", "0s..5s", "--time-after", "5s..10s", "--json", "--idle")
    assert {
        kind["kind"]: (kind["before"]["samples"], kind["after"]["samples"])
        for kind in json.loads(done.output)["kinds"]
    } == {"on_cpu": (5, 0), "off_cpu": (0, 5)}


@pytest.mark.parametrize(("limit", "status"), [("39", 1), ("41", 0)])
def test_the_exit_status_reports_increases_above_a_limit(files, limit, status):
    assert run(*files, "--fail-above", limit).exit_code == status


@pytest.mark.parametrize(("limit", "status"), [("5", 1), ("7", 0)])
def test_growth_of_event_rates_is_a_percentage_of_all_events_before(tmp_path, limit, status):
    """One function grows from 500 to 560 of 1,000 events per second."""
    paths = []
    for number, counts in enumerate(({"f": 50, "g": 50}, {"f": 56, "g": 50})):
        samples = [
            WindowSample(
                make_stack(name), 7, "dd", 0, None,
                [START + at * SECOND // count for at in range(20 * count)],
                [10] * 20 * count,
            )
            for name, count in counts.items()
        ]  # fmt: skip
        kind = ProfileKind("page_faults", "page_faults", "count")
        window = make_window(START, START + 20 * SECOND, ({}, samples), kind=kind, period_ns=0)
        paths.append(write_otlp(tmp_path / str(number), window))
    assert run(*paths, "--per", "time", "--fail-above", limit).exit_code == status


def test_insignificant_increases_do_not_change_the_exit_status(files):
    assert run(files[0], files[0], "--fail-above", "0").exit_code == 0


def test_a_filter_without_matches_is_an_error(files):
    done = run(*files, "--process", "nobody")
    assert done.exit_code == 1
    assert isinstance(done.exception, KProfilerError)
    assert str(done.exception) == "no sample matches --process nobody"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "pass two sources, or one source with two time ranges"),
        (("--time-before", "3s", "--time-after", "1s..2s"), "is not a range such as 0s..30s"),
    ],
)
def test_comparing_a_single_file_requires_two_intervals(files, words, message):
    done = run(files[0], *words)
    assert done.exit_code == 2
    assert message in done.output


def test_a_page_shows_both_profiles_one_after_the_other(files, tmp_path):
    path = tmp_path / "change.html"
    assert run("-o", str(path), *files).exit_code == 0
    result = data(path.read_text())
    assert result["title"] == "a → b"
    half = result["bins"] // 2
    assert [(part["name"], part["bins"]) for part in result["parts"]] == [("a", half), ("b", half)]
    names = [result["strings"][name] for name in result["frames"]["name"]]
    sums = Counter()
    columns = (result["samples"][name] for name in ("node", "bin", "count"))
    for node, bin_number, count in zip(*columns, strict=True):
        sums[bin_number >= half, names[result["nodes"]["frame"][node]]] += count
    assert sums == {
        (False, "vfs_read"): 400, (False, "vfs_write"): 1600,
        (True, "vfs_read"): 1200, (True, "vfs_write"): 800,
    }  # fmt: skip


def test_a_page_that_compares_two_intervals_contains_only_their_samples(files, tmp_path):
    path = tmp_path / "change.html"
    times = ("--time-before", "0s..5s", "--time-after", "10s..20s")
    assert run("-o", str(path), *times, files[0]).exit_code == 0
    result = data(path.read_text())
    assert (result["title"], sum(result["samples"]["count"])) == ("a", 1500)
    assert [part["name"] for part in result["parts"]] == ["before", "after"]
    assert "5.0 s from 2020-09-13 12:26:40 UTC · 10.0 s from" in result["summary"]


def test_a_page_cannot_be_combined_with_json(files, tmp_path):
    done = run(*files, "--json", "-o", str(tmp_path / "a.json"))
    assert (done.exit_code, "use --json > FILE" in done.output) == (2, True)


def test_a_page_overwrites_a_file_only_with_force(files, tmp_path):
    path = tmp_path / "change.html"
    path.write_text("mine")
    assert "already exists" in str(run("-o", str(path), *files).exception)
    assert path.read_text() == "mine"
    assert run("--force", "-o", str(path), *files).exit_code == 0
