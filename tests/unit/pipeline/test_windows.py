"""Windows group identical samples, contain their timestamps, and have the correct length."""

from bisect import bisect_right
from itertools import pairwise

import pytest

from otel_kprofiler.clock import Clock
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    STACK_OK,
    Frame,
    RawSample,
    Resource,
    Side,
    Stack,
)
from otel_kprofiler.pipeline import EventTimeGate, WindowBuilder, WindowCounts, WindowSchedule

SECOND = 1_000_000_000
PERIOD_NS = 10_000_000
RESOLUTION_NS = 8192
"""The largest power of two within a thousandth of the period."""


class FakeTime:
    def __init__(self, boot_ns=0, offset_ns=1_700_000_000 * SECOND):
        self.boot, self.offset = boot_ns, offset_ns

    def boot_ns(self):
        return self.boot

    def unix_ns(self):
        return self.boot + self.offset


def raw(time_ns, tid=7, cpu=0, comm=b"work"):
    return RawSample(ON_CPU, 1, time_ns, cpu, 5, tid, 1, 0, comm, (), (), None)


def stack_of(*, is_provisional=False):
    return Stack((Side(KERNEL_SIDE, (), STACK_OK, is_provisional),))


COUNTS = {"on_cpu": WindowCounts()}


def builder(source=None, start=0, **kwargs):
    schedule = kwargs.pop("schedule", WindowSchedule(5 * SECOND))
    clock = Clock(source or FakeTime())
    return WindowBuilder(clock, schedule, start_boot_ns=start, period_ns=PERIOD_NS, **kwargs)


def test_identical_samples_share_one_entry_with_all_timestamps():
    windows, stack, resource = builder(), stack_of(), Resource({})
    for time in (10, 20, 30):
        windows.add([raw(time)], [stack], resource)
    windows.add([raw(40, tid=8)], [stack], resource)
    window = windows.close(counts={"on_cpu": WindowCounts(taken=4)})
    (group,) = window.profiles[0].resources
    assert [len(sample.timestamps_unix_ns) for sample in group.samples] == [3, 1]
    assert window.sample_count == window.profiles[0].taken == 4


def test_timestamps_are_within_the_half_open_interval_of_their_window():
    windows, resource = builder(start=100), Resource({})
    windows.add([raw(100)], [stack_of()], resource)
    windows.add([raw(5 * SECOND + 99)], [stack_of()], resource)
    window = windows.close()
    times = [t for s in window.profiles[0].resources[0].samples for t in s.timestamps_unix_ns]
    assert window.start_unix_ns == min(times)
    assert max(times) < window.end_unix_ns < max(times) + RESOLUTION_NS
    assert window.end_unix_ns - window.start_unix_ns == 5 * SECOND


