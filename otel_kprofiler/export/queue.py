"""The sending queue: one per exporter, bounded, with a worker thread of its own.

Batches wait in memory, or in a :class:`~otel_kprofiler.export.spool.Spool` that outlives the
process. A queue never makes who fills it wait for a receiver. When it is full, the oldest
batches give way and their samples are counted. The accounting is exact at every instant:

    accepted + carried = exported + all lost + queued

A batch that a durable queue could not deliver for want of a receiver stays where it is, until it
is too old or its room is needed; every other outcome settles it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from otel_kprofiler.export.base import ExportResult, ProfileExporter
from otel_kprofiler.export.recovery import Stored
from otel_kprofiler.export.spool import Spool
from otel_kprofiler.model import Batch, LossCause, Losses

DEFAULT_QUEUE_SIZE = 1000
"""Batches; as the Collector's ``sending_queue``."""
DEFAULT_QUEUE_BYTES = 16 * 1024 * 1024
"""Bytes of payload, so that a receiver that is down cannot fill the memory."""
_INTERRUPT_GRACE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_POLL_S = 0.1
_LAST_WORDS_SHARE: Final = 0.2
"""Share of the time for shutting down that is kept for a last request about what was lost."""

_TEMPORARY: Final = frozenset({LossCause.RETRIES_EXHAUSTED, LossCause.SHUTDOWN})

_log = logging.getLogger(__name__)


class QueueCounts(NamedTuple):
    """Totals since the start, in samples unless said otherwise.

    Attributes:
        accepted: what was put in.
        exported: what the exporter says has arrived.
        lost: what it says has not, and what the queue dropped, by cause.
        queued: what waits, or is being exported.
        batches: number of batches that wait or are being exported.
        queued_bytes: their size.
        carried: what the spool held of earlier runs at the start.
        carried_lost: that part of ``lost`` which is of earlier runs.
    """

    accepted: int
    exported: int
    lost: Losses
    queued: int
    batches: int
    queued_bytes: int
    carried: int = 0
    carried_lost: Losses = MappingProxyType({})


class _Held(NamedTuple):
    """A batch that waits: in memory, or in the spool."""

    number: int
    samples: int
    size: int
    batch: Batch | None
    stored: Stored | None
    carried: bool = False


