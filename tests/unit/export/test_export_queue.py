"""The sending queue is bounded, keeps batches in order, and counts samples exactly."""

import threading
import time

import pytest

from otel_kprofiler.export import (
    ExportOutcome,
    ExportQueue,
    ExportResult,
    KindResult,
    ProfileExporter,
)
from otel_kprofiler.model import Form, LossCause
from tests.queues import check
from tests.raising import raising
from tests.waiting import call_in_thread, wait_until


class Gate(ProfileExporter):
    """An exporter that exports one batch per permit."""

    name, form, max_bytes = "gate", Form.PROTOBUF, None

    def __init__(self, permits=0):
        self.permits = threading.Semaphore(permits)
        self.seen = []
        self.result = ExportResult.success
        self.stopped = threading.Event()

    def export(self, batch):
        self.seen.append(batch.payload)
        while not self.permits.acquire(timeout=0.01):
            if self.stopped.is_set():
                return ExportResult.failure(batch, LossCause.SHUTDOWN, "")
        return self.result(batch)

    def shutdown(self, timeout_millis=30_000):
        self.stopped.set()


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def open_queue():
    queues = []

    def make(*arguments, **options):
        queues.append(ExportQueue(*arguments, **options))
        return queues[-1]

    yield make
    for queue in queues:
        queue.shutdown(0)


@pytest.mark.parametrize("limit", [{"size": 2}, {"max_bytes": 20}])
def test_a_full_queue_drops_the_oldest_waiting_batch(open_queue, gate, batch, limit, caplog):
    queue = open_queue(gate, **limit)
    queue.put(batch(b"in flight."))
    wait_until(lambda: gate.seen)
    for number in range(4):
        queue.put(batch(b"number %d, " % number, samples=(10**number,)))
    assert check(queue).lost == {LossCause.QUEUE_FULL: 11}
    gate.permits.release(9)
    assert queue.force_flush(60_000)
    assert gate.seen == [b"in flight.", b"number 2, ", b"number 3, "]
    assert check(queue).exported == 3 + 1100
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_batch_above_the_byte_limit_is_queued_if_the_queue_is_empty(open_queue, gate, batch):
    queue = open_queue(gate, max_bytes=4)
    gate.permits.release(1)
    queue.put(batch(b"larger than the limit"))
    assert queue.force_flush(60_000)
    assert check(queue).exported == 3


def test_put_never_waits_for_the_exporter(open_queue, gate, batch):
    queue = open_queue(gate, size=10)
    started = time.monotonic()
    for _ in range(1000):
        queue.put(batch())
    assert time.monotonic() - started < 30
    assert check(queue).batches in (10, 11)


def test_losses_reported_by_an_exporter_are_counted_by_cause(open_queue, batch):
    gate = Gate(permits=9)
    gate.result = lambda batch: ExportResult.success(batch, rejected={"on_cpu": 2})
    queue = open_queue(gate)
    queue.put(batch())
    queue.put(batch())
    queue.record_loss({"on_cpu": 7}, LossCause.TOO_LARGE)
    assert queue.force_flush(60_000)
    assert check(queue)[:3] == (13, 2, {LossCause.REJECTED: 4, LossCause.TOO_LARGE: 7})


