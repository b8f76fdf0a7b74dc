"""The reporter: each encoding is made once, and an account that is never short."""

import threading

import pytest

from otel_kprofiler.export import ExportOutcome, ExportQueue, ExportResult, ProfileExporter
from otel_kprofiler.model import (
    ON_CPU,
    AttributeForm,
    Batch,
    Form,
    LossCause,
    Resource,
    ResourceSamples,
    StreamTotals,
    Window,
)
from otel_kprofiler.otlp import Encoded
from otel_kprofiler.reporting import Account, Reporter


class Collecting(ProfileExporter):
    """Keeps what it is given; waits for ``open`` first."""

    def __init__(self, name, form=Form.PROTOBUF, max_bytes=None, attributes=AttributeForm.INLINE):
        self.name, self.form, self.max_bytes, self.attributes = name, form, max_bytes, attributes
        self.batches = []
        self.open = threading.Event()
        self.open.set()

    def export(self, batch):
        self.open.wait(30)
        self.batches.append(batch)
        return ExportResult(ExportOutcome.SUCCESS, batch.sample_count, {}, "")

    def force_flush(self, timeout_millis=30_000):
        return True

    def shutdown(self, timeout_millis=30_000):
        self.open.set()


class SizedWindow(Window):
    """A window that says how many samples it has."""

    __slots__ = ("size",)

    def __init__(self, size):
        super().__init__(ON_CPU, 1, 0, 1, (object(),))
        object.__setattr__(self, "size", size)

    @property
    def sample_count(self):
        return self.size


def encoder(calls):
    def encode(window, encoding):
        calls.append((window.size, *encoding))
        return Encoded((Batch(b"x", encoding.form, (window.size - 1,), 0, 1),), too_large=1)

    return encode


def account_of(reporter, received):
    return Account(received, received, {}, 0, reporter.accounts())


