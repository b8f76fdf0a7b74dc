"""With a scripted sampler, the pipeline's event times, windows and sample counts are correct."""

import itertools

import pytest

from otel_kprofiler.model import KERNEL_SIDE, ON_CPU, Frame, LossCause, RawSample, Stack
from otel_kprofiler.pipeline import PipelineOptions, WindowSchedule
from otel_kprofiler.pipeline.windows import MAX_PACED_BATCH
from otel_kprofiler.sampling import SamplerCounts
from tests.unit.pipeline.scripted import ScriptedSampler, Time, start_pipeline

SECOND = 1_000_000_000


def raw(time_ns, cpu=0):
    return RawSample(ON_CPU, 1, time_ns, cpu, 0, 0, 1, 0, b"", (), (), None)


class ScriptedSymbols:
    """Symbols whose frame addresses are the current generation. Tests can stall the watermark."""

    def __init__(self):
        self.watermark = None
        self.generation = 0
        self.stacks = {}

    def finish(self, timeout_s):
        pass

    def advance(self, now_ns):
        return now_ns if self.watermark is None else self.watermark

    def find_all(self, samples, *, makes=True):
        return [None] * len(samples)

    def resolve(self, sample):
        frame = Frame(None, self.generation, (), 0, KERNEL_SIDE)
        return self.stacks.setdefault(self.generation, Stack.from_frames((frame,)))


@pytest.fixture
def parts(tmp_path):
    time = Time()
    sampler, symbols, windows = ScriptedSampler(time), ScriptedSymbols(), []
    pipeline = start_pipeline(tmp_path, sampler, symbols, windows)
    return pipeline, sampler, symbols, windows, time


def counts(windows):
    return [window.sample_count for window in windows]


def test_a_pipeline_that_shares_the_gil_pauses_between_small_batches(tmp_path):
    pauses, time = [], Time()
    sampler = ScriptedSampler(time)
    options = PipelineOptions(pause=lambda: pauses.append(1))
    pipeline = start_pipeline(tmp_path, sampler, ScriptedSymbols(), [], options=options)
    sampler.ready = [raw(time.boot + at) for at in range(100)]
    pipeline.step(0.1)
    assert len(pauses) >= 100 / MAX_PACED_BATCH


def test_each_sample_is_assigned_to_the_window_that_contains_its_timestamp(parts):
    pipeline, sampler, _symbols, windows, time = parts
    start = time.boot
    sampler.ready = [raw(start + SECOND + 5), raw(start + 5), raw(start + SECOND - 1, cpu=1)]
    pipeline.step(1.5)
    assert counts(windows) == [2]
    pipeline.stop()
    assert counts(windows) == [2, 1]
    assert windows[0].end_unix_ns == windows[1].start_unix_ns


def test_a_window_stays_open_until_all_its_samples_are_drained(parts):
    pipeline, sampler, _symbols, windows, time = parts
    start = time.boot
    sampler.complete = start + SECOND - 10
    pipeline.step(1.5)
    assert windows == []
    sampler.ready = [raw(start + SECOND - 5)]
    sampler.complete = None
    pipeline.step(0.1)
    assert counts(windows) == [1]


def test_a_finished_window_closes_immediately_unless_it_waits_for_symbols(parts):
    pipeline, sampler, symbols, windows, time = parts
    symbols.watermark = time.boot
    sampler.ready = [raw(time.boot + 1)]
    time.boot += SECOND + SECOND // 10
    waits = []
    for _ in range(2):
        before = time.boot
        pipeline.step(0.25)
        waits.append(time.boot - before)
    assert windows == []
    assert waits[0] < SECOND // 100 < SECOND // 4 == waits[1]
    symbols.watermark = None
    pipeline.step(0.25)
    assert counts(windows) == [1]


