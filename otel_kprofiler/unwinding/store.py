"""Handles the BPF program's requests for unwind tables.

One thread reads requests from a ring. The other threads open files, and load and publish tables.
Publishing waits for an RCU grace period, about 15 ms, which several threads may share.
"""

import contextlib
import functools
import logging
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from otel_kprofiler.bpf import PAGE_BYTES
from otel_kprofiler.forks import ForkGate
from otel_kprofiler.host import (
    FIRST_HOLD_S,
    FilePlaces,
    FileRequest,
    GrowingHolds,
    PatientCalls,
    ReferableFiles,
    children_time_ns,
)
from otel_kprofiler.model import FileKey, KnownFiles
from otel_kprofiler.stopping import join_and_release, reading
from otel_kprofiler.unwinding.build_queue import BuildQueue
from otel_kprofiler.unwinding.counts import TableCounts
from otel_kprofiler.unwinding.eviction import Claim, Limits, TableSpace
from otel_kprofiler.unwinding.gone_files import GoneFiles
from otel_kprofiler.unwinding.indexing import Children
from otel_kprofiler.unwinding.loading import (
    Code,
    LoadableTables,
    MakeTables,
    find_loadable,
    open_code,
)
from otel_kprofiler.unwinding.maps import Content, FileState, TableMaps, is_out_of_memory
from otel_kprofiler.unwinding.refusal import COSTLY, MAY_PASS, NO_TABLE, Refusal, TableRefused
from otel_kprofiler.unwinding.request import parse_requests
from otel_kprofiler.unwinding.requests import Opened, RequestQueue
from otel_kprofiler.unwinding.table import Tables