def test_only_on_cpu_times_are_rounded():
    """A timer's samples are not more exact; the times of events are."""
    windows, resource = builder(kinds=(ON_CPU, OFF_CPU)), Resource({})
    moments = [RESOLUTION_NS - 1, RESOLUTION_NS, 3 * RESOLUTION_NS + 5]
    for time in moments:
        windows.add([raw(time)], [stack_of()], resource)
        windows.add([raw(time)._replace(kind=OFF_CPU)], [stack_of()], resource)
    window = windows.close()
    rounded, exact = (
        [time for s in profile.resources[0].samples for time in s.timestamps_unix_ns]
        for profile in window.profiles
    )
    offset_ns = window.start_unix_ns - window.start_unix_ns % SECOND
    assert exact == [time + offset_ns for time in moments]
    expected = [time // RESOLUTION_NS * RESOLUTION_NS for time in exact]
    assert rounded == [max(time, window.start_unix_ns) for time in expected]


def test_a_sample_before_the_start_of_its_window_moves_the_start_earlier():
    windows = builder(start=100)
    windows.add([raw(50)], [stack_of()], Resource({}))
    window = windows.close()
    assert window.start_unix_ns == window.profiles[0].resources[0].samples[0].timestamps_unix_ns[0]


def lengths_s(closed):
    return [(window.end_unix_ns - window.start_unix_ns) / SECOND for window in closed]


def test_windows_are_short_until_the_first_sample_arrives():
    windows = builder(schedule=WindowSchedule(5 * SECOND, first_ns=SECOND))
    closed = [windows.close()]
    windows.add([raw(SECOND + 1)], [stack_of()], Resource({}))
    closed += [windows.close(), windows.close()]
    assert lengths_s(closed) == [1, 2, 5]
    assert [bool(window.sample_count) for window in closed] == [False, True, False]
    assert all(window.end_unix_ns == next_.start_unix_ns for window, next_ in pairwise(closed))


def test_the_lengths_of_initial_empty_windows_double_up_to_the_configured_interval():
    windows = builder(schedule=WindowSchedule(5 * SECOND, first_ns=SECOND))
    assert lengths_s([windows.close() for _ in range(5)]) == [1, 2, 4, 5, 5]


def test_frames_in_unknown_modules_are_resolved_again_when_the_window_closes():
    windows, resource = builder(), Resource({})
    known, unknown = stack_of(), stack_of(is_provisional=True)
    windows.add([raw(1)], [known], resource)
    windows.add([raw(2)], [unknown], resource)
    windows.add([raw(3)], [unknown], resource)
    better, asked = stack_of(), []
    window = windows.close(resolve_again=lambda sample: asked.append(sample) or better)
    assert [sample.time_ns for sample in asked] == [2, 3]
    assert [sample.stack for sample in window.profiles[0].resources[0].samples] == [known, better]


def stack_at(address):
    return Stack((Side(KERNEL_SIDE, (Frame(None, address, (), 0, KERNEL_SIDE),)),))


def test_frames_are_resolved_again_for_each_thread():
    """Processes may have different functions at one address."""
    windows, unknown, resource = builder(), stack_of(is_provisional=True), Resource({})
    names = {tid: stack_at(tid) for tid in (7, 8)}
    for tid in names:
        windows.add([raw(tid)._replace(tid=tid)], [unknown], resource)
    window = windows.close(resolve_again=lambda sample: names[sample.tid])
    samples = window.profiles[0].resources[0].samples
    assert {sample.tid: sample.stack for sample in samples} == names


@pytest.mark.parametrize("changes", [(), (2,), (8,), (3, 5), (2, 5, 6)])
def test_samples_are_resolved_again_as_of_their_time(changes):
    """Generated code may be replaced at the same address."""
    windows, unknown, resource = builder(), stack_of(is_provisional=True), Resource({})
    stacks = [stack_at(number) for number in range(len(changes) + 1)]
    right = {time_ns: stacks[bisect_right(changes, time_ns)] for time_ns in range(1, 9)}
    for time_ns in right:
        windows.add([raw(time_ns)._replace(value=100 + time_ns)], [unknown], resource)
    asked = []
    window = windows.close(resolve_again=lambda one: asked.append(one) or right[one.time_ns])
    samples = window.profiles[0].resources[0].samples
    assert right == {value - 100: one.stack for one in samples for value in one.values}
    assert changes or len(asked) == 2


@pytest.mark.parametrize("unit", [0.0, 0.25, 0.999])
def test_window_jitter_stays_within_its_bounds(unit):
    assert 800 <= WindowSchedule(1000, jitter=0.2).length_ns(unit) <= 1200


def test_the_gate_waits_at_most_max_wait_ns_for_the_slowest_stream():
    gate = EventTimeGate(max_wait_ns=100)
    assert gate.passed_ns(samples_ns=1000, symbols_ns=950, now_ns=1000) == 950
    assert gate.passed_ns(samples_ns=1000, symbols_ns=10, now_ns=1000) == 900
    assert gate.passed_ns(samples_ns=800, symbols_ns=5000, now_ns=1000) == 800


def test_the_gate_releases_samples_in_time_order():
    gate = EventTimeGate()
    gate.push([raw(30), raw(10)])
    gate.push([raw(20), raw(40)])
    assert [sample.time_ns for sample in gate.release(30)] == [10, 20]
    assert gate.counts == {"on_cpu": 2}
    assert [sample.time_ns for sample in gate.release(100)] == [30, 40]
    assert not gate.counts


def test_a_settings_change_closes_the_window_and_applies_to_the_next():
    windows = builder()
    windows.change(2 * SECOND, WindowSchedule(3 * SECOND), 5_000_000)
    windows.change(4 * SECOND, WindowSchedule(7 * SECOND), 1_000_000)
    closed = [windows.close(counts=COUNTS) for _ in range(3)]
    lengths = [window.end_unix_ns - window.start_unix_ns for window in closed]
    assert lengths == [2 * SECOND, 2 * SECOND, 7 * SECOND]
    assert [window.profiles[0].period_ns for window in closed] == [10_000_000, 5_000_000, 1_000_000]


def test_a_change_that_takes_effect_after_a_window_ends_applies_to_the_next_window():
    windows = builder()
    windows.change(6 * SECOND, WindowSchedule(5 * SECOND), 1)
    closed = [windows.close(counts=COUNTS) for _ in range(3)]
    assert [window.profiles[0].period_ns for window in closed] == [10_000_000, 10_000_000, 1]
    assert closed[1].end_unix_ns - closed[1].start_unix_ns == SECOND


def test_invalid_utf8_in_thread_names_is_escaped():
    windows = builder()
    windows.add([raw(1, comm=b"\xffx")], [stack_of()], Resource({}))
    (group,) = windows.close(2).profiles[0].resources
    assert [sample.thread_name for sample in group.samples] == ["\\xffx"]
