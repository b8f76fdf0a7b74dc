"""Loads the symbols of a binary in the background after the binary is first sampled."""

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

from otel_kprofiler import forks
from otel_kprofiler.errors import describe_error
from otel_kprofiler.forks import ForkAware, ForkGate, ForkStep
from otel_kprofiler.host import FairQueue, PatientCalls, Turn, children_time_ns, find_user
from otel_kprofiler.model import MAX_FILES, FileDetails, FileKey, OpenFile, ProcessKey, Unresolved
from otel_kprofiler.stopping import join_all, reading
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.file import NO_FILE, PENDING, FileSymbols, NamedAddress
from otel_kprofiler.symbols.user.jit_names import JitNames
from otel_kprofiler.symbols.user.loader_files import (
    DROPPED,
    EVICTED,
    UNANSWERED_NS,
    Entry,
    FileReader,
    LoaderCounts,
    QueuedFile,
    ReadSymbols,
    SymbolsRefused,
    Waiting,
    close_content,
    lacks_lines,
)
from otel_kprofiler.symbols.user.reopening import WantedFile

MAX_WAITING: Final = 256
"""Limit on queued files, each of which holds a descriptor."""
DEFAULT_MAX_BYTES: Final = 32 << 20
DEFAULT_CPU_SHARE: Final = 0.05
"""Long-term CPU limit for reading files (fraction of one CPU). A burst may use 1 s of CPU time."""
_UNUSED_WEIGHT: Final = 4
"""Factor by which the size of an unused table is multiplied when tables are chosen for eviction."""
_DEBUG_FILES: Final = "debug files"
_REOPENED: Final = "evicted files"
_MADE_CODE: Final = "code"
"""Queue owner for code that is not in a file. Each turn reads one process's code."""
_REFUSED: Final = NamedAddress((), 0, Unresolved.SYMBOLS_REFUSED)

T = TypeVar("T")
_log = logging.getLogger(__name__)

CodeSink = Callable[[ProcessKey, int, int, NamedAddress], None]
"""Function that receives a process, an address, a boottime, and the code's name at that time."""


