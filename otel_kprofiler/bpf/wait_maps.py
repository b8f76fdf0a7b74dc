"""The structs and maps of the programs that follow threads off the CPU (``wait_types.bpf.h``)."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.bpf.kernel_types import KernelTypes
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
_CONFIG: Final = struct.Struct("=7Q")
_LAYOUT: Final = struct.Struct("=15Q")
_THREAD: Final = struct.Struct(f"=3Q10I{len(WaitState)}Q3Q2Q8I16s")
_END: Final = struct.Struct("=4Q4I16s")
WAIT_END_BYTES: Final = _END.size
THREAD_BYTES: Final = _THREAD.size
WAIT_LAYOUT: Final = ".rodata.waits"
"""Section of the constant ``wait_layout``."""
WAIT_UNIT_NS: Final = 256
"""Thresholds are multiples of this (``UNIT_SHIFT``), and fit into 32 bits in this unit."""
PLACES: Final = 16
"""In a bucket of threads."""
_PLACES_AT_ONCE: Final = 4096  # their threads fill whole pages


class WaitOffsets(NamedTuple):
    """Offsets in the kernel's structs: ``struct wait_layout``. See there."""

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
        """True if the kernel accounts for how long a thread wants a CPU."""
        return self.run_delay != 0

    def pack(self, buckets: int) -> bytes:
        """The struct, for so many buckets, a power of two."""
        return _LAYOUT.pack(*self, buckets - 1)


def find_wait_offsets(types: KernelTypes) -> WaitOffsets | None:
    """Returns the offsets of a kernel that the programs need; None if it has other structs."""

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
    """The configuration of the programs: ``struct wait_config``."""

    epoch: int = 0
    threshold_ns: int = 0
    min_ns: int = 0
    begin_ns: int = 0
    wakers: int = 0
    sample_ns: int = 0
    late_begins: int = 0


_LATE_BEGINS: Final = WaitConfig._fields.index("late_begins")


class WaitSettings:
    """``struct wait_config``, mapped: changing it needs no system call, and no right.

    Args:
        map_fd: the map.
    """

    def __init__(self, map_fd: int) -> None:
        self._mapped = mmap.mmap(map_fd, mmap.PAGESIZE, mmap.MAP_SHARED)
        self._words = memoryview(self._mapped)[: _CONFIG.size].cast("Q")

    def change(self, config: WaitConfig) -> None:
        """Change the settings, the epoch last: before, threads are not followed."""
        epoch, *rest = config[:_LATE_BEGINS]
        if self._words[0] != epoch:
            self._words[0] = 0
        for at, word in enumerate(rest, 1):
            self._words[at] = word
        self._words[0] = epoch

    def allow_late_begins(self, count: int) -> None:
        """Let the next iteration write so many begins of waits that go on."""
        self._words[_LATE_BEGINS] = count

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._mapped.close()


class WaitThread(NamedTuple):
    """``struct thread``: the sums of a thread, and the wait that it is in. See there."""

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

    def passed(self, now_ns: int) -> tuple[int, int]:
        """Returns the times that have passed in the wait's state and since the wake-up.

        Args:
            now_ns: time of the threads' clock; one before the wait began is ignored.
        """
        since = self.off_since_ns
        if not since or now_ns <= since:
            return 0, 0
        if self.woken_ns < since or self.state == WaitState.RUNNABLE:
            return now_ns - since, 0
        woken = min(self.woken_ns, now_ns)
        return woken - since, now_ns - woken


def parse_threads(data: bytes) -> Iterator[WaitThread]:
    """The structs that lie side by side in ``data``. Raises ``ValueError`` if one is cut off."""
    if len(data) % THREAD_BYTES:
        raise ValueError("a thread of the off-CPU totals is cut off")
    states = len(WaitState)
    for words in _THREAD.iter_unpack(data):
        _, since, _, _, state, epoch, _, flags, threshold = words[:9]
        waits, below, start, longest, woken, tgid, tid = words[13 + states : 20 + states]
        yield WaitThread(
            longest, start, since, woken, words[13 : 13 + states], waits, below, tgid, tid,
            state if state < states else 0, epoch, threshold * WAIT_UNIT_NS, flags,
        )  # fmt: skip


class WaitEnd(NamedTuple):
    """``struct wait_end``: how long a wait was. See there."""

    since_ns: int
    asleep_ns: int
    runnable_ns: int
    threshold_ns: int
    state: WaitState
    flags: int
    waker: Waker | None


def parse_wait_end(data: bytes, at: int, until: int) -> WaitEnd:
    """The struct at a place. Raises ``ValueError`` if it does not end before ``until``."""
    if until - at < WAIT_END_BYTES:
        raise ValueError("the end of a wait is cut off")
    *times, state, flags, tgid, tid, comm = _END.unpack_from(data, at)
    since, asleep, runnable, threshold = times
    wait_state = WaitState(state) if state < len(WaitState) else WaitState.RUNNABLE
    waker = Waker(tgid, tid, comm[: comm.find(b"\0")]) if flags & WAIT_WOKEN else None
    return WaitEnd(since, asleep, runnable, threshold, wait_state, flags, waker)


class WaitRecord(NamedTuple):
    """A record of a wait; ``end`` is None at its begin, and the sample's value ``since_ns``."""

    sample: RawSample
    end: WaitEnd | None


class WaitRecords(NamedTuple):
    """The records of waits in a chunk, in its order."""

    waits: list[WaitRecord]
    ended: list[WaitThread]


class WaitCounts(NamedTuple):
    """Counters of the programs over all CPUs (``struct wait_line``)."""

    taken: int
    ring_full: int
    no_room: int
    missed: int
    lost: int
    begun: int


class WaitLines:
    """The array of ``struct wait_line``, mapped: reading it makes no system call."""

    def __init__(self, map_fd: int, cpus: int) -> None:
        size = cpus * _LINE_BYTES
        self._mapped = _map_part(map_fd, 0, size)
        self._words = memoryview(self._mapped)[:size].cast("Q")

    def copy(self) -> bytes:
        """The counters of all CPUs as they are."""
        lines = range(0, len(self._words), _LINE_WORDS)
        return b"".join([bytes(self._words[at : at + _COUNTERS]) for at in lines])

    def counts(self) -> WaitCounts:
        """The sums over all CPUs."""
        return parse_wait_counts(self.copy())

    def offset_ns(self) -> int:
        """``CLOCK_MONOTONIC`` less the clock of threads, as it was found last."""
        lines = range(_COUNTERS, len(self._words), _LINE_WORDS)
        at = max(lines, key=lambda offset: self._words[offset + 1])
        return ctypes.c_int64(self._words[at]).value

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._mapped.close()


def parse_wait_counts(counters: bytes) -> WaitCounts:
    """The sums over all CPUs of what :meth:`WaitLines.copy` has returned."""
    words = memoryview(counters).cast("Q")
    return WaitCounts(*(sum(words[at::_COUNTERS]) for at in range(_COUNTERS)))


class ThreadTable:
    """The maps ``buckets`` and ``threads``, mapped while they are read: mapped memory is resident.

    Args:
        buckets_fd: the buckets.
        threads_fd: the threads.
        buckets: how many there are, a power of two.
    """

    def __init__(self, buckets_fd: int, threads_fd: int, buckets: int) -> None:
        self._buckets_fd = buckets_fd
        self._threads_fd = threads_fd
        self._places = buckets * PLACES

    def read(self) -> bytes:
        """All threads, for :func:`parse_threads`; those that are there all the time are in it.

        Raises ``OSError``.
        """
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
    """Map a part of an array, from a page on, for reading."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return mmap.mmap(fd, whole, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
