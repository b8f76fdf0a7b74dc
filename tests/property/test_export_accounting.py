"""Export accounting against brute force: any choice of a receiver, any order of events."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.export import ExportOutcome, ExportQueue, ExportResult, ProfileExporter
from otel_kprofiler.export.retry import Answer, Verdict
from otel_kprofiler.export.sender import _accepted
from otel_kprofiler.model import Batch, Form, LossCause


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(-1, 8))
def test_exported_is_never_overstated_whichever_profiles_were_rejected(samples, rejected):
    batch = Batch(b"", Form.PROTOBUF, tuple(samples), 0, 1)
    result = _accepted(batch, Answer(Verdict.ACCEPTED, "OK", "", rejected))
    number = max(0, min(rejected, len(samples)))
    arrived = [sum(samples) - sum(chosen) for chosen in combinations(samples, number)]
    assert result.exported == min(arrived)
    assert result.exported + sum(result.lost.values()) == sum(samples)


class Scripted(ProfileExporter):
    """Ends each export with the outcome that a number selects."""

    name, form, max_bytes = "scripted", Form.PROTOBUF, None

    def __init__(self, script):
        self.script = iter(script)
        self.arrived = []

    def export(self, batch):
        (samples,) = batch.profile_samples
        kept = samples * next(self.script, 4) // 4
        self.arrived.append((batch.start_unix_ns, kept))
        lost = {LossCause.REJECTED: samples - kept} if kept < samples else {}
        return ExportResult(ExportOutcome.SUCCESS, kept, lost)

    def shutdown(self, timeout_millis=30_000):
        pass


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.just("flush")), max_size=40),
    st.lists(st.integers(0, 4), max_size=40),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_queue_accounts_for_every_sample_in_any_order_of_events(events, script, size, in_time):
    exporter = Scripted(script)
    queue = ExportQueue(exporter, size=size)
    put = 0
    for number, event in enumerate(events):
        if event == "flush":
            assert queue.force_flush(5000)
            assert queue.counts().queued == 0
        else:
            queue.put(Batch(b"x", Form.PROTOBUF, (event,), number, number + 1))
            put += event
        counts = queue.counts()
        assert counts.accepted == put
        assert put == counts.exported + sum(counts.lost.values()) + counts.queued
    queue.shutdown(5000 if in_time else 0)
    counts = queue.counts()
    assert (counts.accepted, counts.queued) == (put, 0)
    assert counts.exported == sum(kept for _, kept in exporter.arrived)
    assert exporter.arrived == sorted(exporter.arrived)
    assert put == counts.exported + sum(counts.lost.values())
    assert all(count > 0 for count in counts.lost.values())
