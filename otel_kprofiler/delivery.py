"""Delivers closed windows to each exporter's queue and accounts for the samples."""

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple

from otel_kprofiler.export import ExportQueue, QueueCounts
from otel_kprofiler.model import (
    Batch,
    Encoding,
    ExporterAccount,
    LossCause,
    Profile,
    Resource,
    ResourceSamples,
    SampleCounts,
    StreamTotals,
    Window,
    sum_losses,
)
from otel_kprofiler.otlp import Encoded, encode_window

MAX_WAITING_SAMPLES: Final = 250_000
"""Maximum number of samples waiting to be encoded (about 25 MB); a single window may exceed it."""
_ENCODING_SHARE: Final = 0.7
"""Fraction of the shutdown timeout after which no more windows are encoded."""

_log = logging.getLogger(__name__)

Encoder = Callable[[Window, Encoding], Encoded]


def encode(window: Window, encoding: Encoding) -> Encoded:
    """Encode a window; see :func:`otel_kprofiler.otlp.encode_window`."""
    return encode_window(window, **encoding._asdict())


class _Task(NamedTuple):
    window: Window
    queues: tuple[ExportQueue, ...]
    samples: SampleCounts
    not_offered: Mapping[str, SampleCounts]  # by exporter, when the window was closed


class Reporter:
    """Encodes each window once per :class:`Encoding` and fills the exporters' queues.

    Encoding runs in a separate thread, so that a large window never delays draining the ring
    buffer. Only a single thread may pass windows; all other methods are thread-safe. Samples are
    counted per exporter name, so the counts persist when an exporter's queue is replaced.

    At most ``capacity`` windows, with :data:`MAX_WAITING_SAMPLES` samples in total, wait to be
    encoded. Beyond these limits, the oldest window is dropped, and its samples are counted as lost.
    Without ``background``, windows are encoded in the calling thread. ``expected`` contains the
    names of exporters that are not open yet. Their samples are counted as not offered.
    """

    def __init__(
        self,
        queues: Sequence[ExportQueue],
        *,
        encoder: Encoder = encode,
        capacity: int = 16,
        background: bool = True,
        expected: Sequence[str] = (),
    ) -> None:
        self._queues = tuple(queues)
        self._leaving: list[ExportQueue] = []
        self._past: dict[str, list[QueueCounts]] = {}
        names = [*expected, *(queue.exporter.name for queue in queues)]
        self._not_offered = {name: SampleCounts() for name in names}
        self._handed_over = SampleCounts()
        self._latest: Window | None = None  # totals of the last window, for the final request
        # The totals last reported to each queue, by kind.
        self._reported: dict[ExportQueue, dict[str, StreamTotals]] = {}
        self._encoder = encoder
        self._capacity = capacity
        self._waiting: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._encoding: _Task | None = None
        # Samples that each queue accepted before the current task's batches were enqueued. Set only
        # while enqueuing (which may block on a disk), so that no accepted sample is counted twice.
        self._accepted_before: dict[ExportQueue, SampleCounts] = {}
        self._closing = False
        self._background = background
        if background:
            threading.Thread(target=self._run, name="kprofiler-encode", daemon=True).start()

    def __call__(self, window: Window) -> None:
        """Queue a window for encoding, unless it is empty. Never blocks if ``background`` is set.

        Samples that the window lists as lost at shutdown also count as lost for each exporter.
        """
        given_up = SampleCounts(
            {
                profile.kind.name: profile.lost.get(LossCause.SHUTDOWN, 0)
                for profile in window.profiles
            }
        )
        with self._changed:
            if _totals(window):
                self._latest = _account_only(window, self._latest)
            if given_up.total():
                self._lose(self._take(window, given_up), LossCause.SHUTDOWN)
            if not any(profile.resources for profile in window.profiles):
                return
            task = self._take(window, window.sample_counts)
            while self._is_full(task.samples.total()):
                self._lose(self._waiting.popleft(), LossCause.QUEUE_FULL)
            self._waiting.append(task)
            self._changed.notify_all()
        if not self._background:
            self._encode_next()

    def _is_full(self, more: int) -> bool:
        """Returns whether to drop a waiting window; False if no window is waiting."""
        samples = sum(task.samples.total() for task in self._waiting) + more
        full = len(self._waiting) >= self._capacity or samples > MAX_WAITING_SAMPLES
        return full and bool(self._waiting)

    def _take(self, window: Window, samples: SampleCounts) -> _Task:
        """Returns a task for the given samples from a window. Caller must hold the lock."""
        not_offered = {name: counts.copy() for name, counts in self._not_offered.items()}
        task = _Task(window, self._queues, samples, not_offered)
        self._handed_over.update(samples)
        for name in self._not_offered.keys() - {queue.exporter.name for queue in self._queues}:
            self._not_offered[name].update(samples)
        return task

    def replace(self, queues: Sequence[ExportQueue]) -> None:
        """Use ``queues`` from the next window on.

        Queues that are no longer used deliver their batches in the background, and are then closed.
        """
        with self._changed:
            leaving = [queue for queue in self._queues if queue not in queues]
            self._queues = tuple(queues)
            self._leaving += leaving
            for queue in queues:
                self._not_offered.setdefault(queue.exporter.name, self._handed_over.copy())
        for queue in leaving:
            threading.Thread(
                target=self._drain_and_close,
                args=(queue,),
                name=f"retire {queue.exporter.name}",
                daemon=True,
            ).start()

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """Returns a consistent snapshot of all exporters' sample counts."""
        with self._changed:
            return tuple(map(self._account, self._not_offered))

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until every window received so far has been exported. Return False on timeout."""
        deadline = time.monotonic() + timeout_millis / 1000
        encoded = self._wait_encoded(deadline)
        flushed = [queue.force_flush(_millis_to(deadline)) for queue in self._open_queues()]
        return encoded and all(flushed)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Export pending batches within the timeout; count unsent samples as lost at shutdown."""
        now = time.monotonic()
        deadline = now + timeout_millis / 1000
        self._wait_encoded(now + _ENCODING_SHARE * timeout_millis / 1000)
        with self._changed:
            self._closing = True
            while self._waiting:
                self._lose(self._waiting.popleft(), LossCause.SHUTDOWN)
            if self._encoding and not self._accepted_before:
                self._lose(self._encoding, LossCause.SHUTDOWN)  # too late to send
                self._encoding = None
            self._changed.notify_all()
        queues = self._open_queues()
        if len(queues) == 1:
            # Shut down in this thread, because none can be started during interpreter shutdown.
            self._shut_down(queues[0], deadline)
            return
        closers = [
            threading.Thread(
                target=self._shut_down,
                args=(queue, deadline),
                name=f"shutdown {queue.exporter.name}",
                daemon=True,
            )
            for queue in queues
        ]
        started = [closer for closer in closers if _start(closer)]
        for closer in started:
            closer.join()

    def _shut_down(self, queue: ExportQueue, deadline: float) -> None:
        queue.shutdown(_millis_to(deadline), functools.partial(self._make_final_request, queue))

    def _make_final_request(self, queue: ExportQueue) -> Batch | None:
        """Returns a request with only sample counts; None if the counts were already reported."""
        exporter = queue.exporter
        with self._changed:
            if self._latest is None or queue not in self._queues:
                return None
            not_offered = self._not_offered[exporter.name]
            window = _for_receiver(self._latest, self._account(exporter.name), not_offered)
            totals = _totals(window)
            listed = self._reported.get(queue, {})
            if all(listed.get(kind) == total for kind, total in totals.items() if total.taken):
                return None
            self._reported[queue] = totals
        encoded = self._encode(window, exporter.encoding)
        return encoded.batches[0] if encoded and encoded.batches else None

    def _open_queues(self) -> list[ExportQueue]:
        with self._changed:
            return [*self._queues, *self._leaving]

    def _account(self, name: str) -> ExporterAccount:
        open_ = [q for q in (*self._queues, *self._leaving) if q.exporter.name == name]
        of_open = [queue.counts() for queue in open_]
        counts = [*self._past.get(name, ()), *of_open]
        pending = SampleCounts()
        for queue, queue_counts in zip(open_, of_open, strict=True):
            pending.update(self._count_not_queued(queue, queue_counts))
        # Use the first queue's ``earlier``: in later queues, it includes samples from this process.
        begun = [
            queue_counts.earlier for queue_counts in counts if queue_counts.earlier is not None
        ]
        earlier = begun[0] if begun else {}
        unknown_since = max([queue.unknown_since_unix_ns for queue in open_], default=0)
        kinds = {
            kind: _account_of_kind(
                ExporterAccount(
                    name,
                    pending=pending[kind],
                    not_offered=self._not_offered[name][kind],
                    unknown_since_unix_ns=unknown_since,
                    earlier_samples=earlier[kind].samples if kind in earlier else 0,
                    earlier_lost=earlier[kind].lost if kind in earlier else {},
                ),
                [queue_counts.kinds[kind] for queue_counts in counts if kind in queue_counts.kinds],
            )
            for kind in dict.fromkeys(
                [*self._handed_over, *chain(*(queue_counts.kinds for queue_counts in counts))]
            )
        }
        account = ExporterAccount.of_kinds(name, kinds)
        return account._replace(unknown_since_unix_ns=unknown_since)

    def _count_not_queued(self, queue: ExportQueue, counts: QueueCounts) -> SampleCounts:
        tasks = [task.samples for task in self._tasks() if queue in task.queues]
        not_queued = sum(tasks, SampleCounts())
        if queue in self._accepted_before:
            not_queued.update(self._accepted_before[queue])
            not_queued.subtract(_count_accepted(counts))
        return not_queued

    def _lose(self, task: _Task, cause: LossCause) -> None:
        """Count a task's samples as lost in each of its queues. Caller must hold the lock."""
        for queue in task.queues:
            queue.record_loss(task.samples, cause)
            if queue in self._accepted_before:
                self._accepted_before[queue] += task.samples

    def _tasks(self) -> list[_Task]:
        return [*([self._encoding] if self._encoding else []), *self._waiting]

    def _wait_encoded(self, deadline: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._tasks(), max(0.0, deadline - time.monotonic())
            )

    def _drain_and_close(self, queue: ExportQueue) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(queue not in task.queues for task in self._tasks()))
        queue.force_flush(threading.TIMEOUT_MAX * 1000)
        queue.shutdown(0)
        with self._changed:
            self._reported.pop(queue, None)
            self._past.setdefault(queue.exporter.name, []).append(queue.counts())
            self._leaving.remove(queue)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._encode_next():
                return

    def _encode_next(self) -> bool:
        with self._changed:
            if not self._waiting:
                return False
            task = self._encoding = self._waiting.popleft()
        results = self._encode_all(task)
        with self._changed:
            if self._encoding is not task:
                return False
            self._accepted_before = {
                queue: _count_accepted(queue.counts()) for queue in task.queues
            }
        for queue, result in zip(task.queues, results, strict=True):
            if result is None:
                queue.record_loss(task.samples, LossCause.INTERNAL)
                continue
            queue.record_loss(result.too_large, LossCause.TOO_LARGE)
            rest = sum((batch.sample_counts for batch in result.batches), SampleCounts())
            for batch in result.batches:
                rest = rest - batch.sample_counts
                queue.put(batch, rest)
        with self._changed:
            self._encoding = None
            self._accepted_before = {}
            self._changed.notify_all()
        return True

    def _encode_all(self, task: _Task) -> list[Encoded | None]:
        """Encode a task's window, sharing results among queues with equal encodings and totals."""
        encoded: dict[object, Encoded | None] = {}
        results = []
        for queue in task.queues:
            encoding = queue.exporter.encoding
            with self._changed:
                account = self._account(queue.exporter.name)
            window = _for_receiver(task.window, account, task.not_offered[account.name])
            totals = _totals(window)
            key = (encoding, repr(totals))
            if key not in encoded:
                encoded[key] = self._encode(window, encoding)
            result = encoded[key]
            if result:
                listed = {profile.kind for batch in result.batches for profile in batch.profiles}
                with self._changed:
                    reported = self._reported.setdefault(queue, {})
                    reported.update({kind: totals[kind] for kind in listed & totals.keys()})
            results.append(result)
        return results

    def _encode(self, window: Window, encoding: Encoding) -> Encoded | None:
        try:
            return self._encoder(window, encoding)
        except Exception:  # noqa: BLE001 - logged with its traceback and counted
            # A bug must not stop the profiler; the window is counted as lost.
            _log.exception("a window of %d samples could not be encoded", window.sample_count)
            return None


