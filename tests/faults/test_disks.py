"""A durable queue copes with full, read-only and hung disks, and with corrupt spools."""

import contextlib
import os
import subprocess
import threading
import time

import pytest

from otel_kprofiler.delivery import Reporter
from otel_kprofiler.export import ExportQueue, ExportResult, ProfileExporter, Spool
from otel_kprofiler.model import (
    Batch,
    Form,
    LossCause,
    ProfileSamples,
    Stack,
    StreamTotals,
    WindowSample,
)
from otel_kprofiler.otlp import decode_windows
from tests.needs import ROOT
from tests.queues import check
from tests.waiting import wait_until
from tests.windows import make_window

pytestmark = ROOT


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], check=False)
    if done.returncode:
        pytest.skip("root may not mount a tmpfs on this host")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


class Receiver(ProfileExporter):
    name, form, max_bytes = "receiver", Form.PROTOBUF, None

    def __init__(self):
        self.up, self.stopped, self.payloads = threading.Event(), threading.Event(), []

    @property
    def arrived(self):
        return list(map(int, self.payloads))

    def export(self, batch):
        while not self.up.wait(0.01):
            if self.stopped.is_set():
                return ExportResult.failure(batch, LossCause.SHUTDOWN, "")
        self.payloads.append(batch.payload)
        return ExportResult.success(batch)

    def find_outage(self):
        return "" if self.up.is_set() else "down"

    def shutdown(self, timeout_millis=30_000):
        self.stopped.set()


def numbered(number):
    return Batch(
        b"%d" % number + b" " * 20_000,
        Form.PROTOBUF,
        (ProfileSamples("on_cpu", number),),
        number,
        number + 1,
    )


def test_no_samples_are_lost_on_a_full_disk_while_memory_suffices(disk, caplog):
    receiver = Receiver()
    queue = ExportQueue(receiver, spool=Spool(str(disk / "spool")))
    for number in range(1, 21):
        queue.put(numbered(number))
        check(queue)
    assert "No space left" in caplog.text
    receiver.up.set()
    assert queue.force_flush(10_000)
    assert receiver.arrived == list(range(1, 21))
    queue.put(numbered(21))
    assert queue.force_flush(10_000)
    queue.shutdown()
    assert check(queue)[1:4] == (231, {}, 0)
    again = Spool(str(disk / "spool"))
    assert (len(again.waiting), again.damaged) == (0, {})
    again.close()


def test_batches_wait_in_memory_once_the_disk_becomes_read_only(disk, caplog):
    receiver = Receiver()
    queue = ExportQueue(receiver, spool=Spool(str(disk / "spool")))
    queue.put(numbered(1))
    queue._spool._end_segment()  # a file open for writing prevents the read-only remount
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    queue.put(numbered(2))
    assert "Read-only file system" in caplog.text
    receiver.up.set()
    assert queue.force_flush(10_000)
    assert receiver.arrived == [1, 2]
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    queue.put(numbered(3))
    assert queue.force_flush(10_000)
    queue.shutdown()
    assert check(queue)[1:4] == (6, {}, 0)


@pytest.mark.parametrize("known", [True, False])
def test_batches_wait_in_memory_if_the_disk_is_read_only(disk, caplog, known):
    path = str(disk / "spool")
    if known:
        before = ExportQueue(Receiver(), spool=Spool(path))
        before.put(numbered(1))
        before.shutdown(0)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    receiver = Receiver()
    queue = ExportQueue(receiver, spool=Spool(path))
    queue.put(numbered(2))
    assert "Read-only file system" in caplog.text
    assert "Read-only file system" in queue.find_storage_error()
    assert check(queue).queued == (3 if known else 2)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    queue.put(numbered(3))
    assert not queue.find_storage_error()
    assert check(queue).queued == (6 if known else 5)
    receiver.up.set()
    assert queue.force_flush(10_000)
    assert receiver.arrived == ([1, 2, 3] if known else [2, 3])
    queue.shutdown()
    assert check(queue).queued == 0
    again = Spool(path)
    assert (len(again.waiting), again.damaged, again.unknown_since_unix_ns) == (0, {}, 0)
    again.close()


