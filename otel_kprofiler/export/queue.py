"""The sending queue: one per exporter, bounded, with a worker thread of its own.

A queue never blocks who fills it. When it is full, the oldest batch gives way and its samples
are counted ``queue_full``. The accounting is exact at every instant:

    accepted = exported + all lost + queued
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from otel_kprofiler.export.base import ExportResult, ProfileExporter
from otel_kprofiler.model import Batch, LossCause, Losses

DEFAULT_QUEUE_SIZE = 1000
"""Batches; as the Collector's ``sending_queue``."""
DEFAULT_QUEUE_BYTES = 16 * 1024 * 1024
"""Bytes of payload, so that a receiver that is down cannot fill the memory."""
_INTERRUPT_GRACE_S = 1.0

_log = logging.getLogger(__name__)


class QueueCounts(NamedTuple):
    """Totals since the start, in samples unless said otherwise.

    Attributes:
        accepted: what was put in.
        exported: what the exporter says has arrived.
        lost: what it says has not, and what the queue dropped, by cause.
        queued: what waits, or is being exported.
        batches: number of batches that wait or are being exported.
        queued_bytes: their payload.
    """

    accepted: int
    exported: int
    lost: Losses
    queued: int
    batches: int
    queued_bytes: int


class ExportQueue:
    """Hands batches to one exporter, in order, on a thread of its own. Thread-safe.

    Args:
        exporter: where batches go; shut down together with the queue.
        size: how many batches may wait, >= 1.
        max_bytes: how many bytes of payload may wait; one batch may always.
        on_export: called once for each batch given to the exporter, with its result and the
            seconds it took, retries included; on the worker thread, or, for a batch that had to
            be abandoned at shutdown, not at all.
    """

    def __init__(
        self,
        exporter: ProfileExporter,
        *,
        size: int = DEFAULT_QUEUE_SIZE,
        max_bytes: int = DEFAULT_QUEUE_BYTES,
        on_export: Callable[[ExportResult, float], None] | None = None,
    ) -> None:
        self.exporter = exporter
        self._size = max(size, 1)
        self._max_bytes = max_bytes
        self._on_export = on_export
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Batch]] = deque()
        self._waiting_bytes = 0
        self._in_flight: tuple[int, Batch] | None = None
        self._last = 0  # number of the batch put last
        self._accepted = self._exported = 0
        self._lost: Counter[LossCause] = Counter()
        self._closing = False
        self._overflowing = False
        self._worker = threading.Thread(target=self._work, name=f"export {exporter.name}")
        self._worker.daemon = True
        self._worker.start()

    def put(self, batch: Batch) -> bool:
        """Add a batch without blocking; False if it was counted lost because of shutdown."""
        with self._changed:
            self._accepted += batch.sample_count
            if self._closing:
                self._lost[LossCause.SHUTDOWN] += batch.sample_count
                return False
            overflow = False
            while self._waiting and (
                len(self._waiting) >= self._size
                or self._waiting_bytes + len(batch.payload) > self._max_bytes
            ):
                self._lost[LossCause.QUEUE_FULL] += self._take().sample_count
                overflow = True
            self._last += 1
            self._waiting.append((self._last, batch))
            self._waiting_bytes += len(batch.payload)
            first_overflow, self._overflowing = overflow and not self._overflowing, overflow
            self._changed.notify_all()
        if first_overflow:
            _log.warning("%s: the queue is full, the oldest data is dropped", self.exporter.name)
        return True

    def replace(self, exporter: ProfileExporter, *, size: int = DEFAULT_QUEUE_SIZE) -> None:
        """Send by another exporter of the same form, also what waits.

        The old one is shut down without waiting for it; a batch that it gives up because of
        that goes to the new one.
        """
        with self._changed:
            old, self.exporter, self._size = self.exporter, exporter, max(size, 1)
        threading.Thread(target=old.shutdown, name=f"close {old.name}", daemon=True).start()

    def lose(self, samples: int, cause: LossCause) -> None:
        """Count samples that were meant for this exporter but never became a batch."""
        with self._changed:
            self._accepted += samples
            self._lost[cause] += samples

    def counts(self) -> QueueCounts:
        """A consistent picture of all totals."""
        with self._changed:
            held = [batch for _, batch in self._waiting]
            if self._in_flight:
                held.append(self._in_flight[1])
            return QueueCounts(
                accepted=self._accepted,
                exported=self._exported,
                lost=dict(+self._lost),
                queued=sum(batch.sample_count for batch in held),
                batches=len(held),
                queued_bytes=sum(len(batch.payload) for batch in held),
            )

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until all that was put before is exported or lost; False on timeout."""
        deadline = time.monotonic() + timeout_millis / 1000
        with self._changed:
            last = self._last
            if not self._changed.wait_for(lambda: self._settled(last), timeout_millis / 1000):
                return False
        return self.exporter.force_flush(max(0.0, deadline - time.monotonic()) * 1000)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Export what is queued until the timeout, count the rest ``shutdown``, end the worker.

        Takes at most about a second longer than the timeout, which an exporter has to break off.
        Idempotent; a later ``put`` is counted ``shutdown``.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._settled(self._last), timeout_millis / 1000)
            while self._waiting:
                self._lost[LossCause.SHUTDOWN] += self._take().sample_count
        self.exporter.shutdown(0)
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight is None, _INTERRUPT_GRACE_S)
            if self._in_flight:
                self._lost[LossCause.SHUTDOWN] += self._in_flight[1].sample_count
                self._in_flight = None

    def _settled(self, last: int) -> bool:
        """Whether all batches up to a number have left the queue; they leave in order."""
        first = self._in_flight or (self._waiting[0] if self._waiting else None)
        return first is None or first[0] > last

    def _take(self) -> Batch:
        _, batch = self._waiting.popleft()
        self._waiting_bytes -= len(batch.payload)
        return batch

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                entry = self._in_flight = self._waiting[0]
                batch, exporter = self._take(), self.exporter
            result = self._export(exporter, batch)
            with self._changed:
                if (
                    exporter is not self.exporter
                    and self._in_flight is entry
                    and LossCause.SHUTDOWN in result.lost
                ):
                    # Given up because the exporter was replaced; none of it was accepted.
                    self._in_flight = None
                    self._waiting.appendleft(entry)
                    self._waiting_bytes += len(batch.payload)
                    continue
                # A batch that shutdown has counted already must not be counted again.
                if self._in_flight is entry:
                    self._exported += result.exported
                    self._lost.update(result.lost)
                    self._in_flight = None
                    self._changed.notify_all()

    def _export(self, exporter: ProfileExporter, batch: Batch) -> ExportResult:
        started = time.monotonic()
        try:
            result = exporter.export(batch)
            told = result.exported + sum(result.lost.values())
            if told != batch.sample_count:
                raise ValueError(f"accounts for {told} of {batch.sample_count} samples")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 -- counted and logged
            _log.exception("%s: export failed by a defect", exporter.name)
            message = f"{type(error).__name__}: {error}"
            result = ExportResult.failure(batch, LossCause.INTERNAL, message)
        if self._on_export:
            try:
                self._on_export(result, time.monotonic() - started)
            except Exception:  # noqa: BLE001 -- logged; the account does not depend on it
                _log.exception("%s: the observer of exports failed", exporter.name)
        return result
