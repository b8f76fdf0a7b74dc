"""Sums are weighted by time if a profile contains several sampling rates."""

import json

from otel_kprofiler.formats import folded, function_rows, speedscope, table
from otel_kprofiler.model import WindowSample
from tests.windows import make_stack, make_window


def make_sampled_window(function, times, period_ns, attributes):
    sample = WindowSample(make_stack(function), 1, "a", 0, None, times)
    return make_window(100, 200, (attributes, [sample]), period_ns=period_ns)


ATTRIBUTES = {"process.pid": 7, "process.executable.name": "a"}
WINDOWS = [
    make_sampled_window("slow", [110, 120], 50, ATTRIBUTES),
    make_sampled_window("fast", [130, 131, 132, 133], 5, ATTRIBUTES),
]
"""Two samples represent 100 ns, and four samples 20 ns."""


def test_folded_counts_are_times_if_periods_differ():
    assert folded(WINDOWS) == "a;fast_[k] 20\na;slow_[k] 100\n"
    assert folded(WINDOWS[1:]) == "a;fast_[k] 4\n"


def test_the_table_weights_functions_by_time_if_periods_differ():
    profiles = [profile for window in WINDOWS for profile in window.profiles]
    rows = {row.function: row.self_count for row in function_rows(profiles)}
    assert rows == {"slow": 100, "fast": 20}
    _, slow, fast, total = table(WINDOWS).splitlines()
    assert slow.split() == ["83.3%", "83.3%", "slow", "vmlinux"]
    assert fast.split() == ["16.7%", "16.7%", "fast", "vmlinux"]
    assert total == "120 nanoseconds, 2 functions"


def test_speedscope_weights_merged_stacks_by_time_if_periods_differ():
    everything, cpu = json.loads(speedscope(WINDOWS))["profiles"]
    assert (everything["unit"], everything["weights"]) == ("nanoseconds", [100, 20])
    assert (cpu["unit"], cpu["endValue"]) == ("nanoseconds", 120)
    everything, _ = json.loads(speedscope(WINDOWS[:1]))["profiles"]
    assert (everything["unit"], everything["weights"]) == ("none", [2])


def test_speedscope_omits_an_unknown_process_id():
    window = make_sampled_window("f", [110], 50, {"process.executable.name": "a"})
    frames = json.loads(speedscope([window]))["shared"]["frames"]
    assert [frame["name"] for frame in frames] == ["f", "a"]