class ExportQueue:
    """Hands batches to one exporter, in order, on a thread of its own. Thread-safe.

    Args:
        exporter: where batches go; shut down together with the queue.
        size: how many batches may wait in memory, >= 1.
        max_bytes: how many bytes of payload may wait in memory; one batch may always.
        on_export: called once for each batch given to the exporter, with its result and the
            seconds it took, retries included; on the worker thread, or, for a batch that had to
            be abandoned at shutdown, not at all.
        spool: where batches wait instead of memory, which is then for those only that cannot be
            written; closed together with the queue.
    """

    def __init__(
        self,
        exporter: ProfileExporter,
        *,
        size: int = DEFAULT_QUEUE_SIZE,
        max_bytes: int = DEFAULT_QUEUE_BYTES,
        on_export: Callable[[ExportResult, float], None] | None = None,
        spool: Spool | None = None,
    ) -> None:
        self.exporter = exporter
        self._size = max(size, 1)
        self._max_bytes = max_bytes
        self._on_export = on_export
        self._spool = spool
        self._changed = threading.Condition()
        self._waiting: deque[_Held] = deque()
        self._in_flight: _Held | None = None
        self._settling = 0  # how many times what became of batches is being written to the spool
        self._last = 0  # number of the batch put last
        self._accepted = self._exported = self._carried = 0
        self._lost: Counter[LossCause] = Counter()
        self._carried_lost: Counter[LossCause] = Counter()
        self._closing = False  # take no more
        self._stopping = False  # begin no more exports
        self._dropping: set[LossCause] = set()  # said, and not over yet
        self._pause_s = 0.0
        self._storage_trouble = ""
        self.unknown_since_unix_ns = 0
        self._carry()
        self._worker = threading.Thread(target=self._work, name=f"export {exporter.name}")
        self._worker.daemon = True
        self._worker.start()

    def put(self, batch: Batch) -> bool:
        """Add a batch; False if it was counted lost because of shutdown.

        Waits for the disk if there is a spool, never for the exporter. For one thread at a time.
        """
        with self._changed:
            if self._closing:
                self._accepted += batch.sample_count
                self._lost[LossCause.SHUTDOWN] += batch.sample_count
                return False
        self._append(batch)
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
            held = [*self._waiting, *([self._in_flight] if self._in_flight else [])]
            return QueueCounts(
                accepted=self._accepted,
                exported=self._exported,
                lost=dict(+self._lost),
                queued=sum(one.samples for one in held),
                batches=len(held),
                queued_bytes=sum(one.size for one in held),
                carried=self._carried,
                carried_lost=dict(+self._carried_lost),
            )

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until all that was put before is exported or lost; False on timeout."""
        deadline = time.monotonic() + timeout_millis / 1000
        with self._changed:
            last = self._last
            if not self._changed.wait_for(lambda: self._settled(last), timeout_millis / 1000):
                return False
        return self.exporter.force_flush(max(0.0, deadline - time.monotonic()) * 1000)

    def shutdown(
        self, timeout_millis: float = 30_000, last_words: Callable[[], Batch | None] | None = None
    ) -> None:
        """Export what is queued until the timeout, then end the worker.

        What is left stays in the spool, or is counted ``shutdown`` if it is in memory. With a
        spool nobody is waited for who cannot be reached. Takes at most about a second longer
        than the timeout, which an exporter has to break off. Idempotent; a later ``put`` is
        counted ``shutdown``.

        Args:
            timeout_millis: how long that may take.
            last_words: makes a request without samples that tells what was lost, or None if the
                receiver knows. Asked when what is under way has ended, and, with a spool, once
                more at the very end.
        """
        timeout_s = timeout_millis / 1000
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._stopping:
                last_words = None
            kept_s = _LAST_WORDS_SHARE * timeout_s if last_words else 0.0
            self._closing = True
            self._changed.notify_all()
            self._wait_settled(deadline - kept_s)
            self._drop([held for held in self._waiting if held.batch], LossCause.SHUTDOWN)
            self._wait_settled(deadline - kept_s / 2)
        if last_words and (words := last_words()):
            self._append(words)
        with self._changed:
            self._wait_settled(deadline)
            self._stopping = True
            self._drop([held for held in self._waiting if held.batch], LossCause.SHUTDOWN)
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
                self._count(held, {LossCause.SHUTDOWN: held.samples})
        if self._spool:
            if last_words and (words := last_words()):
                self._store(words)
            self._spool.close()

    def find_storage_trouble(self) -> str:
        """Why the spool cannot be written, if the last attempt has failed."""
        return self._storage_trouble

    def _carry(self) -> None:
        """Take over what earlier runs have left in the spool, once it could be opened."""
        spool = self._spool
        if spool is None or not (spool.waiting or spool.damaged or spool.unknown_since_unix_ns):
            return
        for stored in spool.waiting:
            self._last += 1
            held = _Held(self._last, stored.samples, stored.size, None, stored, carried=True)
            self._waiting.append(held)
        self._carried += sum(stored.samples for stored in spool.waiting) + spool.damaged
        if spool.damaged:
            self._lost[LossCause.SPOOL_DAMAGED] += spool.damaged
            self._carried_lost[LossCause.SPOOL_DAMAGED] += spool.damaged
        self.unknown_since_unix_ns = spool.unknown_since_unix_ns
        spool.waiting.clear()
        spool.damaged = spool.unknown_since_unix_ns = 0
        if self.unknown_since_unix_ns:
            _log.warning(
                "%s: the run before was killed, or the end of its spool is damaged; what it took"
                " after its last batch is unknown",
                self.exporter.name,
            )

    def _append(self, batch: Batch) -> None:
        self._make_room(len(batch.payload))
        stored = self._store(batch)
        size = stored.size if stored else len(batch.payload)
        with self._changed:
            self._accepted += batch.sample_count
            self._last += 1
            if stored is None:
                self._make_room_in_memory(size)
            kept = None if stored else batch
            self._waiting.append(_Held(self._last, batch.sample_count, size, kept, stored))
            self._changed.notify_all()

    def _store(self, batch: Batch) -> Stored | None:
        if not self._spool:
            return None
        try:
            stored = self._spool.append(batch)
        except OSError as error:
            self._note_storage(error.strerror or str(error), "batches wait in memory")
            stored = None
        else:
            self._note_storage("")
        with self._changed:
            self._carry()
        return stored

    def _note_storage(self, trouble: str, consequence: str = "") -> None:
        """Say once that the spool cannot be written, and once that it can be again."""
        before, self._storage_trouble = self._storage_trouble, trouble
        if trouble and trouble != before:
            _log.warning(
                "%s: the spool cannot be written: %s; %s (said once)",
                self.exporter.name, trouble, consequence,
            )  # fmt: skip
        elif before and not trouble:
            _log.info("%s: the spool can be written again", self.exporter.name)

    def _make_room(self, more: int) -> None:
        """Let batches in the spool go that are too old, or whose segment has to give way."""
        while self._spool:
            with self._changed:
                waiting = [held.stored for held in self._waiting if held.stored]
                count, cause = self._spool.count_overdue(waiting, more)
                if cause is None or self._stopping:
                    break
                last = waiting[count - 1]
                doomed = [h for h in self._waiting if h.stored and h.stored.number <= last.number]
                self._drop(doomed, cause)
                self._settling += 1
            self._settle(last, sum(held.samples for held in doomed))

    def _make_room_in_memory(self, more: int) -> None:
        waiting = deque(held for held in self._waiting if held.batch)
        size = sum(held.size for held in waiting)
        doomed = []
        while waiting and (len(waiting) >= self._size or size + more > self._max_bytes):
            doomed.append(waiting.popleft())
            size -= doomed[-1].size
        self._drop(doomed, LossCause.QUEUE_FULL)

    def _drop(self, doomed: Sequence[_Held], cause: LossCause) -> None:
        """Count batches as lost that wait."""
        if doomed and cause not in {LossCause.SHUTDOWN, *self._dropping}:
            _log.warning("%s: %s: the oldest data is dropped", self.exporter.name, cause.value)
        numbers = {held.number for held in doomed}
        self._waiting = deque(held for held in self._waiting if held.number not in numbers)
        for held in doomed:
            self._count(held, {cause: held.samples})
            self._dropping.add(cause)

    def _count(self, held: _Held, lost: Losses) -> None:
        self._lost.update(lost)
        if held.carried:
            self._carried_lost.update(lost)

    def _settle(self, stored: Stored, samples: int) -> None:
        """Have the spool note that a batch and all before it need no delivery any more.

        Whoever has taken them off the queue has counted itself in ``_settling`` at once, so that
        the spool is not closed in between.
        """
        try:
            if self._spool:
                self._spool.settle(stored.number, samples)
                self._note_storage("")
        except OSError as error:
            self._note_storage(error.strerror or str(error), "after a crash some data comes twice")
        finally:
            with self._changed:
                self._settling -= 1
                self._changed.notify_all()

    def _wait_settled(self, deadline: float) -> None:
        """Wait until all has left the queue, or the receiver turns out not to be there."""
        while not self._settled(self._last) and (left := deadline - time.monotonic()) > 0:
            if self._spool and self.exporter.find_trouble():
                break
            self._changed.wait(min(left, _POLL_S))

    def _settled(self, last: int) -> bool:
        """Whether all batches up to a number have left the queue; they leave in order."""
        first = self._in_flight or (self._waiting[0] if self._waiting else None)
        return not self._settling and (first is None or first.number > last)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self._pause_s)
                self._changed.wait_for(lambda: self._waiting or self._stopping)
            self._make_room(0)
            with self._changed:
                if self._stopping:
                    return
                if not self._waiting:
                    continue
                held = self._in_flight = self._waiting.popleft()
                exporter = self.exporter
            batch = self._load(held)
            result = self._export(exporter, batch) if batch else None
            with self._changed:
                # A batch that shutdown has counted already must not be counted again.
                if self._in_flight is not held:
                    continue
                self._in_flight = None
                done = self._conclude(held, result, replaced=exporter is not self.exporter)
                self._settling += bool(done and held.stored)
                self._changed.notify_all()
            if done and held.stored:
                self._settle(held.stored, held.samples)

    def _load(self, held: _Held) -> Batch | None:
        if held.stored is None or self._spool is None:
            return held.batch
        try:
            return self._spool.read(held.stored)
        except (OSError, ValueError) as error:
            _log.warning("%s: %s", self.exporter.name, error)
            return None

    def _conclude(self, held: _Held, result: ExportResult | None, *, replaced: bool) -> bool:
        """Count what became of a batch, or have it wait again; whether it is settled."""
        gone = held.stored and self._spool and not self._spool.holds(held.stored)
        if result is None:
            cause = LossCause.SPOOL_FULL if gone else LossCause.SPOOL_DAMAGED
            self._count(held, {cause: held.samples})
        elif replaced and LossCause.SHUTDOWN in result.lost:
            # Given up because the exporter was replaced; none of it was accepted.
            self._waiting.appendleft(held)
            return False
        elif held.stored and not result.exported and _is_temporary(result):
            if not gone:
                self._waiting.appendleft(held)
                self._pause_s = min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)
                return False
            # Its segment had to give way while it was under way.
            self._count(held, {LossCause.SPOOL_FULL: held.samples})
        else:
            self._exported += result.exported
            self._count(held, result.lost)
            self._dropping.clear()
        self._pause_s = 0.0
        return True

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


def _is_temporary(result: ExportResult) -> bool:
    """Whether a batch, which may have no samples, is worth another attempt."""
    return bool(result.lost) and _TEMPORARY.issuperset(result.lost)
