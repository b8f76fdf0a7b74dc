"""The reporter computes each encoding once, and its sample counts are always exact."""

import dataclasses
import threading

import pytest

from otel_kprofiler.delivery import MAX_WAITING_SAMPLES, Reporter
from otel_kprofiler.export import ExportQueue, ExportResult, ProfileExporter, Spool
from otel_kprofiler.model import (
    OFF_CPU,
    Account,
    AttributeForm,
    Batch,
    Form,
    LockTotal,
    LossCause,
    ProfileSamples,
    Stack,
    StreamTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import Encoded, check_payload, decode_windows
from tests.waiting import wait_until
from tests.windows import make_window


class Collecting(ProfileExporter):
    """An exporter that waits until ``open`` is set, then records the batch."""

    def __init__(self, name, form=Form.PROTOBUF, max_bytes=None, attributes=AttributeForm.INLINE):
        self.name, self.form, self.max_bytes, self.attributes = name, form, max_bytes, attributes
        self.batches = []
        self.open = threading.Event()
        self.open.set()

    def export(self, batch):
        self.open.wait(30)
        self.batches.append(batch)
        return ExportResult.success(batch)

    def force_flush(self, timeout_millis=30_000):
        return True

    def shutdown(self, timeout_millis=30_000):
        self.open.set()


def sized_window(size):
    sample = WindowSample(Stack.from_frames(()), 1, "t", 0, None, range(size))
    return make_window(0, 1, ({}, [sample]))


def batch_of(form, samples):
    return Batch(b"x", form, (ProfileSamples("on_cpu", samples),), 0, 1)


def encoder(calls):
    def encode(window, encoding):
        calls.append((window.sample_count, *encoding))
        return Encoded((batch_of(encoding.form, window.sample_count - 1),), {"on_cpu": 1})

    return encode


class Held:
    """An encoder that waits for ``release``."""

    def __init__(self):
        self.entered, self.release, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, window, encoding):
        self.entered.set()
        self.release.wait(30)
        self.ended.set()
        return Encoded((batch_of(encoding.form, window.sample_count),), {})


def account_of(reporter, received):
    return Account.of_kinds({"on_cpu": Account(received, received)}, reporter.accounts())


def test_each_encoding_of_a_window_is_computed_once():
    calls = []
    exporters = [
        Collecting("a"),
        Collecting("b"),
        Collecting("c", Form.JSON, 100),
        Collecting("d", attributes=AttributeForm.REFERENCES),
    ]
    reporter = Reporter([ExportQueue(e) for e in exporters], encoder=encoder(calls))
    reporter(sized_window(10))
    assert reporter.force_flush(10_000)
    assert sorted((call[:4] for call in calls), key=str) == [
        (10, Form.JSON, 100, AttributeForm.INLINE),
        (10, Form.PROTOBUF, None, AttributeForm.INLINE),
        (10, Form.PROTOBUF, None, AttributeForm.REFERENCES),
    ]
    assert all(len(exporter.batches) == 1 for exporter in exporters)
    assert exporters[0].batches[0] is exporters[1].batches[0]
    reporter.shutdown(1000)
    assert account_of(reporter, 10).gaps() == []
    assert {a.name: a.lost for a in reporter.accounts()} == {
        name: {LossCause.TOO_LARGE: 1} for name in "abcd"
    }


def test_a_slow_exporter_does_not_delay_other_exporters():
    slow, quick = Collecting("slow"), Collecting("quick")
    slow.open.clear()
    reporter = Reporter([ExportQueue(slow), ExportQueue(quick)], encoder=encoder([]))
    for _ in range(5):
        reporter(sized_window(2))
    wait_until(lambda: len(quick.batches) == 5)
    assert not reporter.force_flush(10)
    assert account_of(reporter, 10).gaps() == []
    slow.open.set()
    reporter.shutdown(10_000)
    assert len(slow.batches) == 5


def test_an_encoder_bug_discards_a_single_window_and_its_samples_are_counted_as_lost(caplog):
    def broken(window, encoding):
        if window.sample_count == 3:
            raise ZeroDivisionError
        return encoder([])(window, encoding)

    reporter = Reporter([ExportQueue(Collecting("a"))], encoder=broken)
    for size in (2, 3, 4):
        reporter(sized_window(size))
    assert reporter.force_flush(10_000)
    (account,) = reporter.accounts()
    assert account.lost == {LossCause.INTERNAL: 3, LossCause.TOO_LARGE: 2}
    assert account.exported == 4
    assert "ZeroDivisionError" in caplog.text
    reporter.shutdown(1000)