DEFECTS = {
    "raise": raising(RuntimeError("boom")),
    "miscount": lambda _: ExportResult(ExportOutcome.SUCCESS, {"on_cpu": KindResult(99, {})}),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_the_worker_counts_logs_and_survives_exporter_bugs(open_queue, batch, defect, caplog):
    gate = Gate(permits=9)
    gate.result = defect
    queue = open_queue(gate)
    queue.put(batch())
    assert queue.force_flush(60_000)
    assert check(queue).lost == {LossCause.INTERNAL: 3}
    assert caplog.records[0].exc_info
    gate.result = ExportResult.success
    queue.put(batch())
    assert queue.force_flush(60_000)
    assert check(queue).exported == 3


def test_force_flush_waits_only_for_earlier_batches(open_queue, gate, batch, monkeypatch):
    queue = open_queue(gate, size=4)
    queue.put(batch(b"first"))
    wait_until(lambda: gate.seen)
    assert not queue.force_flush(20)
    begun, settled = threading.Event(), queue._settled
    monkeypatch.setattr(queue, "_settled", lambda last: begun.set() or settled(last))
    flush = call_in_thread(queue.force_flush, 60_000)
    assert begun.wait(60)
    for _ in range(9):  # drops batches; the flush must not wait for them
        queue.put(batch())
    time.sleep(0.05)
    assert not flush.done()
    gate.permits.release(1)
    assert flush.result() is True
    assert queue.counts().batches == 4


def test_shutdown_exports_queued_batches(open_queue, batch):
    gate = Gate(permits=100)
    queue = open_queue(gate)
    for _ in range(10):
        queue.put(batch())
    queue.shutdown(60_000)
    assert check(queue)[:4] == (30, 30, {}, 0)
    assert gate.stopped.is_set()


def test_batches_that_are_undelivered_when_shutdown_times_out_are_counted(open_queue, gate, batch):
    queue = open_queue(gate)
    for _ in range(10):
        queue.put(batch())
    gate.permits.release(4)
    wait_until(lambda: queue.counts().exported == 12)
    started = time.monotonic()
    queue.shutdown(200)
    assert time.monotonic() - started < 30
    assert check(queue)[:4] == (30, 12, {LossCause.SHUTDOWN: 18}, 0)
    queue.shutdown(200)
    assert not queue.put(batch())
    assert check(queue)[:4] == (33, 12, {LossCause.SHUTDOWN: 21}, 0)


@pytest.mark.system
def test_an_exporter_that_ignores_shutdown_is_abandoned(open_queue, gate, batch, monkeypatch):
    monkeypatch.setattr(gate, "shutdown", lambda _: None)
    earlier = set(threading.enumerate())
    queue = open_queue(gate)
    queue.put(batch())
    wait_until(lambda: gate.seen)
    started = time.monotonic()
    queue.shutdown(0)
    assert time.monotonic() - started < 30
    assert check(queue)[:4] == (3, 0, {LossCause.SHUTDOWN: 3}, 0)
    gate.permits.release(1)
    for thread in set(threading.enumerate()) - earlier:
        thread.join(60)
        assert not thread.is_alive()
    assert check(queue)[:4] == (3, 0, {LossCause.SHUTDOWN: 3}, 0)


def test_the_on_export_callback_runs_once_per_export_even_if_it_raises(open_queue, batch, caplog):
    seen = []

    def observer(result, seconds):
        seen.append((result.outcome, seconds >= 0))
        raise ValueError("observer")

    queue = open_queue(Gate(permits=9), on_export=observer)
    queue.put(batch())
    queue.put(batch())
    assert queue.force_flush(60_000)
    assert seen == [(ExportOutcome.SUCCESS, True)] * 2
    assert check(queue).exported == 6


def test_the_sample_counts_of_a_queue_add_up_at_every_instant(open_queue, batch):
    queue = open_queue(Gate(permits=10**6), size=3)
    threads = [
        threading.Thread(target=lambda: [queue.put(batch()) for _ in range(300)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        check(queue)
    assert queue.force_flush(60_000)
    assert check(queue).accepted == 4 * 300 * 3


def test_a_replacement_exporter_receives_waiting_and_abandoned_batches(open_queue, gate, batch):
    queue = open_queue(gate)
    for number in range(3):
        queue.put(batch(b"%d" % number))
    wait_until(lambda: gate.seen)
    successor = Gate(permits=9)
    queue.replace(successor, size=2)
    assert queue.force_flush(60_000)
    assert gate.stopped.is_set()
    assert successor.seen == [b"0", b"1", b"2"]
    counts = check(queue)
    assert (counts.exported, counts.lost) == (counts.accepted, {})
