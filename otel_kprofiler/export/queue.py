"""Queues an exporter's batches, up to a maximum number and size, and sends them in a worker thread.

Batches wait in memory, or in a :class:`~otel_kprofiler.export.spool.Spool` that outlives the
process. Producers never wait for a receiver. A full queue drops its oldest batches and counts their
samples. For each kind of sample, this equation holds at all times::

    accepted + carried = exported + all lost + queued

With a spool, a batch that cannot reach the receiver remains queued until the batch is too old or
its disk space is needed. All outcomes of an export except an unreachable receiver are final.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final

from otel_kprofiler.export.backlog import Backlog, Held
from otel_kprofiler.export.base import Part, ProfileExporter, is_wholly_lost
from otel_kprofiler.export.exports import OnExport, export_all, is_temporary
from otel_kprofiler.export.ledger import Ledgers, QueueCounts, sum_kinds
from otel_kprofiler.export.recovery import Stored
from otel_kprofiler.export.spool import Spool
from otel_kprofiler.export.storage_log import StorageLog
from otel_kprofiler.model import Batch, LossCause, SampleCounts

DEFAULT_QUEUE_SIZE = 1000
"""Default capacity in batches, as in the Collector's ``sending_queue``."""
DEFAULT_QUEUE_BYTES = 16 * 1024 * 1024
"""Default limit on the total payload of batches waiting in memory, in bytes."""
_INTERRUPT_GRACE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_POLL_S = 0.1
_FINAL_REQUEST_SHARE: Final = 0.2
"""Fraction of the shutdown timeout reserved for the final request, which reports losses."""

_log = logging.getLogger(__name__)

OnLost = Callable[[Batch, LossCause], None]