@pytest.mark.parametrize("windows", [3, 10])
def test_the_oldest_window_is_dropped_and_counted_if_the_reporter_queue_is_full(windows):
    exporter, held = Collecting("a"), Held()
    reporter = Reporter([ExportQueue(exporter)], encoder=held, capacity=2)
    for size in range(1, windows + 1):
        reporter(sized_window(size))
        assert held.entered.wait(10)
    received = windows * (windows + 1) // 2
    assert account_of(reporter, received).gaps() == []
    held.release.set()
    reporter.shutdown(10_000)
    assert account_of(reporter, received).gaps() == []
    assert exporter.batches[-1].sample_count == windows
    (account,) = reporter.accounts()
    assert account.pending == 0
    assert (account.lost.get(LossCause.QUEUE_FULL, 0) > 0) == (windows > 3)


def test_the_number_of_samples_in_waiting_windows_is_limited():
    exporter, held = Collecting("a"), Held()
    reporter = Reporter([ExportQueue(exporter)], encoder=held)
    reporter(sized_window(1))
    assert held.entered.wait(10)
    half = MAX_WAITING_SAMPLES // 2
    for size in (half, half, half + 1, 3 * half):
        reporter(sized_window(size))
    (account,) = reporter.accounts()
    assert account.lost == {LossCause.QUEUE_FULL: 3 * half + 1}
    assert account.pending == 1 + 3 * half
    held.release.set()
    reporter.shutdown(10_000)
    assert [batch.sample_count for batch in exporter.batches] == [1, 3 * half]


def test_windows_are_counted_as_lost_if_the_shutdown_timeout_ends_before_they_are_encoded():
    held = Held()
    reporter = Reporter([ExportQueue(Collecting("a"))], encoder=held)
    for _ in range(3):
        reporter(sized_window(5))
    reporter.shutdown(200)
    (account,) = reporter.accounts()
    assert account.lost[LossCause.SHUTDOWN] >= 10
    assert account_of(reporter, 15).gaps() == []
    held.release.set()


def test_nothing_is_pending_after_a_shutdown_during_encoding():
    exporter, held = Collecting("a"), Held()
    reporter = Reporter([ExportQueue(exporter)], encoder=held)
    reporter(sized_window(5))
    assert held.entered.wait(10)
    reporter.shutdown(200)
    for _ in range(2):
        (account,) = reporter.accounts()
        assert (account.pending, account.lost) == (0, {LossCause.SHUTDOWN: 5})
        held.release.set()
        assert held.ended.wait(10)
    assert exporter.batches == []


def test_samples_lost_at_shutdown_are_counted_and_reported():
    exporter = Refusing("a")
    reporter = Reporter([ExportQueue(exporter)])
    window = window_of(5, 1000, stream(12))
    profile = dataclasses.replace(window.profiles[0], lost={LossCause.SHUTDOWN: 7})
    reporter(dataclasses.replace(window, profiles=[profile]))
    reporter.shutdown(10_000)
    assert account_of(reporter, 12).gaps() == []
    arrived, last = reported(exporter)
    assert last.profiles[0].totals.lost == {LossCause.SHUTDOWN: 7}
    assert arrived + 7 == last.profiles[0].totals.samples


def test_losses_at_one_receiver_are_not_reported_to_another():
    seen = []

    def watching(window, encoding):
        seen.append(window.profiles[0].totals.lost)
        return Encoded((), {})

    whole, short = Collecting("whole"), Collecting("short")
    queues = [ExportQueue(whole), ExportQueue(short)]
    reporter = Reporter(queues, encoder=watching)
    queues[1].record_loss({"on_cpu": 3}, LossCause.REJECTED)
    totals = StreamTotals("ab", 10, 12, {LossCause.RING_FULL: 2})
    reporter(make_window(0, 1, ({}, ()), totals=totals))
    assert reporter.force_flush(10_000)
    assert seen == [{LossCause.RING_FULL: 2}, {LossCause.RING_FULL: 2, LossCause.REJECTED: 3}]
    reporter.shutdown(1000)


def test_an_empty_window_is_not_sent():
    calls = []
    reporter = Reporter([ExportQueue(Collecting("a"))], encoder=encoder(calls))
    reporter(make_window(0, 1))
    assert reporter.force_flush(10_000)
    assert calls == []
    reporter.shutdown(1000)


