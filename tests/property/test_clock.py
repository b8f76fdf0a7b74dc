"""Windows remain correct if the clock is stepped, slewed or unset, and across suspend."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.clock import EARLIEST_UNIX_NS, Clock, StreamClock
from otel_kprofiler.model import KERNEL_SIDE, ON_CPU, Frame, RawSample, Resource, Stack
from otel_kprofiler.pipeline import WindowBuilder, WindowSchedule

SECOND = 1_000_000_000
STACK = Stack.from_frames((Frame(None, 1, (), 0, KERNEL_SIDE),))
RESOURCE = Resource({})


class Host:
    """Fake clocks that tests control. The Unix clock may run faster or slower than boottime."""

    def __init__(self, unix_ns):
        self.boot = 0
        self.unix = unix_ns

    def boot_ns(self):
        return self.boot

    def unix_ns(self):
        return self.unix

    def run(self, length, slew_ppm=0):
        self.boot += length
        self.unix += length + length * slew_ppm // 1_000_000


def raw(time):
    return RawSample(ON_CPU, 1, time, 0, 5, 7, 1, 0, b"", (), (), None)


steps = st.sampled_from([0, 0, 0, 0]) | st.integers(-400 * SECOND, 400 * SECOND)
spans = st.integers(0, 20 * SECOND) | st.just(3600 * SECOND)


@given(
    st.sampled_from([0, 5 * SECOND, 1_790_000_000 * SECOND]),
    st.lists(
        st.tuples(spans, st.lists(st.floats(0, 0.999), max_size=4), st.integers(-500, 500), steps),
        max_size=20,
    ),
)
def test_windows_do_not_overlap_and_each_sample_is_within_its_window(unix_at_start, intervals):
    host = Host(unix_at_start)
    builder = WindowBuilder(Clock(host), WindowSchedule(SECOND), start_boot_ns=0, period_ns=1)
    before = 0
    for length, places, slew_ppm, step in intervals:
        start = host.boot
        times = sorted(start + int(place * length) for place in places)
        for time in times:
            builder.add([raw(time)], [STACK], RESOURCE)
        host.run(length, slew_ppm)
        host.unix = max(0, host.unix + step)
        window = builder.close(host.boot)
        assert before <= window.start_unix_ns < window.end_unix_ns
        assert window.start_unix_ns >= EARLIEST_UNIX_NS
        stamps = [time for _, sample in window.samples for time in sample.timestamps_unix_ns]
        assert len(stamps) == len(times)
        assert stamps == sorted(stamps)
        assert all(window.start_unix_ns <= stamp < window.end_unix_ns for stamp in stamps)
        before = window.end_unix_ns


@given(st.integers(-400, 400), st.integers(1, 30))
def test_times_recover_from_a_clock_step_within_twice_the_size_of_the_step(step, interval):
    host = Host(1_790_000_000 * SECOND)
    stream = StreamClock(Clock(host))
    for length in (interval, interval):
        host.run(length * SECOND)
        stream.interval(host.boot - length * SECOND, host.boot)
    host.unix += step * SECOND
    ran = 0
    while ran <= 2 * max(0, -step):
        host.run(interval * SECOND)
        ran += interval
        converted = stream.interval(host.boot - interval * SECOND, host.boot)
    assert abs(converted.end_unix_ns - host.unix) <= 1
    host.run(interval * SECOND)
    converted = stream.interval(host.boot - interval * SECOND, host.boot)
    assert converted.end_unix_ns - converted.start_unix_ns == interval * SECOND


@given(st.lists(st.integers(0, 10 * SECOND), max_size=20).map(sorted), st.integers(-9, 0))
def test_converted_times_have_the_same_differences_unless_the_clock_is_set(times, step):
    host = Host(1_790_000_000 * SECOND)
    clock = Clock(host)
    host.run(10 * SECOND + 1)
    converted = StreamClock(clock).interval(0, host.boot).to_unix_ns(times)
    assert [one - converted[0] for one in converted] == [time - times[0] for time in times]
    assert converted == [clock.to_unix_ns(time) for time in times]
