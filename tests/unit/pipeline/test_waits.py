"""The pipeline assigns causes to waits, and adds exact totals to each window's samples."""

import pytest

from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    Frame,
    Line,
    ProcessKey,
    RawSample,
    Stack,
    Wait,
    WaitCause,
    WaitState,
    WaitTotals,
    Waker,
    WindowWaker,
)
from otel_kprofiler.pipeline import PipelineOptions
from otel_kprofiler.sampling import SamplerCounts
from tests.unit.pipeline.scripted import ScriptedSampler, Time, start_pipeline

SECOND = 1_000_000_000
PIPE = ("schedule", "anon_pipe_read", "vfs_read")
UNKNOWN = ("schedule", "synchronize_rcu")


class Source(ScriptedSampler):
    """A source of scripted wait samples and totals."""

    kinds = (ON_CPU, OFF_CPU)
    wait_threshold_ns = 2_000_000

    def __init__(self):
        super().__init__(Time())
        self.totals = {}

    def read_waits(self):
        totals, self.totals = self.totals, {}
        return totals

    def counts(self):
        counts = SamplerCounts(self.received, {}, self.received, {})
        return {"on_cpu": SamplerCounts(0, {}, 0, {}), "off_cpu": counts}


class Symbols:
    """Fake symbols that return the stack that was added for a sample's thread."""

    def __init__(self):
        self.stacks = {}

    def add(self, tid, names, *, is_provisional=False):
        stack = Stack.from_frames([Frame(None, 1, (Line(name),), 0, KERNEL_SIDE) for name in names])
        if is_provisional:
            stack = Stack(tuple(side._replace(is_provisional=True) for side in stack.sides))
        self.stacks[tid] = stack

    def finish(self, timeout_s):
        pass

    def advance(self, now_ns):
        return now_ns

    def find_all(self, samples, *, makes=True):
        return [None] * len(samples)

    def resolve(self, sample):
        return self.stacks[sample.tid]


@pytest.fixture
def parts(tmp_path):
    source, symbols, windows, whole = Source(), Symbols(), [], []
    options = PipelineOptions(whole_sink=whole.append)
    pipeline = start_pipeline(tmp_path, source, symbols, windows, options=options)
    return pipeline, source, symbols, windows, whole


def raw(source, tid, wait, value=700, tgid=5):
    return RawSample(
        OFF_CPU, value, source.time.boot + 5, 0, tgid, tid, 3, 1, b"work", (), (), None, 0, wait
    )


def sleep(**facts):
    return Wait(facts.pop("state", WaitState.INTERRUPTIBLE), 0, 0, **facts)


def off_cpu(window):
    (profile,) = [profile for profile in window.profiles if profile.kind == OFF_CPU]
    return profile


def test_wait_causes_are_derived_from_the_stack_and_the_state(parts):
    pipeline, source, symbols, windows, _ = parts
    symbols.add(1, PIPE)
    symbols.add(2, UNKNOWN)
    source.ready = [
        raw(source, 1, sleep()),
        raw(source, 1, sleep(state=WaitState.RUNNABLE)),
        raw(source, 1, sleep(state=WaitState.RUNNABLE, is_throttled=True)),
        raw(source, 1, sleep(is_ended=False)),
        raw(source, 2, sleep(in_iowait=True)),
        raw(source, 2, sleep(waker=Waker(8, 9, b"writer"))),
        raw(source, 2, sleep(waker=Waker(8, 9, b"writer"))),
        raw(source, 2, None),
    ]
    pipeline.step(1.5)
    waits = [(sample.wait, len(sample.values)) for _, sample in off_cpu(windows[0]).samples]
    results = [(wait and (wait.cause, wait.is_ended, wait.waker), count) for wait, count in waits]
    assert results == [
        ((WaitCause.PIPE, True, None), 1),
        ((WaitCause.RUN_QUEUE, True, None), 1),
        ((WaitCause.THROTTLED, True, None), 1),
        ((WaitCause.PIPE, False, None), 1),
        ((WaitCause.DISK, True, None), 1),
        ((WaitCause.OTHER, True, WindowWaker(8, 9, "writer")), 2),
        (None, 1),
    ]


def test_wait_causes_are_determined_when_a_window_closes(parts):
    pipeline, source, symbols, windows, _ = parts
    symbols.add(1, ("unknown",), is_provisional=True)
    source.ready = [raw(source, 1, sleep())]
    pipeline.step(0.5)
    symbols.add(1, PIPE)
    pipeline.step(1)
    ((_, sample),) = off_cpu(windows[0]).samples
    assert sample.wait.cause is WaitCause.PIPE


def test_wait_totals_per_window_sum_to_the_overall_totals(parts):
    pipeline, source, symbols, windows, whole = parts
    symbols.add(1, PIPE)
    sampled, ended = ProcessKey(5, 3), ProcessKey(6, 4)
    first, second = WaitTotals((1, 2, 3, 4, 5), 6, 1), WaitTotals((10, 0, 0, 0, 0), 1)
    rest = second._replace(has_ended=True)
    source.ready = [raw(source, 1, sleep())]
    source.totals = {sampled: first, ended: rest}
    pipeline.step(1.5)
    source.totals = {ended: rest}
    pipeline.step(1)
    source.totals = {sampled: second}
    pipeline.stop()

    def totals(window):
        groups = off_cpu(window).resources
        return {group.resource.attributes.get("process.pid"): group.waits for group in groups}

    assert list(map(totals, windows)) == [{5: first, None: second}, {None: second}, {5: second}]
    assert off_cpu(windows[0]).threshold_ns == 2_000_000
    assert [profile.waits for profile in windows[0].profiles if profile.kind != OFF_CPU] == [None]
    (everything,) = whole
    assert totals(everything) == {5: first.plus(second), None: second.plus(second)}
    assert off_cpu(everything).waits.total_ns == 15 + 3 * 10


def test_wait_causes_are_not_determined_if_disabled(parts, tmp_path):
    _, source, symbols, _, _ = parts
    windows = []
    pipeline = start_pipeline(tmp_path, source, symbols, windows, find_causes=False)
    symbols.add(1, PIPE)
    source.ready = [raw(source, 1, sleep())]
    pipeline.step(1.5)
    ((_, sample),) = off_cpu(windows[0]).samples
    assert (sample.wait.state, sample.wait.cause) == (WaitState.INTERRUPTIBLE, None)
