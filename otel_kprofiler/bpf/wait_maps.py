"""The structs and maps for the off-CPU programs (``wait_types.bpf.h``)."""

import ctypes
import itertools
import mmap
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import KernelTypes
from otel_kprofiler.bpf.mapped_words import MappedWords
from otel_kprofiler.model import RawSample, WaitState, Waker

WAIT_BEGUN: Final = 1
WAIT_ENDED: Final = 2
THREAD_ENDED: Final = 3
"""``enum wait_phases``."""
WAIT_HAS_BEGUN: Final = 1
WAIT_KEPT: Final = 2
WAIT_IN_IOWAIT: Final = 4
WAIT_IS_THROTTLED: Final = 8
WAIT_WOKEN: Final = 16
"""``enum wait_flags``."""

_LINE_BYTES: Final = 192
_COUNTERS: Final = 6
_LINE_WORDS: Final = _LINE_BYTES // 8
_LAYOUT: Final = struct.Struct("=15Q")
_THREAD: Final = struct.Struct(f"=3Q10I{len(WaitState)}Q3Q2Q8I16s")
_END: Final = struct.Struct("=4Q4I16s")
WAIT_END_BYTES: Final = _END.size
THREAD_BYTES: Final = _THREAD.size
WAIT_LAYOUT: Final = ".rodata.waits"
"""Section that contains the ``wait_layout`` constant."""
WAIT_UNIT_NS: Final = 256
"""Unit in which thresholds are stored, so that they fit into 32 bits (``UNIT_SHIFT``)."""
PLACES: Final = 16
"""Maximum number of threads in a bucket."""
_PLACES_AT_ONCE: Final = 4096  # number of elements mapped at a time; they fill whole pages


class WaitOffsets(NamedTuple):
    """Offsets in kernel structs; see ``struct wait_layout``."""

    pid: int
    state: int
    on_rq: int
    iowait: int = 0
    iowait_mask: int = 0
    throttled: int = 0
    cfs_rq: int = 0
    throttle_count: int = 0
    runtime: int = 0
    picked: int = 0
    run_delay: int = 0
    queued: int = 0
    rq: int = 0
    clock: int = 0

    @property
    def has_run_delay(self) -> bool:
        """Returns whether the kernel accounts for the time that threads wait for a CPU."""
        return self.run_delay != 0

    def pack(self, buckets: int) -> bytes:
        """Packs the struct; the number of buckets must be a power of two."""
        return _LAYOUT.pack(*self, buckets - 1)


