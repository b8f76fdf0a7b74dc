"""The counts of each sample kind are exact even if windows contain several kinds."""

import tempfile
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.delivery import Reporter
from otel_kprofiler.export import ExportQueue, ExportResult, ProfileExporter, Spool
from otel_kprofiler.model import (
    OFF_CPU,
    ON_CPU,
    Account,
    Form,
    LossCause,
    Profile,
    Resource,
    ResourceSamples,
    SampleCounts,
    Stack,
    StreamTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window

"""The kinds include a kind whose samples have values."""
KINDS = (ON_CPU, OFF_CPU)


class Receiver(ProfileExporter):
    """An exporter that accepts or rejects batches of samples as scripted."""

    form, max_bytes = Form.PROTOBUF, None

    def __init__(self, name, script=()):
        self.name = name
        self.script = iter(script)
        self.arrived = []

    def export(self, batch):
        if batch.sample_count and next(self.script, KEPT) == REJECTED:
            return ExportResult.failure(batch, LossCause.REJECTED, "")
        self.arrived.append(batch)
        return ExportResult.success(batch)

    def shutdown(self, timeout_millis=30_000):
        pass

    def counts(self):
        return sum((batch.sample_counts for batch in self.arrived), SampleCounts())

    def totals(self):
        payloads = [batch.payload for batch in self.arrived]
        assert [check_payload(payload) for payload in payloads] == [[]] * len(payloads)
        return {
            profile.kind.sample_type: profile.totals
            for window in decode_windows(payloads)
            for profile in window.profiles
        }


class Away(Receiver):
    def export(self, batch):
        return ExportResult.failure(batch, LossCause.RETRIES_EXHAUSTED, "")

    def find_outage(self):
        return "UNAVAILABLE"


class Interrupted(Receiver):
    """An exporter that hangs after a given number of requests, as if its process were killed."""

    def __init__(self, name, script, answers):
        super().__init__(name, script)
        self.answers = answers
        self.is_over, self.ends = threading.Event(), threading.Event()

    def export(self, batch):
        if not self.answers:
            self.is_over.set()
            self.ends.wait(30)
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "")
        self.answers -= 1
        return super().export(batch)

    def shutdown(self, timeout_millis=30_000):
        self.ends.set()


def kill(queue):
    """Stops a queue as SIGKILL would: nothing more is written, and the lock is released."""
    with queue._changed:
        queue._spool._release()
        queue._spool._closed = True
        queue._in_flight = None
        queue._waiting.remove(list(queue._waiting))
        queue._stopping = True
        queue._changed.notify_all()
    queue.exporter.ends.set()


class Run:
    """Builds the windows of one stream, from samples that the kernel took and did not lose."""

    def __init__(self, stream_id="ab", start_unix_ns=0):
        self.taken = SampleCounts()
        self.stream_id = stream_id
        self.start_unix_ns = start_unix_ns

    def window(self, samples):
        """Returns a window with the given sample count of each kind, in one process per kind."""
        self.taken.update({kind.name: count for kind, count in zip(KINDS, samples, strict=True)})
        start = self.start_unix_ns = self.start_unix_ns + 1000
        profiles = []
        for kind, count in zip(KINDS, samples, strict=True):
            times = range(start, start + count)
            values = [5] * count if kind is OFF_CPU else ()
            sample = WindowSample(Stack(()), 1, "t", 0, None, times, values)
            group = ResourceSamples(Resource({"host.name": "here"}), [sample] if count else [])
            taken = self.taken[kind.name]
            totals = StreamTotals(self.stream_id, taken, taken, {})
            profiles.append(Profile(kind, 10, [group], taken=count, totals=totals))
        return Window(start, start + 1000, profiles)

    def check(self, reporter):
        sampled = {kind: Account(count, count) for kind, count in self.taken.items()}
        account = Account.of_kinds(sampled, reporter.accounts())
        assert account.gaps() == []
        return account


def encoder(script):
    broken = iter(script)

    def encode(window, encoding):
        if window.sample_count and next(broken, False):
            raise ZeroDivisionError
        return encode_window(window, **encoding._asdict())

    return encode