_HOLD_NS: Final = int(FIRST_HOLD_S * 1e9)
OPEN_SHARE: Final = 0.05
"""Long-term CPU limit for opening files and reading headers, in CPUs. A burst may use 1 s."""
CPU_SHARE: Final = 0.05
"""Maximum long-term fraction of a CPU for loading tables. Child processes that build tables have a
separate budget of the same size, so that a large Go program does not delay other files."""
_LOADERS: Final = 4
_WORKERS: Final = _LOADERS + 1
_EARLY_MAKERS: Final = min(_LOADERS - 1, max(1, (os.cpu_count() or 1) // 2))
"""Number of tables built concurrently before the first sample; later tables are built serially.

Tables are built on at most half of the CPUs. Each builder decodes its first Go file in full; later
files take an eighth of the time.
"""
_MOST_EARLY: Final = 16
_POLL_S: Final = 1.0
_IDLE_S: Final = 2.0
"""Idle timeout, in seconds, of a child process that builds tables."""

_FIRST_PLACES: Final = 4

_log = logging.getLogger(__name__)


class _PostponedError(Exception):
    """Raised to postpone a request until other files' tables have been built."""


class TableStore:
    """Loads tables in the background, between :meth:`start` and :meth:`close`.

    ``maps`` are closed with the store. ``now_ns`` returns the boottime, the clock that the BPF
    program uses. ``known_files`` receives the paths and build ids of opened files.
    """

    def __init__(
        self,
        maps: TableMaps,
        files: ReferableFiles,
        limits: Limits,
        now_ns: Callable[[], int],
        known_files: KnownFiles | None = None,
    ) -> None:
        self._maps = maps
        self._files = files
        self._now_ns = now_ns
        self.known = known_files or KnownFiles()
        self.places = FilePlaces(os.get_exec_path()[-_FIRST_PLACES:])
        self._lock = threading.Lock()
        self._space = TableSpace(maps.sizes.slots, limits)
        self._pending: set[FileKey] = set()
        self._early: set[FileKey] = set()  # keys that no sample has requested yet
        self._answered = threading.Condition(self._lock)
        self._is_preloading = False  # while True, elapsed time is limited instead of CPU time
        self._holds = GrowingHolds()
        self._refused: dict[FileKey, int] = {}  # boottime at which the refusal expires; 0: never
        self._requested = self._loaded = self._evicted = self._cpu_ns = self._serial = 0
        self._refusals: Counter[Refusal] = Counter()
        self._gone = GoneFiles()
        self._requests = RequestQueue(OPEN_SHARE, CPU_SHARE, _LOADERS, now_ns)
        self._builds = BuildQueue(CPU_SHARE, now_ns)
        self._children = Children()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = threading.Event()
        self._epoll = select.epoll()
        self._gate = ForkGate()
        self._calls = PatientCalls("kprofiler-tables")
        self._pid = os.getpid()
        self._threads = [threading.Thread(target=self._take, name="kprofiler-files", daemon=True)]
        self._threads += [
            threading.Thread(target=self._work, name="kprofiler-tables", daemon=True)
            for _ in range(_WORKERS)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def request(self, request: FileRequest) -> None:
        """Queue a request; thread-safe."""
        with self._lock:
            self._requested += 1
            self._pending.add(request.key)
        self._requests.put(request)

    def load_early(self, requests: Iterable[FileRequest], until_s: float) -> None:
        """Load as many tables as possible before samples need them, and wait until they are loaded.

        Only elapsed time is limited, because loading the tables for a single Go program may take
        half a second of CPU time. ``requests`` are for files that are not pending, most important
        first. ``until_s`` is the deadline, in seconds of the monotonic clock.
        """
        self._is_preloading = True
        try:
            for request in requests:
                with self._lock:
                    if not self._wait_early(_MOST_EARLY - 1, until_s):
                        return
                    try:
                        self._maps.set_file(request.key, FileState.PENDING)
                    except OSError:  # the map is full
                        return
                    self._early.add(request.key)
                self.request(request)
            with self._lock:
                self._wait_early(0, until_s)
        finally:
            self._is_preloading = False

    def _wait_early(self, most: int, until_s: float) -> bool:
        """Waits until at most ``most`` early requests are pending. Returns False on timeout.

        If ``most`` is not 0, ignores requests that are waiting for a turn to generate tables,
        because they would delay the other requests.
        """
        left_s = until_s - time.monotonic()
        return self._answered.wait_for(
            lambda: len(self._early) - (len(self._builds) if most else 0) <= most, left_s
        )

    def _end(self, key: FileKey) -> bool:
        """Record a completed request; return whether it was early. The caller holds the lock."""
        is_early = key in self._early
        self._pending.discard(key)
        self._early.discard(key)
        self._answered.notify_all()
        return is_early

    def counts(self) -> TableCounts:
        """Returns the request counts; thread-safe."""
        with self._lock:
            return TableCounts(
                self._requested,
                self._loaded,
                dict(self._refusals),
                len(self._pending),
                self._evicted,
                len(self._space.tables),
                self._space.bytes,
                self._cpu_ns,
            )

    def close(self) -> None:
        """Stop the threads and release the maps. Pending files remain pending.

        In a forked child, the threads do not exist, and only inherited resources are released.
        """
        threads: list[threading.Thread] = []
        if os.getpid() == self._pid:
            self._stopping.set()
            self._wake()
            self._requests.stop()
            self._children.stop()
            threads = [*self._threads, *self._calls.stop()]
        join_and_release(threads, self._release)

    def _release(self) -> None:
        self._requests.close()
        self._builds.close()
        self._maps.close()
        self._epoll.close()
        os.close(self._wake_fd)

    def before_fork(self) -> None:
        """Wait for work in progress, so that a child inherits no open files or ring views."""
        self._gate.before_fork()
        self._children.end_idle()

    def after_fork(self) -> None:
        """Resume work in the parent."""
        self._gate.after_fork()

    def _take(self) -> None:
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._maps.ring_fd, select.EPOLLIN | select.EPOLLET)
        while not self._stopping.is_set():
            with self._gate.work():
                for request in parse_requests(self._maps.ring.take().data):
                    self.request(request)
                self._end_holds()
                self._resume()
                self._close_old()
                idle_s = self._children.end_idle(_IDLE_S)
            self._epoll.poll(self._find_wait_s(idle_s))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def _find_wait_s(self, idle_s: float | None) -> float | None:
        """Returns the seconds until work other than requests is due; None if none is scheduled.

        ``idle_s`` is the time until an idle child must be stopped; None if no child is idle.
        """
        waits_s = [] if idle_s is None else [idle_s]
        with self._lock:
            if self._builds:
                waits_s.append(_POLL_S)
            next_ns = min((until for until in self._refused.values() if until), default=None)
        if next_ns is not None:
            waits_s.append((next_ns - self._now_ns()) / 1e9)
        return max(0.0, min(waits_s)) if waits_s else None

    def _work(self) -> None:
        while (taken := self._requests.take()) is not None:
            with self._gate.work():
                cpu_ns = self._serve(taken.item)
                self._requests.done(taken, 0 if self._is_preloading else cpu_ns)

    def _serve(self, item: FileRequest | Opened) -> int:
        """Opens a file or loads its tables. Returns the CPU time used; 0 if the device hangs."""
        request = item if isinstance(item, FileRequest) else item.request
        cpu_ns = 0

        def answer() -> None:
            nonlocal cpu_ns
            began_ns = time.thread_time_ns()
            is_done = True
            try:
                with reading(self._name(request.key)):
                    is_done = self._answer(request, item)
            finally:
                if is_done:
                    self._end_turn(request.key)
            cpu_ns = time.thread_time_ns() - began_ns
            with self._lock:
                self._cpu_ns += cpu_ns

        if isinstance(item, FileRequest) and self._calls.has_left(request.key.device):
            self._refuse(request.key, Refusal.UNREADABLE)
            self._end_turn(request.key)
        elif not self._calls.call(request.key.device, answer):  # answered after the device responds
            self._end_turn(request.key)
        return cpu_ns

    def _answer(self, request: FileRequest, taken: FileRequest | Opened) -> bool:
        """Handle a request. Return whether the request was completed or refused."""
        try:
            try:
                if isinstance(taken, FileRequest):
                    self._requests.put_opened(Opened(taken, self._open(taken)))
                    return False
                self._load(request, taken.code or self._open(request))
            except OSError as error:
                reason = Refusal.NO_MEMORY if is_out_of_memory(error) else Refusal.FAILED
                raise TableRefused(reason, str(error)) from error
        except _PostponedError:
            self._wake()
            return False
        except TableRefused as error:
            _log.debug("no unwind tables for %s: %s", self._name(request.key), error)
            self._refuse(request.key, error.refusal)
        except Exception:  # noqa: BLE001 - no file may stop the service
            _log.exception("reading the unwind tables of %s failed", self._name(request.key))
            self._refuse(request.key, Refusal.FAILED)
        return True

    def _open(self, request: FileRequest) -> Code:
        return open_code(request, self._files, self.known, self.places)

    def _load(self, request: FileRequest, code: Code) -> None:
        try:
            index = functools.partial(self._index, request, code)
            self._load_tables(request.key, find_loadable(code, index))
        except _PostponedError:  # the queue has the file, or it is closed
            raise
        except BaseException:
            code.close()
            raise
        code.close()

    def _name(self, key: FileKey) -> str:
        details = self.known.get(key)
        return details.path if details else f"inode {key.inode} of device {key.device:#x}"

    def _load_tables(self, key: FileKey, loadable: LoadableTables) -> None:
        claim = self._claim(loadable.pages * PAGE_BYTES, evicts=key not in self._early)
        with self._lock:
            self._serial += 1
            serial = self._serial
        published = False
        try:
            content = Content(loadable.pages)
            with memoryview(content) as view:
                loadable.fill(view, serial)
            self._maps.publish_table(claim.slot, content)
            published = True
            content.close()  # not in finally: a traceback may reference slices of the view
            with self._lock:
                self._maps.set_file(key, FileState.LOADED, claim.slot, serial)
                self._space.add(claim, key, 0 if self._end(key) else self._now_ns())
                self._holds.end(key)
                self._loaded += 1
                self._maps.announce()
        except BaseException:
            if published:
                self._maps.remove_table(claim.slot)
            with self._lock:
                self._space.cancel(claim)
            raise

    def _claim(self, size: int, *, evicts: bool) -> Claim:
        with self._lock:
            claim = self._space.claim(
                size, self._maps.last_uses_ns(), self._now_ns(), evicts=evicts
            )
            for table in claim.victims:
                self._maps.forget_file(table.key)
            self._evicted += len(claim.victims)
        for table in claim.victims:
            self._maps.remove_table(table.slot)
        if claim.victims:
            with self._lock:
                self._space.removed(claim)
                self._maps.announce()
        return claim

    def _refuse(self, key: FileKey, reason: Refusal) -> None:
        with self._lock:
            is_early = self._end(key)
            if is_early and reason is Refusal.MEMORY_IN_USE:
                self._requested -= 1
                self._maps.forget_file(key)  # a later request by a sample may evict tables
                return
            self._refusals[reason] += 1
            if reason is Refusal.GONE and not self._gone.add(key):
                self._maps.forget_file(key)  # another process may have mapped the file
                return
            state = FileState.NO_TABLE if reason in NO_TABLE else FileState.UNAVAILABLE
            self._refused.pop(key, None)
            hold_ns = int(self._holds.extend(key) * 1e9) if reason in COSTLY else _HOLD_NS
            self._refused[key] = self._now_ns() + hold_ns if reason in MAY_PASS else 0
            while len(self._refused) > self._maps.sizes.files // 2:
                oldest = next(iter(self._refused))
                del self._refused[oldest]
                self._maps.forget_file(oldest)
            self._maps.set_file(key, state)
            self._maps.announce()
        if reason in MAY_PASS:
            self._wake()

    def _wake(self) -> None:
        """Wake the thread that receives requests, so that it recomputes its timeout."""
        os.eventfd_write(self._wake_fd, 1)

    def _end_holds(self) -> None:
        with self._lock:
            now_ns = self._now_ns()
            for key in [key for key, until in self._refused.items() if 0 < until <= now_ns]:
                del self._refused[key]
                self._maps.forget_file(key)

    def _index(self, request: FileRequest, code: Code, make: MakeTables) -> Tables:
        """Build tables for only a few files at a time, to leave threads free for other work."""
        with self._lock:
            if not self._builds.has_turn(request.key):
                self._builds.put(request)
                if len(self._builds) == 1:
                    self._take_turn()
            is_next = self._builds.has_turn(request.key)
            is_kept = not is_next and self._builds.keep(request.key, code)
            self._answered.notify_all()
        if not is_next:
            if not is_kept:
                code.close()
            raise _PostponedError
        began_ns = children_time_ns()
        try:
            return make(children=self._children)
        finally:
            self._wake()  # a child process may be idle now
            with self._lock:
                cpu_ns = children_time_ns() - began_ns
                self._cpu_ns += cpu_ns
                self._builds.charge(0 if self._is_preloading else cpu_ns)

    def _take_turn(self) -> Opened | None:
        """Allow the next queued process to build its tables. The caller must hold the lock."""
        return self._builds.take(_EARLY_MAKERS if self._is_preloading else 1)

    def _end_turn(self, key: FileKey) -> None:
        """End a file's turn, if it has one, and let other files have theirs."""
        with self._lock:
            self._builds.end_turn(key)
        self._resume()

    def _close_old(self) -> None:
        with self._lock:
            old = self._builds.take_old()
        for key, code in old:  # closing a file can take as long as reading it
            self._calls.call(key.device, code.close)

    def _resume(self) -> None:
        with self._lock:
            resumed = list(iter(self._take_turn, None))
        for opened in resumed:
            if opened.code is None:
                self._requests.put(opened.request)
            else:
                self._requests.put_opened(opened)