def test_an_idle_pipeline_sleeps_until_the_first_sample_or_the_end_of_the_window(parts):
    pipeline, sampler, _symbols, windows, time = parts
    sampler.first_after_s = 0.5
    sampler.ready = [raw(time.boot + SECOND // 2)] * 4
    pipeline.step(0.25, idle_s=5)
    assert sampler.waits == [("first", 1.005), ("more", 0.25)]
    sampler.waits.clear()
    pipeline.step(0.1, idle_s=5)  # the previous step had many samples
    assert sampler.waits == [("more", 0.1)]
    sampler.waits.clear()
    sampler.first_after_s = None
    pipeline.step(0.25, idle_s=5)
    assert sampler.waits == [("first", 0.155)]
    assert counts(windows) == [4]


def test_samples_are_held_while_their_processes_are_identified(parts):
    pipeline, sampler, symbols, windows, time = parts
    sampler.first_after_s = 0
    sampler.ready = [raw(time.boot + 1)]
    pipeline.step(0.2, longest_s=0.4, idle_s=5)
    assert symbols.stacks, "the first samples wait"
    symbols.stacks.clear()
    sampler.most_s = 0.2  # a new process ends the wait
    sampler.ready = [raw(time.boot + 1)._replace(tgid=8)]
    sampler.waits.clear()
    pipeline.step(0.2, longest_s=0.4, idle_s=5)
    assert sampler.waits == [("first", 0.605), ("new", 0.2, 0.4)]
    assert not symbols.stacks
    assert pipeline.account().waiting == 2
    assert pipeline.resources.find(raw(0)._replace(tgid=8))
    sampler.waits.clear()
    pipeline.step(0.2, longest_s=0.4, idle_s=5)
    assert sampler.waits == [("more", 0.2)]
    assert symbols.stacks
    sampler.ready = [raw(time.boot + 1)._replace(tgid=8)]
    pipeline.step(0.2, longest_s=10, idle_s=10)
    assert counts(windows) == [3], "the window did not end the wait"


def test_after_the_first_sample_the_pipeline_waits_for_more_samples(parts):
    pipeline, sampler, _symbols, windows, time = parts
    sampler.first_after_s = 0.1
    for _ in range(2):
        sampler.waits.clear()
        sampler.ready = [raw(time.boot + SECOND // 10)]
        pipeline.step(0.25, idle_s=5)
        assert [how for how, _ in sampler.waits] == ["first", "more"]
    sampler.first_after_s = None
    pipeline.step(0.25, idle_s=5)
    assert counts(windows) == [2]


def test_an_idle_pipeline_does_not_sleep_while_a_window_or_a_sample_waits_for_symbols(parts):
    pipeline, sampler, symbols, windows, time = parts
    symbols.watermark = time.boot
    sampler.ready = [raw(time.boot + 1)]
    pipeline.step(0.1)
    pipeline.step(0.1, idle_s=5)
    time.boot += SECOND
    pipeline.step(0.1, idle_s=5)
    sampler.waits.clear()
    pipeline.step(0.1, idle_s=5)
    assert sampler.waits == [("more", 0.1)]
    symbols.watermark = None
    pipeline.step(0.1, idle_s=5)
    assert counts(windows) == [1]


def test_samples_are_delayed_only_for_a_limited_time_while_symbols_are_updated(parts):
    pipeline, sampler, symbols, windows, time = parts
    start = time.boot
    symbols.watermark = start
    sampler.ready = [raw(start + 1)]
    pipeline.step(0.1)
    symbols.generation = 1
    symbols.watermark = start + 2
    pipeline.step(0.1)
    symbols.generation = 2
    sampler.ready = [raw(time.boot)]
    pipeline.step(0.1)
    assert len(symbols.stacks) == 1
    pipeline.step(0.45)
    assert len(symbols.stacks) == 2
    assert pipeline.account().waiting == 2
    pipeline.stop()
    (group,) = windows[-1].profiles[0].resources
    assert [sample.stack.frames[0].address for sample in group.samples] == [1, 2]


def test_the_sample_counts_add_up_after_stopping(parts):
    pipeline, sampler, _symbols, windows, time = parts
    start = time.boot
    sampler.ready = [raw(start + i * SECOND // 10) for i in range(25)]
    pipeline.step(1.2)
    sampler.lost = {LossCause.RING_FULL: 4}
    sampler.ready = [raw(time.boot)]
    pipeline.stop()
    account = pipeline.account()
    assert (account.taken, account.received, account.waiting) == (30, 26, 0)
    assert account.gaps() == []
    assert sum(window.profiles[0].taken for window in windows) == 30
    assert sum(window.profiles[0].lost.get(LossCause.RING_FULL, 0) for window in windows) == 4
    samples = 0
    for window in windows:
        samples += window.sample_count
        assert window.profiles[0].totals.samples == samples <= window.profiles[0].totals.taken
    totals = windows[-1].profiles[0].totals
    assert totals.taken == totals.samples + totals.lost[LossCause.RING_FULL] == 30
    assert {window.profiles[0].totals.stream_id for window in windows} == {totals.stream_id}


def test_samples_counted_by_the_kernel_but_never_received_are_reported_as_a_gap(parts):
    pipeline, sampler, *_ = parts
    sampler.ready = [raw(1)]
    sampler.counts = lambda: {"on_cpu": SamplerCounts(3, {}, 1, {})}
    pipeline.stop()
    (gap,) = pipeline.account().gaps()
    assert "took 3" in gap


def test_an_hour_in_suspend_creates_no_windows(parts):
    pipeline, sampler, _symbols, windows, time = parts
    sampler.ready = [raw(time.boot + 5)]
    pipeline.step(0.1)
    time.boot += 3600 * SECOND
    sampler.ready = [raw(time.boot - 2)]
    pipeline.step(0.1)
    sampler.ready = [raw(time.boot)]
    pipeline.step(2.5)
    assert len(windows) <= 4
    assert [window.sample_count for window in windows if window.sample_count] == [1, 2]
    assert windows[0].end_unix_ns - windows[0].start_unix_ns == SECOND
    starts = [window.start_unix_ns for window in windows]
    assert starts == sorted(starts)


def test_windows_remain_contiguous_after_the_profiler_is_delayed(parts):
    pipeline, sampler, _symbols, windows, time = parts
    start = time.boot
    sampler.ready = [raw(start + number * SECOND // 2) for number in range(1, 7, 2)]
    time.boot += 3 * SECOND
    pipeline.step(2.5)
    assert [window.sample_count for window in windows[:3]] == [1, 1, 1]
    for earlier, later in itertools.pairwise(windows[:3]):
        assert earlier.end_unix_ns == later.start_unix_ns


def test_a_stalled_watermark_does_not_delay_windows_forever(parts):
    pipeline, sampler, _symbols, windows, time = parts
    sampler.complete = start = time.boot
    sampler.ready = [raw(start + 5)]
    for _ in range(9):
        pipeline.step(1)
    assert counts(windows) == []
    for _ in range(3):
        pipeline.step(1)
    assert counts(windows)[0] == 1
    sampler.ready = [raw(start + 6)]
    pipeline.step(1)
    pipeline.stop()
    assert sum(counts(windows)) == 2
    assert pipeline.account().gaps() == []
    for window in windows:
        for _, sample in window.samples:
            for stamp in sample.timestamps_unix_ns:
                assert window.start_unix_ns <= stamp < window.end_unix_ns


def test_an_interrupted_step_does_not_lose_samples(parts):
    pipeline, sampler, symbols, windows, time = parts
    start, resolve, fail = time.boot, symbols.resolve, [True]

    def broken(sample):
        if sample.time_ns == start + 7 and fail:
            fail.clear()
            raise InterruptedError
        return resolve(sample)

    symbols.resolve = broken
    sampler.ready = [raw(start + number) for number in range(10)]
    with pytest.raises(InterruptedError):
        pipeline.step(0.1)
    assert pipeline.account().waiting == 10
    pipeline.step(0.1)
    pipeline.stop()
    assert sum(counts(windows)) == 10
    assert windows[-1].profiles[0].totals.samples == 10


def test_stopping_meets_its_deadline_and_counts_dropped_samples(parts):
    pipeline, sampler, symbols, windows, time = parts
    resolve, resolved = symbols.resolve, []

    def slow(sample):
        resolved.append(sample)
        if len(resolved) == 10:
            pipeline._deadline_s = 0.0  # the deadline passes
        return resolve(sample)

    symbols.resolve = slow
    sampler.ready = [raw(time.boot + number) for number in range(2000)]
    pipeline.stop(300)
    (window,) = windows
    assert 0 < window.sample_count < 2000
    assert window.profiles[0].lost == {LossCause.SHUTDOWN: 2000 - window.sample_count}
    assert window.profiles[0].totals.samples == window.profiles[0].totals.taken == 2000
    assert pipeline.account().gaps() == []


def test_a_pipeline_step_abandons_its_backlog_when_a_stop_is_requested(parts):
    pipeline, sampler, symbols, windows, time = parts
    resolve = symbols.resolve

    def interrupted(sample):
        if sample.time_ns == start + 3:
            pipeline.request_stop()
        return resolve(sample)

    sampler.wake = lambda: None
    symbols.resolve, start = interrupted, time.boot
    sampler.ready = [raw(start + number) for number in range(2000)]
    pipeline.step(1.5)
    assert windows == []
    assert pipeline.account().waiting == 2000
    pipeline.stop()
    assert counts(windows) == [2000, 0]
    assert pipeline.account().gaps() == []


def test_a_full_window_closes_before_the_next_sample_and_loses_no_samples(parts):
    pipeline, sampler, _symbols, windows, time = parts
    pipeline.change_windows(time.boot, WindowSchedule(5 * SECOND, max_samples=4))
    start = time.boot
    sampler.ready = [raw(start + offset) for offset in (1, 2, 3, 3, 4, 4, 4, 7, 8, 9, 10)]
    pipeline.step(1)
    del windows[0]  # the window closed by the settings change
    assert counts(windows) == [4, 4]
    sampler.ready = [raw(time.boot + offset) for offset in range(1, 7)]
    pipeline.stop()
    assert counts(windows) == [4, 4, 4, 4, 1]
    assert pipeline.account().gaps() == []
    for earlier, later in itertools.pairwise(windows):
        assert earlier.end_unix_ns <= later.start_unix_ns
    for window in windows:
        (group,) = window.profiles[0].resources
        for sample in group.samples:
            for time_ns in sample.timestamps_unix_ns:
                assert window.start_unix_ns <= time_ns < window.end_unix_ns