def test_batches_from_earlier_runs_are_delivered_once_the_disk_is_readable_again(disk):
    """The disk with the spool may be mounted after the agent has started."""
    path = disk / "disk" / "spool"
    before = ExportQueue(Receiver(), spool=Spool(str(disk / "real" / "spool")))
    before.put(numbered(1))
    before.shutdown(0)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    receiver = Receiver()
    queue = ExportQueue(receiver, spool=Spool(str(path)))
    queue.put(numbered(2))
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    (disk / "real").rename(disk / "disk")
    queue.put(numbered(3))
    assert check(queue).carried == 1
    receiver.up.set()
    assert queue.force_flush(10_000)
    assert receiver.arrived == [2, 1, 3]
    queue.shutdown()
    assert check(queue)[1:4] == (6, {}, 0)


def test_a_corrupt_spool_delivers_intact_batches_and_counts_lost_batches(tmp_path):
    receiver = Receiver()
    spool = str(tmp_path / "spool")
    queue = ExportQueue(receiver, spool=Spool(spool, max_bytes=400_000))
    for number in range(1, 11):
        queue.put(numbered(number))
    queue.shutdown(0)
    names = sorted(name for name in os.listdir(spool) if name.endswith(".spool"))
    assert len(names) > 3
    with open(os.path.join(spool, names[1]), "r+b") as file:
        file.seek(1000)
        file.write(b"\xff" * 10)
    receiver = Receiver()
    receiver.up.set()
    again = ExportQueue(receiver, spool=Spool(spool, max_bytes=400_000))
    assert again.force_flush(10_000)
    again.shutdown()
    counts = check(again)
    assert receiver.arrived == sorted(receiver.arrived)
    assert counts.lost[LossCause.SPOOL_DAMAGED] == 55 - sum(receiver.arrived) > 0
    assert counts.exported == sum(receiver.arrived)


def test_a_hanging_disk_delays_neither_draining_nor_other_exporters(tmp_path, monkeypatch):
    from otel_kprofiler.delivery import Reporter
    from otel_kprofiler.otlp import Encoded

    go_on, entered = threading.Event(), threading.Event()
    real = os.fdatasync
    slow, quick = Receiver(), Receiver()
    slow.up.set()
    quick.up.set()
    queues = [ExportQueue(quick), ExportQueue(slow, spool=Spool(str(tmp_path / "spool")))]
    numbers = iter(range(1, 1000))
    reporter = Reporter(
        queues, encoder=lambda window, encoding: Encoded((numbered(next(numbers)),), {}), capacity=4
    )
    monkeypatch.setattr(os, "fdatasync", lambda fd: (entered.set(), go_on.wait(60), real(fd)))
    window = make_window(0, 1, ({}, ()))
    reporter(window)
    assert entered.wait(30)
    started = time.monotonic()
    for _ in range(50):
        reporter(window)
    assert time.monotonic() - started < 30, "handing over a window never waits"
    wait_until(lambda: quick.arrived)
    go_on.set()
    reporter.shutdown(10_000)


def test_the_next_run_reports_batches_lost_at_shutdown_after_the_disk_was_full(disk):
    down, up = Receiver(), Receiver()
    queue = ExportQueue(down, spool=Spool(str(disk / "spool")))
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    reporter = Reporter([queue])
    for number in range(1, 4):
        totals = StreamTotals("ab", number, number, {})
        sample = WindowSample(Stack(()), 1, "t", 0, None, (number * 10,))
        group = {"host.name": "here" * 5000}, (sample,)
        reporter(make_window(number * 10, number * 10 + 10, group, taken=1, totals=totals))
    assert not reporter.force_flush(200)
    filler.unlink()
    reporter.shutdown(2000)
    assert check(queue).lost == {LossCause.SHUTDOWN: 3}
    up.up.set()
    again = ExportQueue(up, spool=Spool(str(disk / "spool")))
    assert again.force_flush(10_000)
    again.shutdown()
    accounts = [
        window.profiles[0].totals for payload in up.payloads for window in decode_windows(payload)
    ]
    assert accounts[-1] == totals._replace(lost={LossCause.SHUTDOWN: 3})