def find_wait_offsets(types: KernelTypes) -> WaitOffsets | None:
    """Returns the struct offsets for the off-CPU programs; None if a member is missing."""

    def task(*path: str) -> int | None:
        return types.offset("task_struct", *path)

    state = task("__state")  # since 5.14
    if state is None:
        state = task("state")
    pid, on_rq = task("pid"), task("on_rq")
    if pid is None or state is None or on_rq is None:
        return None
    offsets = WaitOffsets(pid, state, on_rq, throttled=task("throttled") or 0)
    iowait = types.bit_offset("task_struct", "in_iowait")
    if iowait is not None:
        offsets = offsets._replace(iowait=iowait // 8, iowait_mask=1 << iowait % 8)
    runtime, picked = task("se", "sum_exec_runtime"), task("se", "prev_sum_exec_runtime")
    if runtime is not None and picked is not None:
        offsets = offsets._replace(runtime=runtime, picked=picked)
    cfs_rq = task("se", "cfs_rq")  # with CONFIG_FAIR_GROUP_SCHED
    if cfs_rq is None:
        return offsets
    offsets = offsets._replace(
        cfs_rq=cfs_rq, throttle_count=types.offset("cfs_rq", "throttle_count") or 0
    )
    run_delay, queued = task("sched_info", "run_delay"), task("sched_info", "last_queued")
    rq, clock = types.offset("cfs_rq", "rq"), types.offset("rq", "clock")
    if run_delay is None or queued is None or rq is None or clock is None:
        return offsets
    return offsets._replace(run_delay=run_delay, queued=queued, rq=rq, clock=clock)


class WaitConfig(NamedTuple):
    """The configuration of the off-CPU programs (``struct wait_config``)."""

    epoch: int = 0
    threshold_ns: int = 0
    min_ns: int = 0
    begin_ns: int = 0
    wakers: int = 0
    sample_ns: int = 0
    late_begins: int = 0


_LATE_BEGINS: Final = WaitConfig._fields.index("late_begins")


class WaitSettings(MappedWords):
    """The mapped ``struct wait_config``: changes need neither a system call nor capabilities."""

    def __init__(self, map_fd: int) -> None:
        super().__init__(map_fd, len(WaitConfig._fields), writable=True)

    def change(self, config: WaitConfig) -> None:
        """Change the settings, and then the epoch.

        A new epoch makes the BPF programs start tracking threads.
        """
        epoch, *rest = config[:_LATE_BEGINS]
        if self.words[0] != epoch:
            self.words[0] = 0
        for at, word in enumerate(rest, 1):
            self.words[at] = word
        self.words[0] = epoch

    def allow_late_begins(self, count: int) -> None:
        """Set the maximum number of ongoing waits whose start the next task iteration reports."""
        self.words[_LATE_BEGINS] = count


class WaitThread(NamedTuple):
    """A thread's totals and its current wait; see ``struct thread``.

    Attributes:
        ended_ns: time of the thread's exit, on ``CLOCK_BOOTTIME``; 0 if it has not exited.
    """

    id: int
    start_time_ns: int
    off_since_ns: int
    woken_ns: int
    by_state: tuple[int, ...]
    waits: int
    below_ns: int
    tgid: int
    tid: int
    state: int
    epoch: int
    threshold_ns: int
    flags: int
    ended_ns: int = 0

    def passed(self, now_ns: int) -> tuple[int, int]:
        """Returns the time spent in ``state``, and the time since the thread was woken, in ns.

        ``now_ns`` is the current time on the same clock as ``off_since_ns``. Returns zeros if the
        wait starts after ``now_ns``.
        """
        since = self.off_since_ns
        if not since or now_ns <= since:
            return 0, 0
        if self.woken_ns < since or self.state == WaitState.RUNNABLE:
            return now_ns - since, 0
        woken = min(self.woken_ns, now_ns)
        return woken - since, now_ns - woken


def parse_threads(data: bytes, ended_ns: int = 0) -> Iterator[WaitThread]:
    """Parses ``struct thread`` entries; ``ended_ns`` is the threads' exit time, or 0 if alive.

    Raises ``ValueError`` if a struct is truncated.
    """
    if len(data) % THREAD_BYTES:
        raise ValueError("an off-CPU totals entry is truncated")
    states = len(WaitState)
    for words in _THREAD.iter_unpack(data):
        _, since, _, _, state, epoch, _, flags, threshold = words[:9]
        waits, below, start, longest, woken, tgid, tid = words[13 + states : 20 + states]
        yield WaitThread(
            longest, start, since, woken, words[13 : 13 + states], waits, below, tgid, tid,
            state if state < states else 0, epoch, threshold * WAIT_UNIT_NS, flags, ended_ns,
        )  # fmt: skip


class WaitEnd(NamedTuple):
    """A completed wait; see ``struct wait_end``."""

    since_ns: int
    asleep_ns: int
    runnable_ns: int
    threshold_ns: int
    state: WaitState
    flags: int
    waker: Waker | None


def parse_wait_end(data: bytes, at: int, until: int) -> WaitEnd:
    """Parses the end of a wait. Raises ``ValueError`` if the record extends beyond ``until``."""
    if until - at < WAIT_END_BYTES:
        raise ValueError("a wait-end record is truncated")
    *times, state, flags, tgid, tid, comm = _END.unpack_from(data, at)
    since, asleep, runnable, threshold = times
    wait_state = WaitState(state) if state < len(WaitState) else WaitState.RUNNABLE
    waker = Waker(tgid, tid, comm[: comm.find(b"\0")]) if flags & WAIT_WOKEN else None
    return WaitEnd(since, asleep, runnable, threshold, wait_state, flags, waker)


class WaitRecord(NamedTuple):
    """A record of a wait's start or end.

    In a start record, the sample's value is the start time.
    """

    sample: RawSample
    end: WaitEnd | None


class WaitRecords(NamedTuple):
    """The wait records in a chunk of the ring, in order."""

    waits: list[WaitRecord]
    ended: list[WaitThread]


class WaitCounts(NamedTuple):
    """Counters of the off-CPU programs, summed over all CPUs (``struct wait_line``)."""

    taken: int
    ring_full: int
    no_room: int
    missed: int
    lost: int
    begun: int


class WaitLines(MappedWords):
    """The mapped array of ``struct wait_line``, which is read without system calls."""

    def __init__(self, map_fd: int, cpus: int) -> None:
        super().__init__(map_fd, cpus * _LINE_WORDS)

    def copy_counters(self) -> bytes:
        """Returns a copy of all CPUs' counters."""
        lines = range(0, len(self.words), _LINE_WORDS)
        return b"".join([bytes(self.words[at : at + _COUNTERS]) for at in lines])

    def counts(self) -> WaitCounts:
        """Returns the counters, summed over all CPUs."""
        return parse_wait_counts(self.copy_counters())

    def offset_ns(self) -> int:
        """Returns the latest value of ``CLOCK_MONOTONIC`` minus ``struct thread``'s clock."""
        lines = range(_COUNTERS, len(self.words), _LINE_WORDS)
        at = max(lines, key=lambda offset: self.words[offset + 1])
        return ctypes.c_int64(self.words[at]).value


def parse_wait_counts(counters: bytes) -> WaitCounts:
    """Sums the counters from :meth:`WaitLines.copy_counters` over all CPUs."""
    words = memoryview(counters).cast("Q")
    return WaitCounts(*(sum(words[at::_COUNTERS]) for at in range(_COUNTERS)))


class ThreadTable:
    """Reads the ``buckets`` and ``threads`` maps, which are memory-mapped only during reads."""

    def __init__(self, buckets_fd: int, threads_fd: int, buckets: int) -> None:
        self._buckets_fd = buckets_fd
        self._threads_fd = threads_fd
        self._places = buckets * PLACES

    def read(self) -> bytes:
        """Returns all threads that exist throughout the call. Raises ``OSError``."""
        threads, step = [], min(_PLACES_AT_ONCE, self._places)
        for first in range(0, self._places, step):
            with _map_part(self._buckets_fd, first * 8, step * 8) as buckets:
                tasks = memoryview(buckets[: step * 8]).cast("Q")
            taken = list(itertools.compress(range(0, step * THREAD_BYTES, THREAD_BYTES), tasks))
            if taken:
                with _map_part(self._threads_fd, first * THREAD_BYTES, step * THREAD_BYTES) as part:
                    threads += [part[at : at + THREAD_BYTES] for at in taken]
        return b"".join(threads)


def _map_part(fd: int, offset: int, size: int) -> mmap.mmap:
    """Map part of an array map for reading; ``offset`` is a multiple of the page size."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return mmap.mmap(fd, whole, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