def test_each_encoding_is_made_once():
    calls = []
    exporters = [
        Collecting("a"),
        Collecting("b"),
        Collecting("c", Form.JSON, 100),
        Collecting("d", attributes=AttributeForm.REFERENCES),
    ]
    reporter = Reporter([ExportQueue(e) for e in exporters], encoder=encoder(calls))
    reporter(SizedWindow(10))
    assert reporter.force_flush(10_000)
    assert sorted(calls, key=str) == [
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


def test_a_slow_exporter_delays_no_other():
    slow, quick = Collecting("slow"), Collecting("quick")
    slow.open.clear()
    reporter = Reporter([ExportQueue(slow), ExportQueue(quick)], encoder=encoder([]))
    for _ in range(5):
        reporter(SizedWindow(2))
    assert not reporter.force_flush(500)
    assert len(quick.batches) == 5
    assert account_of(reporter, 10).gaps() == []
    slow.open.set()
    reporter.shutdown(10_000)
    assert len(slow.batches) == 5


def test_a_defect_in_the_encoder_costs_one_window_and_is_counted(caplog):
    def broken(window, encoding):
        if window.size == 3:
            raise ZeroDivisionError
        return encoder([])(window, encoding)

    exporter = Collecting("a")
    reporter = Reporter([ExportQueue(exporter)], encoder=broken)
    for size in (2, 3, 4):
        reporter(SizedWindow(size))
    assert reporter.force_flush(10_000)
    (account,) = reporter.accounts()
    assert account.lost == {LossCause.INTERNAL: 3, LossCause.TOO_LARGE: 2}
    assert account.exported == 4
    assert "ZeroDivisionError" in caplog.text
    reporter.shutdown(1000)


@pytest.mark.parametrize("windows", [3, 10])
def test_windows_beyond_the_capacity_drop_the_oldest_and_are_counted(windows):
    entered, release = threading.Event(), threading.Event()

    def waiting(window, encoding):
        entered.set()
        release.wait(30)
        return Encoded((Batch(b"x", encoding.form, (window.size,), 0, 1),), too_large=0)

    exporter = Collecting("a")
    reporter = Reporter([ExportQueue(exporter)], encoder=waiting, capacity=2)
    for size in range(1, windows + 1):
        reporter(SizedWindow(size))
        assert entered.wait(10)
    received = windows * (windows + 1) // 2
    assert account_of(reporter, received).gaps() == []
    release.set()
    reporter.shutdown(10_000)
    assert account_of(reporter, received).gaps() == []
    assert exporter.batches[-1].sample_count == windows
    (account,) = reporter.accounts()
    assert account.pending == 0
    assert (account.lost.get(LossCause.QUEUE_FULL, 0) > 0) == (windows > 3)


def test_what_is_not_encoded_in_time_is_lost_at_shutdown():
    release = threading.Event()

    def stuck(window, encoding):
        release.wait(30)
        return Encoded((Batch(b"x", encoding.form, (window.size,), 0, 1),), too_large=0)

    reporter = Reporter([ExportQueue(Collecting("a"))], encoder=stuck)
    for _ in range(3):
        reporter(SizedWindow(5))
    reporter.shutdown(200)
    (account,) = reporter.accounts()
    assert account.lost[LossCause.SHUTDOWN] >= 10
    assert account_of(reporter, 15).gaps() == []
    release.set()


def test_each_receiver_is_told_what_was_lost_on_the_way_to_it():
    seen = []

    def watching(window, encoding):
        seen.append(window.totals.lost)
        return Encoded((), 0)

    whole, short = Collecting("whole"), Collecting("short")
    queues = [ExportQueue(whole), ExportQueue(short)]
    reporter = Reporter(queues, encoder=watching)
    queues[1].lose(3, LossCause.REJECTED)
    totals = StreamTotals("ab", 10, 12, {LossCause.RING_FULL: 2})
    reporter(Window(ON_CPU, 1, 0, 1, (ResourceSamples(Resource({}), ()),), totals=totals))
    assert reporter.force_flush(10_000)
    assert seen == [{LossCause.RING_FULL: 2}, {LossCause.RING_FULL: 2, LossCause.REJECTED: 3}]
    reporter.shutdown(1000)


def test_an_empty_window_is_not_sent():
    calls = []
    reporter = Reporter([ExportQueue(Collecting("a"))], encoder=encoder(calls))
    reporter(Window(ON_CPU, 1, 0, 1, ()))
    assert reporter.force_flush(10_000)
    assert calls == []
    reporter.shutdown(1000)


def test_a_queue_that_leaves_delivers_what_it_has_and_its_account_goes_on():
    old, new, other = Collecting("a"), Collecting("a", Form.JSON), Collecting("b")
    old.open.clear()
    reporter = Reporter([ExportQueue(old)], encoder=encoder([]))
    for _ in range(3):
        reporter(SizedWindow(10))
    reporter.replace([ExportQueue(new), ExportQueue(other)])
    reporter(SizedWindow(5))
    assert account_of(reporter, 35).gaps() == []
    assert {a.name: a.not_offered for a in reporter.accounts()} == {"a": 0, "b": 30}
    old.open.set()
    assert reporter.force_flush(10_000)
    reporter.replace([ExportQueue(Collecting("c"))])
    reporter(SizedWindow(7))
    reporter.shutdown(10_000)
    assert account_of(reporter, 42).gaps() == []
    assert [a.not_offered for a in reporter.accounts()] == [7, 37, 35]
    assert len(old.batches) == 3
    assert len(new.batches) == 1
    exported = {a.name: a.exported for a in reporter.accounts()}
    assert exported == {"a": 27 + 4, "b": 4, "c": 6}


def test_what_leaving_queues_cannot_deliver_is_lost_at_shutdown():
    class Dead(Collecting):
        def export(self, batch):
            self.open.wait(30)
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "")

    dead = Dead("a")
    dead.open.clear()
    reporter = Reporter([ExportQueue(dead)], encoder=encoder([]))
    reporter(SizedWindow(10))
    reporter.replace([])
    reporter.shutdown(100)
    (account,) = reporter.accounts()
    assert account.lost == {LossCause.SHUTDOWN: 9, LossCause.TOO_LARGE: 1}
    assert account_of(reporter, 10).gaps() == []


class Disk(ExportQueue):
    """Accepts a batch, and does not return before it is told to."""

    def __init__(self, exporter):
        self.accepted, self.returns = threading.Event(), threading.Event()
        super().__init__(exporter)

    def put(self, batch):
        super().put(batch)
        self.accepted.set()
        return self.returns.wait(30)


def test_an_account_waits_for_no_disk_and_counts_each_sample_once_meanwhile():
    def in_two(window, encoding):
        half = Batch(b"x", encoding.form, (window.size // 2,), 0, 1)
        return Encoded((half, half), too_large=0)

    quick, slow = ExportQueue(Collecting("quick")), Disk(Collecting("slow"))
    reporter = Reporter([quick, slow], encoder=in_two, capacity=2)
    reporter(SizedWindow(10))
    assert slow.accepted.wait(10)
    assert account_of(reporter, 10).gaps() == []
    for handed_over in range(2, 5):  # beyond the capacity: the oldest is lost meanwhile
        reporter(SizedWindow(10))
        assert account_of(reporter, 10 * handed_over).gaps() == []
    assert [a.lost for a in reporter.accounts()] == [{LossCause.QUEUE_FULL: 10}] * 2
    slow.returns.set()
    reporter.shutdown(10_000)
    assert account_of(reporter, 40).gaps() == []
    assert {a.name: a.exported for a in reporter.accounts()} == {"quick": 30, "slow": 30}