class SymbolLoader(ForkAware):
    """Names user frames, and loads their symbols in background threads. Thread-safe.

    Files with the same build ID and file ID are read only once, for all processes.

    Args:
        code: names code that is not in a file. The loader's ``close`` also closes it. If ``code``
            is None, code outside files has no names.
        reopen: reopens an evicted file that is needed again; returns None on failure.
        max_bytes: memory limit for symbol tables and for reading files. Large tables and tables not
            used recently are evicted first. A table larger than half of the limit is refused.
        cpu_share: limit on CPU time for reading files, in CPU seconds per second.
    """

    def __init__(
        self,
        read: ReadSymbols,
        *,
        code: JitNames | None = None,
        code_sink: CodeSink | None = None,
        reopen: Callable[[WantedFile], OpenFile | bytes | None] = lambda _: None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        budget: ReadingBudget | None = None,
        cpu_share: float = DEFAULT_CPU_SHARE,
        workers: int = 1,
        now_ns: Callable[[], int] = time.monotonic_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._reader = FileReader(read, reopen, max_bytes // 2)
        self._code, self._code_sink = code, code_sink
        self._max_bytes = max_bytes
        self._budget = budget or ReadingBudget()
        self._budget.make_space = self._make_space
        self._workers = workers
        self._thread_ns, self._now_ns = cpu_ns, now_ns
        self._version = 0
        self._gate = ForkGate()
        self._calls = PatientCalls("kprofiler-symbols", on_left=self._budget.pass_turn)
        self._unshared = itertools.count(1)
        self._changed = threading.Condition()
        self._waiting: FairQueue[Waiting | None] = FairQueue(cpu_share, now_ns, find_user)
        self._reading = self._unread = 0
        self._code_waits = False
        self._keys: dict[FileKey, Entry] = {}
        self._files: dict[object, QueuedFile] = {}  # keyed by identity (see add), oldest first
        self._bytes = self._cpu_ns = 0
        self._loaded = self._refused = self._dropped = self._evicted = self._gone = 0
        self._lines_refused: Counter[str] = Counter()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        forks.register(ForkStep.RELEASE, self)

    @property
    def version(self) -> int:
        """Returns a number that increases when names arrive and every 30 s, to trigger lookups."""
        return self._version + self._now_ns() // UNANSWERED_NS

    def add(
        self, key: FileKey, details: FileDetails, content: OpenFile | bytes, owner: int = 0
    ) -> None:
        """Queue a file and return immediately.

        ``content`` is either the open file, which the caller closes, or the file's bytes. ``owner``
        is the pid of a process that has mapped the file. The loader alternates between the
        processes whose files are queued.
        """
        identity = details.identity or key
        size, modified_ns = content[1:] if isinstance(content, OpenFile) else (0, 0)
        wanted = WantedFile(key, details, owner, size, modified_ns)
        with self._changed:
            file = self._files.get(identity)
            if self._stopping or (file and file.names is not EVICTED):
                if file:
                    self._keys[key] = Entry(file, wanted)
                return
            file = self._files[identity] = file or QueuedFile()
            self._keys[key] = Entry(file, wanted)
            _forget_oldest(self._keys)
            if oldest := _forget_oldest(self._files):
                self._evict(oldest)
            self._queue(Waiting(file, wanted, content))

    def _queue(self, waiting: Waiting) -> None:
        file, content = waiting.file, waiting.content
        if self._calls.has_left(waiting.wanted.key.device):
            # On an unresponsive device, even closing the descriptor may block forever.
            file.again_ns = self._now_ns() + UNANSWERED_NS
            if isinstance(file.names, NamedAddress):
                file.names = EVICTED
            return
        self._unread += 1
        if isinstance(content, OpenFile):
            waiting = waiting._replace(content=content._replace(fd=os.dup(content.fd)))
        file.reading = waiting
        if isinstance(file.names, NamedAddress):
            file.names = PENDING
        self._waiting.put(waiting.wanted.owner, waiting)
        if len(self._waiting) > MAX_WAITING:
            if dropped := self._waiting.drop_last():
                close_content(dropped.content)
                self._unread -= 1
                dropped.file.postpone(self._now_ns())
                self._dropped += 1
            else:  # JIT code, which will be requested again
                self._code_waits = False
        self._start()
        self._changed.notify_all()

    def _put_code(self) -> None:
        if not self._code_waits and not self._stopping:
            self._code_waits = True
            self._waiting.put(_MADE_CODE, None)
            self._start()
            self._changed.notify_all()

    def name(self, key: FileKey, address: int) -> NamedAddress:
        """Returns the functions at an address (SVMA) in a file; never blocks."""
        entry = self._keys.get(key)
        if entry is None:
            return DROPPED
        file = entry.file
        if file.is_wanted:
            self._ask_again(entry)
        names = file.names
        if isinstance(names, NamedAddress):
            return names
        file.used = True
        named = names.name(address)
        return named._replace(is_interim=True) if lacks_lines(names) else named

    def _ask_again(self, entry: Entry) -> None:
        if self._now_ns() < entry.file.again_ns:
            return
        with self._changed:
            if entry.file.is_wanted and not self._stopping:
                self._queue(Waiting(*entry, None))

    def name_code(self, process: ProcessKey, address: int, at_ns: int) -> NamedAddress:
        """Returns the functions at a process's address that is not in a file; never blocks."""
        if self._code is None:
            return NO_FILE
        found, has_work = self._code.name(process, address, at_ns)
        if has_work:
            with self._changed:
                self._put_code()
        if self._code_sink is not None:
            self._code_sink(process, address, at_ns, found)
        return found

    def finish(self, timeout_s: float) -> None:
        """Wait until all files are read, ignoring the CPU limit."""
        with self._changed:
            self._waiting.lift_limit()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._reading, timeout_s)

    def counts(self) -> LoaderCounts:
        """Returns the number of files for each outcome of reading their symbols."""
        with self._changed:
            return LoaderCounts(
                self._loaded,
                self._refused,
                self._dropped,
                self._evicted,
                self._gone,
                self._unread,
                self._bytes,
                self._cpu_ns,
                dict(self._lines_refused),
            )

    def close(self) -> None:
        """Stop the threads and drop all symbols."""
        forks.unregister(self)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        join_all([*self._threads, *self._calls.stop()])
        self._release()

    def before_fork(self) -> None:
        """Finish operations that a child would inherit half-done."""
        self._gate.before_fork()
        self._changed.acquire()

    def after_fork_in_parent(self) -> None:
        """Resume loading in the parent."""
        self._changed.release()
        self._gate.after_fork()

    def after_fork_in_child(self) -> None:
        """Close inherited files. No files are loaded in the child."""
        self._stopping = True
        self._threads = []
        self._changed = threading.Condition()
        self._calls = PatientCalls("kprofiler-symbols")
        self._release()

    def _start(self) -> None:
        if self._threads or self._stopping:
            return
        for _ in range(self._workers):
            thread = threading.Thread(target=self._work, name="kprofiler-symbols", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _release(self) -> None:
        with self._changed:
            for waiting in self._waiting.clear():
                if waiting is not None and not self._calls.has_left(waiting.wanted.key.device):
                    close_content(waiting.content)
            for file in self._files.values():
                if not isinstance(file.names, NamedAddress):
                    file.names = DROPPED
            self._files.clear()
            self._keys.clear()
        if self._code is not None:
            self._code.close()

    def _work(self) -> None:
        while self._wait_for_work():
            with self._gate.work():  # a fork during this work would copy the descriptor
                if (turn := self._take()) is not None:
                    self._do(turn)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._stopping:
                if (wait_ns := self._waiting.wait_ns()) == 0:
                    return True
                self._changed.wait(None if wait_ns is None else wait_ns / 1e9)
            return False

    def _take(self) -> Turn[Waiting | None] | None:
        with self._changed:
            turn = self._waiting.take()  # None if another thread has already taken it
            self._reading += turn is not None
            return turn

    def _do(self, turn: Turn[Waiting | None]) -> None:
        cpu_ns = children_ns = 0
        searched: tuple[str, Hashable] | None = None  # user whose debug directories are searched

        def begin_search() -> bool:
            nonlocal searched
            user = _DEBUG_FILES, find_user(turn.owner)
            if self._calls.has_left(user):
                return False
            searched = user
            return True

        def read() -> None:
            nonlocal cpu_ns, children_ns
            began_ns, children_began_ns = self._thread_ns(), children_time_ns()
            if turn.item is None:
                self._read_code()
            else:
                self._answer(turn.item, begin_search)
            cpu_ns = self._thread_ns() - began_ns
            children_ns = children_time_ns() - children_began_ns

        with self._changed:
            self._code_waits &= turn.item is not None
        # Code that has no file is assigned a unique device, so that an unresponsive process does
        # not delay other processes.
        device: Hashable = -next(self._unshared)
        if turn.item is not None:
            device = turn.item.wanted.key.device
            if turn.item.content is None:  # reopening may open other files, which may hang
                device = _REOPENED, device
        has_ended = self._calls.call(device, read, lambda: searched or device)
        with self._changed:
            if turn.item is not None and searched and not has_ended:
                self._give_up(turn.item)
            self._waiting.done(turn, cpu_ns, children_ns)
            self._reading -= 1
            self._changed.notify_all()

    def _read_code(self) -> None:
        if self._code is None:
            return
        with reading("code generated by a process"):
            self._code.read_one()
        if self._code.has_work:
            with self._changed:
                self._put_code()

    def _answer(self, waiting: Waiting, begin_search: Callable[[], bool]) -> None:
        began_ns = self._thread_ns()
        names: FileSymbols | NamedAddress = _REFUSED
        path = waiting.wanted.details.path
        try:
            with reading(path):
                names = self._reader.read(waiting, begin_search)
        except (SymbolsRefused, OSError) as error:
            _log.info("no symbols for %s: %s", path, describe_error(error))
        except Exception:  # noqa: BLE001 - no file is a reason to stop reading
            _log.exception("reading symbols from %s failed", path)
        self._settle(waiting, names, self._thread_ns() - began_ns)

    def _give_up(self, waiting: Waiting) -> None:
        """Postpone a file whose debug-file search hangs. The next attempt uses no debug file."""
        file = waiting.file
        if file.reading is waiting:
            self._unread -= 1
            file.postpone(self._now_ns(), is_first_free=True)
            self._version += 1

    def _settle(self, waiting: Waiting, names: FileSymbols | NamedAddress, cpu_ns: int) -> None:
        file = waiting.file
        with self._changed:
            self._cpu_ns += cpu_ns
            if file.reading is not waiting:
                return
            file.reading = None
            self._unread -= 1
            if isinstance(names, NamedAddress):
                if file.add_failure(names):
                    self._gone += names is EVICTED
                    self._refused += names is _REFUSED
                if names is EVICTED or lacks_lines(file.names):
                    file.postpone(self._now_ns())
                else:
                    file.names = names
            else:
                self._loaded += 1
                if (problem := names.lines_problem) and file.add_failure(problem):
                    self._lines_refused[problem.value] += 1
                self._bytes += names.nbytes - file.nbytes
                file.names = names
                if lacks_lines(file.names):
                    file.postpone(self._now_ns(), least_ns=UNANSWERED_NS)
                self._make_space(file)
            self._version += 1
            self._changed.notify_all()

    def _make_space(self, new: QueuedFile | None = None) -> None:
        """Evict tables until total memory, including that held for reading, is within the limit.

        Evict large tables first, so that they do not displace many small ones. A table not used
        since the last eviction is weighted as if it were larger.
        """
        with self._changed:
            if self._bytes + self._budget.held_bytes <= self._max_bytes:
                return
            tables = [
                (file.names.nbytes * (1 if file.used else _UNUSED_WEIGHT), file)
                for file in self._files.values()
                if file is not new and not isinstance(file.names, NamedAddress)
            ]
            for _, file in sorted(tables, key=lambda table: -table[0]):
                if self._bytes + self._budget.held_bytes <= self._max_bytes:
                    break
                self._evict(file)
            for _, file in tables if new else ():
                file.used = False

    def _evict(self, file: QueuedFile) -> None:
        if not isinstance(file.names, NamedAddress):
            self._bytes -= file.nbytes
            self._evicted += 1
            file.evict(self._now_ns())


def _forget_oldest(files: dict[Any, T]) -> T | None:
    return files.pop(next(iter(files))) if len(files) > MAX_FILES else None