def test_a_removed_queue_delivers_its_remaining_batches_and_its_counts_are_kept():
    old, new, other = Collecting("a"), Collecting("a", Form.JSON), Collecting("b")
    old.open.clear()
    reporter = Reporter([ExportQueue(old)], encoder=encoder([]))
    for _ in range(3):
        reporter(sized_window(10))
    reporter.replace([ExportQueue(new), ExportQueue(other)])
    reporter(sized_window(5))
    assert account_of(reporter, 35).gaps() == []
    assert {a.name: a.not_offered for a in reporter.accounts()} == {"a": 0, "b": 30}
    old.open.set()
    assert reporter.force_flush(10_000)
    reporter.replace([ExportQueue(Collecting("c"))])
    reporter(sized_window(7))
    reporter.shutdown(10_000)
    assert account_of(reporter, 42).gaps() == []
    assert [a.not_offered for a in reporter.accounts()] == [7, 37, 35]
    assert len(old.batches) == 3
    assert len(new.batches) == 1
    assert {a.name: a.exported for a in reporter.accounts()} == {"a": 27 + 4, "b": 4, "c": 6}


def test_undelivered_batches_in_removed_queues_are_counted_as_lost_at_shutdown():
    class Dead(Collecting):
        def export(self, batch):
            self.open.wait(30)
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "")

    dead = Dead("a")
    dead.open.clear()
    reporter = Reporter([ExportQueue(dead)], encoder=encoder([]))
    reporter(sized_window(10))
    wait_until(lambda: reporter.accounts()[0].lost)  # the window has been encoded
    reporter.replace([])
    reporter.shutdown(100)
    (account,) = reporter.accounts()
    assert account.lost == {LossCause.SHUTDOWN: 9, LossCause.TOO_LARGE: 1}
    assert account_of(reporter, 10).gaps() == []


class Disk(ExportQueue):
    """A queue that accepts a batch, then blocks until released."""

    def __init__(self, exporter):
        self.accepted, self.returns = threading.Event(), threading.Event()
        super().__init__(exporter)

    def put(self, batch, rest=None):
        super().put(batch, rest)
        self.accepted.set()
        return self.returns.wait(30)


