"""A disk that does not respond delays its callers only briefly."""

import os
import threading

import pytest

from otel_kprofiler.delivery import Reporter
from otel_kprofiler.export import ExportQueue, ExportResult, ProfileExporter, Spool
from otel_kprofiler.export.disk_thread import DiskThread
from otel_kprofiler.model import (
    Account,
    Batch,
    Form,
    LossCause,
    ProfileSamples,
    Stack,
    WindowSample,
)
from otel_kprofiler.otlp import Encoded
from tests.queues import check
from tests.waiting import wait_until
from tests.windows import make_window

PATIENCE = "otel_kprofiler.export.disk_thread.PATIENCE_S"


class HungDisk:
    """Makes calls in a spool's thread hang until :meth:`respond` is called."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch
        self.entered, self._ends = threading.Event(), threading.Event()

    def hang(self, name="fdatasync"):
        real = getattr(os, name)

        def wait(*arguments, **options):
            if threading.current_thread().name == "kprofiler-spool":
                self.wait()
            return real(*arguments, **options)

        self._patch.setattr(os, name, wait)
        self._patch.setattr(PATIENCE, 0.1)

    def wait(self):
        self.entered.set()
        assert self._ends.wait(60)

    def respond(self):
        self._patch.setattr(PATIENCE, 60)
        self._ends.set()


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(PATIENCE, 60)  # for busy machines
    disk = HungDisk(monkeypatch)
    yield disk
    disk.respond()


class Receiver(ProfileExporter):
    form, max_bytes = Form.PROTOBUF, None

    def __init__(self, name="receiver", *, up=True):
        self.name, self.up, self.arrived = name, up, []

    def export(self, batch):
        if not self.up:
            return ExportResult.failure(batch, LossCause.RETRIES_EXHAUSTED, "")
        self.arrived.append(batch.sample_count)
        return ExportResult.success(batch)

    def find_outage(self):
        return "" if self.up else "down"

    def shutdown(self, timeout_millis=30_000):
        pass


def batch(samples):
    profiles = (ProfileSamples("on_cpu", samples),)
    return Batch(b"payload", Form.PROTOBUF, profiles, samples, samples + 1)


def test_calls_fail_until_the_hung_call_returns(disk):
    thread, results = DiskThread(), []
    disk.hang()
    with pytest.raises(TimeoutError, match="the disk does not respond"):
        thread.call(disk.wait)
    assert thread.is_hung
    for is_kept in (False, True):
        with pytest.raises(TimeoutError):
            thread.call(lambda is_kept=is_kept: results.append(is_kept), is_kept=is_kept)
    disk.respond()
    wait_until(lambda: not thread.is_hung)
    assert thread.call(lambda: results) == [True]
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    thread.close()


def test_the_thread_ends_if_nothing_refers_to_the_object():
    thread = DiskThread()
    running = thread.call(threading.current_thread)
    assert running.is_alive()
    del thread
    wait_until(lambda: not running.is_alive())


def test_an_append_that_timed_out_leaves_nothing_in_the_spool(disk, tmp_path):
    spool = Spool(str(tmp_path))
    spool.append(batch(1))
    disk.hang()
    with pytest.raises(TimeoutError):
        spool.append(batch(2))
    disk.respond()
    wait_until(lambda: not spool.is_hung)
    spool.append(batch(3))
    spool.close()
    again = Spool(str(tmp_path))
    assert [stored.samples["on_cpu"] for stored in again.waiting] == [1, 3]
    assert (again.damaged, again.earlier, again.unknown_since_unix_ns) == ({}, {"on_cpu": 4}, 0)
    again.close()


def test_samples_settled_during_a_hang_are_recorded(disk, tmp_path):
    spool = Spool(str(tmp_path))
    first, second = spool.append(batch(1)), spool.append(batch(2))
    disk.hang()
    with pytest.raises(TimeoutError):
        spool.append(batch(3))
    for stored in (first, second):
        with pytest.raises(TimeoutError):
            spool.settle(stored.number, stored.samples)
    disk.respond()
    wait_until(lambda: not spool.is_hung)
    spool.close()
    again = Spool(str(tmp_path))
    assert (list(again.waiting), again.damaged, again.earlier) == ([], {}, {"on_cpu": 3})
    again.close()


@pytest.mark.parametrize("call", ["fdatasync", "pwrite", "open"])
def test_a_hung_spool_delays_neither_other_exporters_nor_the_shutdown(disk, tmp_path, call, caplog):
    slow, quick = Receiver("slow"), Receiver("quick")
    sample = WindowSample(Stack.from_frames(()), 1, "t", 0, None, (0,))
    if call == "open":
        disk.hang(call)
    queue = ExportQueue(slow, spool=Spool(str(tmp_path / "spool")))
    reporter = Reporter(
        [queue, ExportQueue(quick)],
        encoder=lambda window, encoding: Encoded((batch(window.sample_count),), {}),
    )
    if call != "open":
        disk.hang(call)
    for _ in range(3):
        reporter(make_window(0, 1, ({}, [sample])))
    wait_until(lambda: len(quick.arrived) == 3)
    assert disk.entered.is_set()
    wait_until(lambda: len(slow.arrived) == 3)  # from memory
    assert queue.find_storage_error() == "the disk does not respond"
    assert caplog.text.count("batches wait in memory") == 1
    reporter.shutdown(100)
    sampled = {"on_cpu": Account(3, 3)}
    assert Account.of_kinds(sampled, reporter.accounts()).gaps() == []


def test_batches_from_earlier_runs_are_delivered_after_a_hang_at_startup(disk, tmp_path):
    before = Spool(str(tmp_path))
    before.append(batch(1))
    before.close()
    disk.hang("pread")
    receiver = Receiver()
    queue = ExportQueue(receiver, spool=Spool(str(tmp_path)))
    queue.put(batch(2))
    wait_until(lambda: receiver.arrived == [2])
    assert check(queue).carried == 0
    disk.respond()
    wait_until(lambda: not queue._spool.is_hung)
    queue.put(batch(3))
    assert queue.force_flush(60_000)
    assert sorted(receiver.arrived) == [1, 2, 3]
    assert check(queue).carried == 1
    queue.shutdown(0)


def test_a_shutdown_during_a_hang_counts_each_sample_once(disk, tmp_path, caplog):
    queue = ExportQueue(Receiver(up=False), spool=Spool(str(tmp_path)))
    queue.put(batch(1))
    disk.hang()
    queue.put(batch(2))
    queue.shutdown(0)
    queue.shutdown(0)
    counts = check(queue)
    assert (counts.queued, counts.lost) == (1, {LossCause.SHUTDOWN: 2})
    assert caplog.text.count("cannot be closed cleanly: the disk does not respond") == 1
    disk.respond()
    wait_until(lambda: queue._spool._closed)
    receiver = Receiver()
    again = ExportQueue(receiver, spool=Spool(str(tmp_path)))
    assert again.force_flush(60_000)
    assert receiver.arrived == [1]
    again.shutdown(0)
