"""Export accounting is exact for any receiver behaviour and any order of events."""

import tempfile
import threading
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.export import ExportQueue, ExportResult, ProfileExporter, Spool
from otel_kprofiler.export.retry import Answer, Verdict
from otel_kprofiler.export.sender import _accepted
from otel_kprofiler.model import Batch, Form, LossCause, ProfileSamples, SampleCounts, sum_losses

KINDS = st.sampled_from(["on_cpu", "off_cpu", "other"])
PROFILES = st.builds(ProfileSamples, KINDS, st.integers(0, 9))
EVENTS = st.lists(
    st.one_of(st.lists(PROFILES, min_size=1, max_size=4), PROFILES, st.just("flush")), max_size=30
)
UNREACHABLE = 5


@pytest.fixture(autouse=True, scope="module")
def _patience():
    """Extends the grace period at shutdown, because the exporting thread may wait for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otel_kprofiler.export.queue._INTERRUPT_GRACE_S", 60)
        yield


SCRIPT = st.lists(st.integers(0, UNREACHABLE), max_size=30)


@given(st.lists(PROFILES, max_size=6), st.integers(-1, 8))
def test_the_exported_count_is_never_too_high_if_profiles_are_rejected(profiles, rejected):
    batch = Batch(b"", Form.PROTOBUF, tuple(profiles), 0, 1)
    result = _accepted(batch, Answer(Verdict.ACCEPTED, "OK", "", rejected))
    number = max(0, min(rejected, len(profiles)))
    for kind, samples in batch.sample_counts.items():
        arrived = [
            samples - sum(batch.samples for batch in chosen if batch.kind == kind)
            for chosen in combinations(profiles, number)
        ]
        assert result.kinds[kind].exported == min(arrived)
    assert result.counts() == batch.sample_counts


class Scripted(ProfileExporter):
    """An exporter with a script: how many quarters of each batch arrive, or UNREACHABLE."""

    name, form, max_bytes = "scripted", Form.PROTOBUF, None

    def __init__(self, script):
        self.script = iter(script)
        self.order = []
        self.arrived = SampleCounts()
        self.stopped = threading.Event()

    def export(self, batch):
        quarters = next(self.script, 4)
        if self.stopped.is_set():
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "")
        if quarters == UNREACHABLE:
            return ExportResult.failure(batch, LossCause.RETRIES_EXHAUSTED, "")
        samples = batch.sample_counts
        rejected = {kind: count - count * quarters // 4 for kind, count in samples.items()}
        self.order.append(batch.start_unix_ns)
        self.arrived.update(samples)
        self.arrived.subtract(rejected)
        return ExportResult.success(batch, rejected=rejected)

    def shutdown(self, timeout_millis=30_000):
        self.stopped.set()


def by_kind(counts, field):
    return SampleCounts({kind: getattr(one, field) for kind, one in counts.kinds.items()})


def check(queue, put, earlier):
    counts = queue.counts()
    assert by_kind(counts, "accepted") == put
    assert by_kind(counts, "carried") == earlier
    for kind in counts.kinds.values():
        assert kind.accepted + kind.carried == kind.exported + sum(kind.lost.values()) + kind.queued
        assert all(count > 0 for count in kind.lost.values())
    for field in ("accepted", "exported", "queued", "carried"):
        assert getattr(counts, field) == by_kind(counts, field).total()
    assert counts.lost == sum_losses(kind.lost for kind in counts.kinds.values())
    return counts


def run(queue, events, earlier):
    put = SampleCounts()
    for number, event in enumerate(events):
        if event == "flush":
            assert queue.force_flush(60_000)
            assert queue.counts().queued == 0
        elif isinstance(event, ProfileSamples):
            queue.record_loss({event.kind: event.samples}, LossCause.TOO_LARGE)
            put[event.kind] += event.samples
        else:
            batch = Batch(b"x" * 50, Form.PROTOBUF, tuple(event), number, number + 1)
            queue.put(batch)
            put.update(batch.sample_counts)
        check(queue, put, earlier)
    return put


@settings(deadline=None)
@given(EVENTS, SCRIPT, st.integers(1, 4), st.booleans())
def test_a_queue_accounts_for_every_sample_regardless_of_event_order(events, script, size, in_time):
    exporter = Scripted(script)
    queue = ExportQueue(exporter, size=size)
    put = run(queue, events, SampleCounts())
    queue.shutdown(60_000 if in_time else 0)
    counts = check(queue, put, SampleCounts())
    assert counts.queued == 0
    assert by_kind(counts, "exported") == exporter.arrived
    assert exporter.order == sorted(exporter.order)


@settings(deadline=None)
@given(st.lists(st.tuples(EVENTS, SCRIPT, st.booleans()), min_size=1, max_size=4))
def test_a_spool_keeps_the_counts_of_each_sample_kind_for_the_next_run(runs):
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("otel_kprofiler.export.queue._LONGEST_PAUSE_S", 0.001)
        earlier = SampleCounts()
        for events, script, in_time in runs:
            exporter = Scripted(script)
            queue = ExportQueue(exporter, spool=Spool(directory, max_bytes=4000, fsync=False))
            put = run(queue, events, earlier)
            queue.shutdown(60_000 if in_time else 0)
            counts = check(queue, put, earlier)
            assert by_kind(counts, "exported") == exporter.arrived
            assert queue.unknown_since_unix_ns == 0
            earlier = by_kind(counts, "queued")