def test_sample_counts_are_available_and_exact_while_a_disk_queue_blocks():
    def in_two(window, encoding):
        half = batch_of(encoding.form, window.sample_count // 2)
        return Encoded((half, half), {})

    quick, slow = ExportQueue(Collecting("quick")), Disk(Collecting("slow"))
    reporter = Reporter([quick, slow], encoder=in_two, capacity=2)
    reporter(sized_window(10))
    assert slow.accepted.wait(10)
    assert account_of(reporter, 10).gaps() == []
    for handed_over in range(2, 5):  # beyond the capacity, the oldest window is dropped
        reporter(sized_window(10))
        assert account_of(reporter, 10 * handed_over).gaps() == []
    assert [a.lost for a in reporter.accounts()] == [{LossCause.QUEUE_FULL: 10}] * 2
    slow.returns.set()
    reporter.shutdown(10_000)
    assert account_of(reporter, 40).gaps() == []
    assert {a.name: a.exported for a in reporter.accounts()} == {"quick": 30, "slow": 30}


STACK = Stack(())
HOST = {"host.name": "here"}


def window_of(samples, start, totals):
    groups = (
        (
            {**HOST, "process.pid": pid},
            (WindowSample(STACK, pid, "t", 0, None, tuple(range(start, start + count))),),
        )
        for pid, count in ((1, 1), (2, samples - 1))
    )
    return make_window(start, start + 1000, *groups, taken=samples, totals=totals)


def stream(samples, taken=None):
    return StreamTotals("ab", samples, samples if taken is None else taken, {})


class Refusing(Collecting):
    refused = ()

    def export(self, batch):
        super().export(batch)
        if len(self.batches) in self.refused:
            return ExportResult.failure(batch, LossCause.REJECTED, "")
        return ExportResult.success(batch)


def reported(exporter, refused=()):
    """Returns the number of samples that arrived, and the totals of the last request."""
    payloads = [batch.payload for batch in exporter.batches]
    arrived = [one for number, one in enumerate(payloads, 1) if number not in refused]
    for payload in arrived:
        assert check_payload(payload) == []
    windows = decode_windows(arrived)
    return sum(window.sample_count for window in windows), windows[-1]


@pytest.mark.parametrize("form", list(Form))
def test_losses_after_the_last_window_are_reported(form):
    exporter = Refusing("a", form)
    exporter.refused = {1, 3}
    reporter = Reporter([ExportQueue(exporter)])
    for number in (1, 2, 3):
        reporter(window_of(5, number * 1000, stream(5 * number)))
    reporter.shutdown(10_000)
    arrived, last = reported(exporter, exporter.refused)
    assert last.sample_count == 0
    assert last.profiles[0].totals == stream(15)._replace(lost={LossCause.REJECTED: 10})
    assert arrived + 10 == last.profiles[0].totals.samples
    assert account_of(reporter, 15).gaps() == []


def test_losses_in_an_empty_last_window_are_reported():
    exporter = Refusing("a")
    reporter = Reporter([ExportQueue(exporter)])
    reporter(window_of(5, 1000, stream(5)))
    totals = stream(5, taken=9)._replace(lost={LossCause.RING_FULL: 4})
    reporter(make_window(2000, 3000, taken=4, totals=totals))
    reporter.shutdown(10_000)
    assert reported(exporter)[1].profiles[0].totals == totals


def test_the_final_request_contains_a_profile_of_each_kind():
    exporter = Refusing("a")
    exporter.refused = {1}
    reporter = Reporter([ExportQueue(exporter)])
    (on_cpu,) = window_of(5, 1000, stream(5)).profiles
    off_cpu = dataclasses.replace(on_cpu, kind=OFF_CPU, resources=on_cpu.resources[:1])
    off_cpu = dataclasses.replace(off_cpu, totals=stream(1))
    reporter(Window(1000, 2000, [on_cpu, off_cpu]))
    reporter.shutdown(10_000)
    profiles = (ProfileSamples("on_cpu", 0), ProfileSamples("off_cpu", 0))
    assert exporter.batches[-1].profiles == profiles
    arrived, last = reported(exporter, exporter.refused)
    assert arrived == 0
    results = [profile.totals.lost for profile in last.profiles]
    assert results == [{LossCause.REJECTED: 5}, {LossCause.REJECTED: 1}]


def test_the_final_request_does_not_repeat_lock_totals():
    exporter = Refusing("a")
    exporter.refused = {2}
    reporter = Reporter([ExportQueue(exporter)])
    locks = {"mutex": LockTotal(90, 700)}
    for start in (1000, 2000):
        window = window_of(5, start, stream(start // 200))
        (profile,) = window.profiles
        reporter(dataclasses.replace(window, profiles=[dataclasses.replace(profile, locks=locks)]))
    reporter.shutdown(10_000)
    decoded = decode_windows(batch.payload for batch in exporter.batches)
    assert [window.profiles[0].locks for window in decoded] == [locks, locks, {}]


def test_no_final_request_is_sent_if_there_are_no_new_losses():
    exporter = Refusing("a")
    reporter = Reporter([ExportQueue(exporter)])
    reporter(window_of(5, 1000, stream(5)))
    reporter.shutdown(10_000)
    reporter.shutdown(0)
    assert len(exporter.batches) == 1


def test_samples_taken_before_a_receiver_was_added_are_reported_to_it_as_lost():
    first, second = Refusing("a"), Refusing("b")
    queues = [ExportQueue(first)]
    reporter = Reporter(queues)
    reporter(window_of(5, 1000, stream(5)))
    assert reporter.force_flush(10_000)
    reporter.replace([*queues, ExportQueue(second)])
    reporter(window_of(3, 2000, stream(8)))
    reporter.shutdown(10_000)
    arrived, last = reported(second)
    assert last.profiles[0].totals.lost == {LossCause.NOT_OFFERED: 5}
    assert arrived + 5 == last.profiles[0].totals.samples
    arrived, last = reported(first)
    assert last.profiles[0].totals.lost == {}
    assert arrived == last.profiles[0].totals.samples


@pytest.mark.parametrize("reachable", [True, False])
def test_losses_from_a_queue_with_a_spool_are_reported_even_after_a_restart(tmp_path, reachable):
    class Away(Refusing):
        def export(self, batch):
            return ExportResult.failure(batch, LossCause.RETRIES_EXHAUSTED, "")

        def find_outage(self):
            return "UNAVAILABLE"

    exporter = Refusing("a") if reachable else Away("a")
    queue = ExportQueue(exporter, spool=Spool(str(tmp_path)))
    reporter = Reporter([queue])
    reporter(window_of(5, 1000, stream(5)))
    assert reporter.force_flush(10_000 if reachable else 200) is reachable
    reporter(make_window(2000, 3000, totals=stream(9)))
    queue.record_loss({"on_cpu": 4}, LossCause.INTERNAL)
    reporter.shutdown(5_000)
    later = exporter if reachable else Refusing("a")
    if not reachable:
        again = ExportQueue(later, spool=Spool(str(tmp_path)))
        assert again.force_flush(10_000)
        again.shutdown(1000)
    arrived, last = reported(later)
    assert last.profiles[0].totals.lost == {LossCause.INTERNAL: 4}
    assert arrived + 4 == last.profiles[0].totals.samples