def _count_accepted(counts: QueueCounts) -> SampleCounts:
    return SampleCounts({kind: kind_counts.accepted for kind, kind_counts in counts.kinds.items()})


def _account_of_kind(not_queued: ExporterAccount, queues: Sequence[QueueCounts]) -> ExporterAccount:
    carried_lost = sum_losses(queue.carried_lost for queue in queues)
    return not_queued._replace(
        exported=sum(queue.exported for queue in queues),
        lost=sum_losses(queue.lost for queue in queues),
        pending=not_queued.pending + sum(queue.queued for queue in queues),
        carried=sum(queue.carried for queue in queues),
        carried_lost=carried_lost,
        earlier_lost=sum_losses([not_queued.earlier_lost, carried_lost]),
    )


def _totals(window: Window) -> dict[str, StreamTotals]:
    return {profile.kind.name: profile.totals for profile in window.profiles if profile.totals}


def _for_receiver(window: Window, account: ExporterAccount, not_offered: SampleCounts) -> Window:
    """Returns a copy of the window with totals that include samples not sent to the receiver."""
    profiles = [
        _profile_for_receiver(
            profile,
            account.of_kind(profile.kind.name)._replace(
                not_offered=not_offered[profile.kind.name],
                unknown_since_unix_ns=account.unknown_since_unix_ns,
            ),
        )
        for profile in window.profiles
    ]
    return replace(window, profiles=profiles)


