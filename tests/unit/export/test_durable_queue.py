"""The sending queue with a spool counts every loss and delivers nothing twice."""

import errno
import os
import threading
import time

import pytest

from otel_kprofiler.export import ExportQueue, ExportResult, ProfileExporter, Spool
from otel_kprofiler.export.backlog import Backlog
from otel_kprofiler.model import Batch, Form, LossCause, ProfileSamples
from tests.queues import check
from tests.waiting import wait_until


class Receiver(ProfileExporter):
    name, form, max_bytes = "receiver", Form.PROTOBUF, None

    def __init__(self, *, up=True):
        self.up = threading.Event()
        if up:
            self.up.set()
        self.stopped = threading.Event()
        self.arrived = []
        self.attempts = 0
        self.cause = LossCause.RETRIES_EXHAUSTED

    def export(self, batch):
        self.attempts += 1
        if self.stopped.is_set():
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "")
        if not self.up.wait(0.01):
            return ExportResult.failure(batch, self.cause, "")
        self.arrived.append(batch.payload)
        return ExportResult.success(batch)

    def find_outage(self):
        return "" if self.up.is_set() else "down"

    def shutdown(self, timeout_millis=30_000):
        self.stopped.set()


def numbered(number, size=100):
    return Batch(
        b"%d" % number + b" " * size, Form.PROTOBUF, (ProfileSamples("on_cpu", number),), 5, 6
    )


def put(queue, *numbers):
    for number in numbers:
        queue.put(numbered(number))