class ExportQueue:
    """Passes batches to one exporter, in order, in a separate thread. Thread-safe.

    Args:
        exporter: exports the batches; shut down together with the queue.
        size: maximum number of batches in memory, >= 1.
        max_bytes: maximum payload in memory, in bytes; one batch is always accepted.
        on_export: called on the worker thread after each export, with the result and the duration
            in seconds, including retries. Batches abandoned at shutdown are not reported.
        spool: keeps batches on disk, so that memory holds only batches that could not be written to
            disk. The queue closes the spool.
        on_lost: called when a batch in memory is counted as lost, unless it was partly delivered.
            ``on_lost`` is called on any thread, one call at a time, and must not raise.
    """

    def __init__(
        self,
        exporter: ProfileExporter,
        *,
        size: int = DEFAULT_QUEUE_SIZE,
        max_bytes: int = DEFAULT_QUEUE_BYTES,
        on_export: OnExport | None = None,
        spool: Spool | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self.exporter = exporter
        self._on_lost = on_lost
        self._size = max(size, 1)
        self._max_bytes = max_bytes
        self._on_export = on_export
        self._spool = spool
        self._changed = threading.Condition()
        self._waiting = Backlog()
        self._in_flight: Held | None = None
        self._settling = 0  # number of settle() calls in progress on the spool
        self._last = 0  # number of the last batch
        self._ledgers = Ledgers(is_spooled=spool is not None)
        self._closing = False  # whether to reject further batches
        self._stopping = False  # whether to stop after the current export
        self._dropping: set[LossCause] = set()  # loss causes already logged
        self._pause_s = 0.0
        self._storage = StorageLog(lambda: self.exporter.name)
        self.unknown_since_unix_ns = 0
        self._adopt_carried()
        self._worker = threading.Thread(target=self._work, name=f"kprofiler-export {exporter.name}")
        self._worker.daemon = True
        self._worker.start()

    def put(self, batch: Batch, rest: SampleCounts | None = None) -> bool:
        """Add a batch. Return False if the batch was counted as lost because of shutdown.

        Waits for the spool, if there is one, but never for the exporter. Only one thread may call
        this method. ``rest`` counts the samples in later batches for the same window, by kind.
        """
        with self._changed:
            if self._closing:
                self._ledgers.accept(batch.sample_counts)
                self._ledgers.lose(batch.sample_counts, LossCause.SHUTDOWN)
                return False
        return self._append(batch, rest)

    def replace(self, exporter: ProfileExporter, *, size: int = DEFAULT_QUEUE_SIZE) -> None:
        """Switch to a new exporter with the same ``form``, which also receives all waiting batches.

        The old exporter is shut down in the background. Batches that the old exporter abandons are
        passed to the new exporter.
        """
        with self._changed:
            old, self.exporter, self._size = self.exporter, exporter, max(size, 1)
        threading.Thread(target=old.shutdown, name=f"close {old.name}", daemon=True).start()

    def record_loss(self, samples: Mapping[str, int], cause: LossCause) -> None:
        """Count samples, given by kind, that were lost before they became part of a batch."""
        with self._changed:
            self._ledgers.accept(samples)
            self._ledgers.lose(samples, cause)

    def counts(self) -> QueueCounts:
        """Returns a consistent snapshot of the counts."""
        with self._changed:
            samples, number, size = self._waiting.totals()
            if held := self._in_flight:
                samples, number, size = samples + held.samples, number + 1, size + held.size
            return self._ledgers.counts(samples, number, size)

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until all batches added so far are exported or lost. Return False on timeout."""
        deadline = time.monotonic() + timeout_millis / 1000
        with self._changed:
            last = self._last
            if not self._changed.wait_for(lambda: self._settled(last), timeout_millis / 1000):
                return False
        return self.exporter.force_flush(max(0.0, deadline - time.monotonic()) * 1000)

    def shutdown(
        self,
        timeout_millis: float = 30_000,
        final_request: Callable[[], Batch | None] | None = None,
    ) -> None:
        """Export queued batches until the timeout, then stop the worker. Idempotent.

        Undelivered batches remain in the spool. Batches in memory, and batches added later, count
        as lost with the cause ``shutdown``. If there is a spool, the shutdown does not wait for an
        unreachable receiver. Aborting the exporter may take a second longer than the timeout.

        ``final_request`` builds a request without samples that reports losses, or returns None if
        they have been reported already. ``final_request`` is called after the export in progress
        and, if there is a spool, again at the end of the shutdown.
        """
        timeout_s = timeout_millis / 1000
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._stopping:
                final_request = None
            kept_s = _FINAL_REQUEST_SHARE * timeout_s if final_request else 0.0
            self._closing = True
            self._changed.notify_all()
            if not self._spool:
                self.exporter.hurry()
            self._wait_settled(deadline - kept_s)
            self._drop(self._in_memory(), LossCause.SHUTDOWN)
            self._wait_settled(deadline - kept_s / 2)
        if final_request and (final := final_request()):
            self._append(final)
        with self._changed:
            self._wait_settled(deadline)
            self._stopping = True
            self._drop(self._in_memory(), LossCause.SHUTDOWN)
            self._changed.notify_all()
        self.exporter.shutdown(0)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._in_flight and not self._settling, _INTERRUPT_GRACE_S
            )
            held, self._in_flight = self._in_flight, None
            if held and held.stored:
                self._waiting.appendleft(held)
            elif held:
                self._lose(held, LossCause.SHUTDOWN)
        if self._spool:
            self._keep_parts()
            if final_request and (final := final_request()):
                self._store(final)
            self._spool.close()

    def _keep_parts(self) -> None:
        """Replace a partially delivered batch in the spool with its undelivered parts."""
        with self._changed:
            first = self._waiting.first
            if first is None or first.stored is None or not first.batches:
                return
            self._settling += 1
        if all(self._store(part, is_part=True) for part in first.batches):
            self._settle(first, left=first.samples)
        else:  # the next run resends the whole batch
            with self._changed:
                self._settling -= 1

    def find_storage_error(self) -> str:
        """Returns why the last write to or read from the spool failed; empty if it succeeded."""
        return self._storage.write_error or self._storage.read_error

    def _adopt_carried(self) -> None:
        """Queue the batches that earlier runs left in the spool."""
        spool = self._spool
        if spool is None or spool.is_hung:
            return
        if not (spool.waiting or spool.earlier or spool.unknown_since_unix_ns):
            return
        for stored in spool.waiting:
            self._last += 1
            held = Held(self._last, stored.samples, stored.size, (), stored, [], carried=True)
            self._waiting.append(held)
            self._ledgers.carry(stored.samples)
        self._ledgers.begin(spool.earlier, spool.earlier_lost)
        self._ledgers.carry(spool.damaged)
        self._ledgers.lose(spool.damaged, LossCause.SPOOL_DAMAGED, carried=True)
        self.unknown_since_unix_ns = spool.unknown_since_unix_ns
        spool.waiting.clear()
        spool.damaged.clear()
        spool.earlier.clear()
        spool.unknown_since_unix_ns = 0
        if self.unknown_since_unix_ns:
            _log.warning(
                "%s: the previous run was killed, or the end of its spool is corrupt; the number of"
                " samples taken after its last batch is unknown",
                self.exporter.name,
            )

    def _append(self, batch: Batch, rest: SampleCounts | None = None) -> bool:
        self._free_disk_space(len(batch.payload))
        stored = self._store(batch, rest)
        size = stored.size if stored else len(batch.payload)
        with self._changed:
            self._ledgers.accept(batch.sample_counts)
            self._last += 1
            if stored is None:
                self._free_memory(size)
            kept = () if stored else (batch,)
            held = Held(self._last, batch.sample_counts, size, kept, stored, [])
            if self._stopping and not stored:  # shutdown began after put() checked
                self._lose(held, LossCause.SHUTDOWN)
                return False
            self._waiting.append(held)
            self._changed.notify_all()
            return True

    def _store(
        self, batch: Batch, rest: SampleCounts | None = None, *, is_part: bool = False
    ) -> Stored | None:
        if not self._spool:
            return None
        try:
            stored = self._spool.append(batch, rest, is_part=is_part)
        except OSError as error:
            self._storage.note_writing(error, "batches wait in memory")
            stored = None
        else:
            self._storage.note_writing(None)
        with self._changed:
            self._adopt_carried()
        return stored

    def _free_disk_space(self, more: int) -> None:
        """Drop spooled batches that are too old, or whose segment must be deleted to free space."""
        while self._spool:
            with self._changed:
                overdue, cause = self._spool.find_overdue(self._waiting.stored(), more)
                if cause is None or self._stopping:
                    break
                dropped = self._waiting.stored_through(overdue[-1].number)
                self._drop(dropped, cause)
                self._settling += 1
            self._settle(*dropped)

    def _free_memory(self, more: int) -> None:
        waiting = deque(self._in_memory())
        size = sum(held.size for held in waiting)
        dropped = []
        while waiting and (len(waiting) >= self._size or size + more > self._max_bytes):
            dropped.append(waiting.popleft())
            size -= dropped[-1].size
        self._drop(dropped, LossCause.QUEUE_FULL)

    def _in_memory(self) -> list[Held]:
        return [held for held in self._waiting if not held.stored]

    def _drop(self, dropped: Sequence[Held], cause: LossCause) -> None:
        if dropped and cause not in {LossCause.SHUTDOWN, *self._dropping}:
            _log.warning("%s: dropping the oldest data (%s)", self.exporter.name, cause.value)
        self._waiting.remove(dropped)
        for held in dropped:
            self._lose(held, cause)
            self._dropping.add(cause)

    def _lose(self, held: Held, cause: LossCause) -> None:
        self._ledgers.lose(held.samples, cause, carried=held.carried)
        held.lost.append({kind: {cause: count} for kind, count in held.samples.items()})
        if self._on_lost and not held.stored:
            for batch in held.batches:
                self._on_lost(batch, cause)

    def _settle(self, *settled: Held, left: SampleCounts | None = None) -> None:
        """Record in the spool that its oldest batches have been delivered or lost.

        ``left`` counts the samples in undelivered parts of the settled batches, which remain in the
        spool. The caller increments ``_settling`` when it removes the batches from the queue, so
        that the spool is not closed before the record is written.
        """
        try:
            stored = [held.stored for held in settled if held.stored]
            if self._spool and stored:
                samples = sum((batch.samples for batch in stored), SampleCounts())
                samples -= left or SampleCounts()
                lost = sum_kinds(chain.from_iterable(held.lost for held in settled))
                self._spool.settle(stored[-1].number, samples, lost)
                self._storage.note_writing(None)
        except OSError as error:
            self._storage.note_writing(error, "data would be resent after a crash")
        finally:
            with self._changed:
                self._settling -= 1
                self._changed.notify_all()

    def _wait_settled(self, deadline: float) -> None:
        """Wait until the queue is empty or, if there is a spool, the receiver is unreachable."""
        while not self._settled(self._last) and (left := deadline - time.monotonic()) > 0:
            if self._spool and self.exporter.find_outage():
                break
            self._changed.wait(min(left, _POLL_S))

    def _settled(self, last: int) -> bool:
        """Returns whether all batches with numbers up to ``last`` have left the queue."""
        first = self._in_flight or self._waiting.first
        return not self._settling and (first is None or first.number > last)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self._pause_s)
                self._changed.wait_for(lambda: self._waiting or self._stopping)
            self._free_disk_space(0)
            with self._changed:
                if self._stopping:
                    return
                if not self._waiting:
                    continue
                held = self._in_flight = self._waiting.popleft()
                exporter = self.exporter
            loaded = self._load(held)
            if loaded is None:
                self._put_back(held)
                continue
            parts = export_all(exporter, loaded, self._on_export)
            with self._changed:
                if self._in_flight is not held:  # shutdown has counted this batch as lost
                    continue
                self._in_flight = None
                done = self._conclude(held, parts, replaced=exporter is not self.exporter)
                self._settling += done
                self._changed.notify_all()
            if done:
                self._settle(held)

    def _load(self, held: Held) -> tuple[Batch, ...] | None:
        """Returns a queued batch, or its undelivered parts; empty if the batch is damaged.

        Returns None if the batch may be readable later, for example once the process may open
        files again.
        """
        if held.batches or held.stored is None or self._spool is None:
            return held.batches
        try:
            batch = self._spool.read(held.stored)
        except (OSError, ValueError) as error:
            return None if self._storage.may_read_later(error) else ()
        self._storage.note_read()
        return (batch,)

    def _put_back(self, held: Held) -> None:
        """Return a batch that cannot be read now to the front of the queue."""
        with self._changed:
            if self._in_flight is held:
                self._in_flight = None
                self._waiting.appendleft(held)
                self._lengthen_pause()
                self._changed.notify_all()

    def _lengthen_pause(self) -> None:
        self._pause_s = min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)

    def _conclude(self, held: Held, parts: Sequence[Part], *, replaced: bool) -> bool:
        """Count a batch's outcome; requeue undelivered parts, and return False if there are any."""
        gone = held.stored and self._spool and not self._spool.holds(held.stored)
        if not parts:
            self._lose(held, LossCause.SPOOL_FULL if gone else LossCause.SPOOL_DAMAGED)
        left = []
        is_abandoned = False
        for batch, result in parts:
            if replaced and LossCause.SHUTDOWN in result.lost:
                # The batch was abandoned because the exporter was replaced; no part was accepted.
                is_abandoned = True
                left.append(batch)
            elif held.stored and not result.exported and is_temporary(result):
                if not gone:
                    left.append(batch)
                    continue
                # The batch's segment was dropped during the export.
                self._lose(held._replace(samples=batch.sample_counts), LossCause.SPOOL_FULL)
            else:
                self._ledgers.conclude(result, carried=held.carried)
                held.lost.append(
                    {kind: kind_result.lost for kind, kind_result in result.kinds.items()}
                )
                self._dropping.clear()
                if self._on_lost and not held.stored and is_wholly_lost(result):
                    self._on_lost(batch, next(iter(result.lost)))
        if not left:
            self._pause_s = 0.0
            return True
        if not is_abandoned:
            self._lengthen_pause()
        if len(left) < len(parts):
            samples = sum((batch.sample_counts for batch in left), SampleCounts())
            held = held._replace(samples=samples, batches=tuple(left))
        self._waiting.appendleft(held)
        return False