def _profile_for_receiver(profile: Profile, account: ExporterAccount) -> Profile:
    totals = profile.totals
    if totals is None:
        return profile
    lost = Counter(totals.lost) + Counter(account.lost) - Counter(account.carried_lost)
    lost += Counter({LossCause.NOT_OFFERED: account.not_offered})
    totals = totals._replace(
        lost=dict(lost),
        earlier_samples=account.earlier_samples,
        earlier_lost=account.earlier_lost,
        unknown_since_unix_ns=account.unknown_since_unix_ns,
    )
    return replace(profile, totals=totals)


def _account_only(window: Window, previous: Window | None) -> Window:
    """Returns a window without samples, but with the attributes common to all its Resources."""
    common: Resource | None = None
    for resource, *_ in chain(*(profile.resources for profile in window.profiles)):
        attributes = resource.attributes
        if common:
            items = attributes.items()
            attributes = dict(item for item in common.attributes.items() if item in items)
        common = Resource(attributes, resource.schema_url)
    if common:
        groups: Sequence[ResourceSamples] = [ResourceSamples(common, ())]
    else:
        groups = previous.profiles[0].resources if previous else [ResourceSamples(Resource({}), ())]
    end_ns = window.end_unix_ns
    profiles = [
        replace(profile, resources=groups, taken=0, lost={}, locks={})
        for profile in window.profiles
    ]
    return Window(end_ns, end_ns + 1, profiles)


def _millis_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1000


def _start(thread: threading.Thread) -> bool:
    """Start a thread, or call its target if starting fails. Return whether the thread started."""
    try:
        thread.start()
    except RuntimeError:
        thread.run()
        return False
    return True