def numbers(receiver):
    return [int(payload) for payload in receiver.arrived]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("otel_kprofiler.export.queue._LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def open_queue(tmp_path):
    queues = []

    def make(receiver, *, name="spool", queue=None, **options):
        spool = Spool(str(tmp_path / name), fsync=False, **options)
        queues.append(ExportQueue(receiver, spool=spool, **(queue or {})))
        return queues[-1]

    yield make
    for queue in queues:
        queue.shutdown(0)


def kill(queue):
    """Stops a queue as SIGKILL would: nothing more is written, and the lock is released."""
    with queue._changed:
        queue._spool._end_segment()
        os.close(queue._spool._guard)
        queue._spool._guard = -1
        queue._in_flight = None
        queue._waiting.remove(list(queue._waiting))


def test_a_receiver_receives_every_batch_in_order_after_an_outage(open_queue):
    receiver = Receiver(up=False)
    queue = open_queue(receiver)
    put(queue, *range(1, 8))
    wait_until(lambda: receiver.attempts > 3)
    assert check(queue).queued == 28
    receiver.up.set()
    assert queue.force_flush(60_000)
    assert numbers(receiver) == [1, 2, 3, 4, 5, 6, 7]
    assert check(queue)[1:4] == (28, {}, 0)


def test_the_next_run_delivers_samples_pending_at_shutdown(open_queue):
    receiver = Receiver(up=False)
    queue = open_queue(receiver)
    put(queue, *range(1, 4))
    started = time.monotonic()
    queue.shutdown(60_000)
    assert time.monotonic() - started < 30, "shutdown does not wait for an unreachable receiver"
    assert check(queue)[1:4] == (0, {}, 6)
    receiver = Receiver()
    again = open_queue(receiver)
    again.put(numbered(4))
    assert again.force_flush(60_000)
    assert numbers(receiver) == [1, 2, 3, 4]
    counts = check(again)
    assert (counts.carried, counts.exported, again.unknown_since_unix_ns) == (6, 10, 0)


def test_at_most_the_batch_in_flight_is_resent_after_a_kill(open_queue):
    receiver = Receiver()
    queue = open_queue(receiver)
    put(queue, *range(1, 4))
    assert queue.force_flush(60_000)
    real, arrived, killed = receiver.export, threading.Event(), threading.Event()

    def export(batch):
        result = real(batch)
        arrived.set()
        killed.wait(60)  # killed before the response is recorded
        return result

    receiver.export = export
    put(queue, 4, 5)
    assert arrived.wait(60)
    kill(queue)
    killed.set()
    after = Receiver()
    again = open_queue(after)
    assert again.force_flush(60_000)
    assert numbers(receiver) == [1, 2, 3, 4]
    assert numbers(after) == [4, 5]
    assert again.unknown_since_unix_ns == 6
    assert check(again)[:4] == (0, 9, {}, 0)


def test_each_exporter_keeps_a_separate_position_in_its_spool(open_queue):
    down, up = Receiver(up=False), Receiver()
    slow, quick = open_queue(down, name="a"), open_queue(up, name="b")
    put(slow, 1, 2, 3)
    put(quick, 1, 2, 3)
    assert quick.force_flush(60_000)
    quick.shutdown(0)
    slow.shutdown(0)
    assert check(open_queue(Receiver(up=False), name="a")).carried == 6
    assert check(open_queue(Receiver(), name="b")).carried == 0


def test_a_full_spool_drops_and_counts_the_oldest_batches(open_queue):
    receiver = Receiver(up=False)
    queue = open_queue(receiver, max_bytes=4000)
    for number in range(1, 60):
        queue.put(numbered(number))
        counts = check(queue)
        assert counts.batches > 2 or not counts.lost, "only the oldest segment is dropped"
    assert counts.lost.keys() == {LossCause.SPOOL_FULL}
    assert 0 < counts.queued_bytes <= 4000
    receiver.up.set()
    assert queue.force_flush(60_000)
    counts = check(queue)
    assert numbers(receiver) == sorted(numbers(receiver))
    assert sum(numbers(receiver)) == counts.exported
    assert numbers(receiver)[-1] == 59


def test_losses_from_earlier_runs_are_counted_separately(open_queue):
    queue = open_queue(Receiver(up=False))
    queue.put(numbered(3))
    queue.shutdown(0)
    receiver = Receiver()
    receiver.export = lambda batch: ExportResult.failure(batch, LossCause.REJECTED, "no")
    again = open_queue(receiver)
    again.put(numbered(4))
    assert again.force_flush(60_000)
    counts = check(again)
    assert (counts.lost, counts.carried_lost) == ({LossCause.REJECTED: 7}, {LossCause.REJECTED: 3})


def test_expired_batches_are_counted(open_queue):
    receiver, clock = Receiver(up=False), [0.0]
    queue = open_queue(receiver, max_age_s=2, now=lambda: clock[0])
    queue.put(numbered(5))
    clock[0] = 1.5
    queue.put(numbered(6))
    clock[0] = 3.0
    wait_until(lambda: check(queue).lost)
    assert check(queue).lost == {LossCause.SPOOL_AGED: 5}
    receiver.up.set()
    assert queue.force_flush(60_000)
    assert numbers(receiver) == [6]


def test_batches_wait_in_memory_while_the_disk_is_full(open_queue, monkeypatch, caplog):
    receiver = Receiver(up=False)
    queue = open_queue(receiver, queue={"size": 3})
    queue.put(numbered(1))
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    put(queue, *range(2, 7))
    assert check(queue).lost == {LossCause.QUEUE_FULL: 5}
    assert "batches wait in memory" in caplog.text
    monkeypatch.undo()
    queue.put(numbered(7))
    receiver.up.set()
    assert queue.force_flush(60_000)
    assert numbers(receiver) == [1, 4, 5, 6, 7]
    assert check(queue)[1:4] == (23, {LossCause.QUEUE_FULL: 5}, 0)


def test_an_unreadable_batch_is_counted_as_lost(open_queue, tmp_path):
    receiver = Receiver(up=False)
    queue = open_queue(receiver)
    put(queue, 1, 2)
    wait_until(lambda: receiver.attempts)
    (path,) = (tmp_path / "spool").glob("*.spool")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    receiver.up.set()
    assert queue.force_flush(60_000)
    assert numbers(receiver) == [1]
    assert check(queue)[1:4] == (1, {LossCause.SPOOL_DAMAGED: 2}, 0)


def test_a_batch_that_cannot_be_read_for_a_while_is_kept(open_queue, monkeypatch, caplog):
    """The process may have no free file descriptor."""
    monkeypatch.setattr("otel_kprofiler.export.queue._LONGEST_PAUSE_S", 0.02)
    failures = iter([errno.EMFILE, errno.EMFILE, errno.ENOMEM, None, errno.ENOMEM])
    read, errors = Spool.read, []

    def read_later(self, stored):
        if number := next(failures, None):
            errors.append(queue.find_storage_error())
            raise OSError(number, os.strerror(number))
        return read(self, stored)

    monkeypatch.setattr(Spool, "read", read_later)
    receiver = Receiver()
    queue = open_queue(receiver)
    put(queue, 1, 2)
    assert queue.force_flush(60_000)
    assert numbers(receiver) == [1, 2]
    assert check(queue)[1:4] == (3, {}, 0)
    assert queue.find_storage_error() == ""
    emfile, enomem = os.strerror(errno.EMFILE), os.strerror(errno.ENOMEM)
    assert errors == ["", emfile, emfile, ""]
    logged = [text for text in caplog.messages if "trying again" in text]
    assert [text.split(": ")[1].split(";")[0] for text in logged] == [emfile, enomem, enomem]


def test_a_rejected_batch_does_not_block_the_next(open_queue):
    receiver = Receiver()
    results = iter([LossCause.REJECTED, LossCause.TOO_LARGE])
    real = receiver.export

    def export(batch):
        cause = next(results, None)
        return ExportResult.failure(batch, cause, "") if cause else real(batch)

    receiver.export = export
    queue = open_queue(receiver)
    put(queue, 1, 2, 3)
    assert queue.force_flush(60_000)
    assert numbers(receiver) == [3]
    assert check(queue).lost == {LossCause.REJECTED: 1, LossCause.TOO_LARGE: 2}


def test_a_batch_added_during_a_shutdown_is_counted_as_lost(open_queue, monkeypatch):
    queue = open_queue(Receiver(up=False))
    free = queue._free_disk_space

    def shut_down(more):
        if more:  # called by the thread that adds the batch
            queue.shutdown(0)
        free(more)

    monkeypatch.setattr(queue, "_free_disk_space", shut_down)
    assert not queue.put(numbered(5))
    counts = check(queue)
    assert (counts.lost, counts.queued) == ({LossCause.SHUTDOWN: 5}, 0)


def test_dropped_batches_are_removed_from_the_spool_before_it_is_closed(open_queue, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.export.queue._INTERRUPT_GRACE_S", 60)
    queue = open_queue(Receiver(up=False), max_bytes=1000)
    settle, entered, go_on = queue._spool.settle, threading.Event(), threading.Event()

    def slow(*settled):
        entered.set()
        go_on.wait(60)
        settle(*settled)

    queue._spool.settle = slow
    putting = threading.Thread(target=put, args=(queue, *range(1, 12)))
    putting.start()
    assert entered.wait(60)
    threading.Timer(0.2, go_on.set).start()
    queue.shutdown(0)
    putting.join()
    counts = check(queue)
    assert counts.lost[LossCause.SPOOL_FULL] > 0
    assert check(open_queue(Receiver(up=False), max_bytes=10_000_000)).carried == counts.queued


def test_a_large_backlog_delays_neither_counts_nor_exports(open_queue, monkeypatch):
    """No step visits all batches; otherwise, draining would take quadratic time."""
    receiver = Receiver(up=False)
    queue = open_queue(receiver)
    put(queue, *range(1, 101))
    wait_until(lambda: receiver.attempts)
    with monkeypatch.context() as patch:
        patch.setattr(Backlog, "__iter__", None)
        patch.setattr(Backlog, "stored_through", None)
        assert check(queue)[3:5] == (5050, 100)
        receiver.up.set()
        assert queue.force_flush(60_000)
    assert check(queue)[1:6] == (5050, {}, 0, 0, 0)