@pytest.fixture(autouse=True, scope="module")
def _patience():
    """Extends the shutdown grace period, because the exporting thread may wait for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otel_kprofiler.export.queue._INTERRUPT_GRACE_S", 60)
        yield


KEPT, REJECTED = range(2)
SAMPLES = st.tuples(st.integers(0, 4), st.integers(0, 4))
EVENTS = st.lists(st.one_of(SAMPLES, st.sampled_from(["flush", "replace"])), max_size=15)
SCRIPT = st.lists(st.sampled_from([KEPT, REJECTED]), max_size=15)
BUGS = st.lists(st.booleans(), max_size=5)


@settings(deadline=None, max_examples=60)
@given(EVENTS, SCRIPT, BUGS, st.booleans())
def test_counts_of_each_sample_kind_are_exact_in_any_order_of_events(events, script, bugs, in_time):
    run, receivers = Run(), [Receiver("a", script)]
    reporter = Reporter([ExportQueue(receivers[0], size=2)], encoder=encoder(bugs), capacity=2)
    for event in events:
        if event == "flush":
            assert reporter.force_flush(10_000)
        elif event == "replace":
            receivers.append(Receiver("b" if receivers[-1].name == "a" else "a", script))
            reporter.replace([ExportQueue(receivers[-1], size=2)])
        else:
            reporter(run.window(event))
        run.check(reporter)
    reporter.shutdown(10_000 if in_time else 0)
    for exporter in run.check(reporter).exporters:
        arrived = sum((r.counts() for r in receivers if r.name == exporter.name), SampleCounts())
        for kind in run.taken:
            assert exporter.of_kind(kind).exported == arrived[kind]


@settings(deadline=None, max_examples=60)
@given(st.lists(SAMPLES, min_size=1, max_size=8), SCRIPT, BUGS, st.integers(0, 3))
def test_a_receiver_is_sent_the_loss_count_of_each_sample_kind(windows, script, bugs, before):
    run, first, receiver = Run(), Receiver("first"), Receiver("second", script)
    reporter = Reporter([ExportQueue(first)], encoder=encoder(bugs))
    queue = ExportQueue(receiver)
    for number, samples in enumerate(windows):
        if number == before:
            reporter.replace([queue])
        reporter(run.window(samples))
        assert reporter.force_flush(10_000)
    reporter.replace([queue])
    reporter.shutdown(10_000)
    run.check(reporter)
    arrived, totals = receiver.counts(), receiver.totals()
    for kind in KINDS:
        taken = run.taken[kind.name]
        if taken:
            counts = totals[kind.sample_type]
            assert counts.samples == counts.taken == taken
            assert arrived[kind.name] + sum(counts.lost.values()) == taken


@settings(deadline=None, max_examples=30)
@given(st.lists(SAMPLES, min_size=1, max_size=4), st.lists(SAMPLES, min_size=1, max_size=4), SCRIPT)
def test_losses_from_the_previous_run_are_reported_by_sample_kind(before, after, script):
    with tempfile.TemporaryDirectory() as directory:
        earlier = Run()
        spool = Spool(directory, fsync=False)
        reporter = Reporter([ExportQueue(Away("a"), spool=spool)], background=False)
        for samples in before:
            reporter(earlier.window(samples))
        reporter.shutdown(0)
        carried = earlier.check(reporter)
        receiver = Receiver("a", script)
        queue = ExportQueue(receiver, spool=Spool(directory, fsync=False))
        run, reporter = Run("cd", earlier.start_unix_ns + 1000), Reporter([queue])
        assert queue.force_flush(10_000)
        for samples in after:
            reporter(run.window(samples))
        reporter.shutdown(10_000)
        account = run.check(reporter)
        totals = receiver.totals()
        for kind in KINDS:
            one = account.exporters[0].of_kind(kind.name)
            assert one.carried == carried.exporters[0].of_kind(kind.name).pending
            if run.taken[kind.name]:
                counts = totals[kind.sample_type]
                assert counts.samples == run.taken[kind.name]
                assert counts.earlier_lost == one.carried_lost
                assert one.carried + counts.samples == one.exported + sum(
                    [*counts.lost.values(), *counts.earlier_lost.values()]
                )


RUN = st.tuples(st.lists(SAMPLES, max_size=4), SCRIPT, st.integers(0, 4))


@settings(deadline=None, max_examples=40)
@given(st.lists(RUN, min_size=1, max_size=4))
def test_the_last_run_reports_samples_and_losses_from_all_killed_runs(runs):
    with tempfile.TemporaryDirectory() as directory:
        start, arrived = 0, {kind.name: Counter() for kind in KINDS}
        for number, (windows, script, answers) in enumerate([*runs, ([(1, 1)], [], 1000)]):
            receiver = Interrupted("a", script, answers)
            queue = ExportQueue(receiver, spool=Spool(directory, fsync=False))
            reporter = Reporter([queue], background=False)
            run = Run(f"{number:032x}", start)
            for samples in windows:
                reporter(run.window(samples))
            while not receiver.is_over.is_set():
                if queue.force_flush(20):
                    break
            if number == len(runs):
                reporter.shutdown(10_000)
                run.check(reporter)
            else:
                kill(queue)
            start = run.start_unix_ns + 1000
            for batch in receiver.arrived:
                for kind, counts in arrived.items():
                    counts[batch.payload] = batch.sample_counts[kind]
        totals = receiver.totals()
        for kind in KINDS:
            counts = totals[kind.sample_type]
            lost = sum([*counts.lost.values(), *counts.earlier_lost.values()])
            assert counts.samples + counts.earlier_samples == arrived[kind.name].total() + lost
