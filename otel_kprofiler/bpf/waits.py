"""The structs and maps of the programs that follow threads off the CPU (``wait_types.bpf.h``)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.bpf.call import bpf_call
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

_MAP_LOOKUP_BATCH: Final = 24  # enum bpf_cmd
_BATCH: Final = 1024
_LINE_BYTES: Final = 128
_COUNTERS: Final = 6
_LINE_WORDS: Final = _LINE_BYTES // 8
_CONFIG: Final = struct.Struct("=14Q")
_THREAD: Final = struct.Struct(f"={8 + len(WaitState)}Q12I16s")
_END: Final = struct.Struct("=3Q6I16s")
WAIT_END_BYTES: Final = _END.size
THREAD_BYTES: Final = _THREAD.size


class WaitOffsets(NamedTuple):
    """Offsets in the kernel's structs, up to ``epoch`` of ``struct wait_config``."""

    state: int
    on_rq: int
    iowait: int = 0
    iowait_mask: int = 0
    throttled: int = 0
    cfs_rq: int = 0
    throttle_count: int = 0
    runtime: int = 0
    picked: int = 0


def find_wait_offsets(types: KernelTypes) -> WaitOffsets | None:
    """What the programs must know of a kernel, None if it has other structs."""
    state = types.offset("task_struct", "__state")  # since 5.14
    if state is None:
        state = types.offset("task_struct", "state")
    on_rq = types.offset("task_struct", "on_rq")
    if state is None or on_rq is None:
        return None
    iowait = types.bit_offset("task_struct", "in_iowait")
    queue = types.offset("task_struct", "se", "cfs_rq")
    count = types.offset("cfs_rq", "throttle_count")
    runtime = types.offset("task_struct", "se", "sum_exec_runtime")
    picked = types.offset("task_struct", "se", "prev_sum_exec_runtime")
    return WaitOffsets(
        state,
        on_rq,
        *((0, 0) if iowait is None else (iowait // 8, 1 << iowait % 8)),
        types.offset("task_struct", "throttled") or 0,
        *((0, 0) if queue is None or count is None else (queue, count)),
        *((0, 0) if runtime is None or picked is None else (runtime, picked)),
    )


class WaitConfig(NamedTuple):
    """What the programs do: the rest of ``struct wait_config``. See there."""

    epoch: int = 0
    threshold_ns: int = 0
    min_ns: int = 0
    begin_ns: int = 0
    wakers: int = 0


class WaitSettings:
    """``struct wait_config``, mapped: changing it needs no system call, and no right.

    Args:
        map_fd: the map.
        offsets: of the running kernel.
    """

    def __init__(self, map_fd: int, offsets: WaitOffsets) -> None:
        self._mapped = mmap.mmap(map_fd, mmap.PAGESIZE, mmap.MAP_SHARED)
        self._words = memoryview(self._mapped)[: _CONFIG.size].cast("Q")
        self._first = len(offsets)
        for at, word in enumerate(offsets):
            self._words[at] = word

    def change(self, config: WaitConfig) -> None:
        """Change the settings, the epoch last: before, threads are not followed."""
        epoch, *rest = config
        if self._words[self._first] != epoch:
            self._words[self._first] = 0
        for at, word in enumerate(rest, self._first + 1):
            self._words[at] = word
        self._words[self._first] = epoch

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
        """What has passed of the wait: in its state, and since the wake-up.

        Args:
            now_ns: time of ``CLOCK_MONOTONIC``; one before the wait began tells nothing.
        """
        since = self.off_since_ns
        if not since or now_ns <= since:
            return 0, 0
        if not self.woken_ns or self.state == WaitState.RUNNABLE:
            return now_ns - since, 0
        woken = min(max(self.woken_ns, since), now_ns)
        return woken - since, now_ns - woken


def parse_threads(data: bytes) -> Iterator[WaitThread]:
    """The structs that lie side by side in ``data``. Raises ``ValueError`` if one is cut off."""
    if len(data) % THREAD_BYTES:
        raise ValueError("a thread of the off-CPU totals is cut off")
    states = len(WaitState)
    for words in _THREAD.iter_unpack(data):
        one, _, start, since, woken = words[:5]
        waits, below, _, tgid, tid, _, state, epoch, _, threshold, _, flags = words[
            5 + states : 17 + states
        ]
        yield WaitThread(
            one, start, since, woken, words[5 : 5 + states], waits, below, tgid, tid,
            state if state < states else 0, epoch, threshold, flags,
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
    *times, threshold, state, flags, tgid, tid, _, comm = _END.unpack_from(data, at)
    since, asleep, runnable = times
    known = WaitState(state) if state < len(WaitState) else WaitState.RUNNABLE
    waker = Waker(tgid, tid, comm[: comm.find(b"\0")]) if flags & WAIT_WOKEN else None
    return WaitEnd(since, asleep, runnable, threshold, known, flags, waker)


class WaitRecord(NamedTuple):
    """A record of a wait; ``end`` is None at its begin, and the sample's value ``since_ns``."""

    sample: RawSample
    end: WaitEnd | None


class WaitRecords(NamedTuple):
    """What a chunk tells of waits, in its order."""

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
        self._mapped = mmap.mmap(
            map_fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ
        )
        self._words = memoryview(self._mapped)[:size].cast("Q")

    def copy(self) -> bytes:
        """The counters of all CPUs as they are."""
        lines = range(0, len(self._words), _LINE_WORDS)
        return b"".join([bytes(self._words[at : at + _COUNTERS]) for at in lines])

    def counts(self) -> WaitCounts:
        """The sums over all CPUs."""
        return parse_wait_counts(self.copy())

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._mapped.close()


def parse_wait_counts(counters: bytes) -> WaitCounts:
    """The sums over all CPUs of what :meth:`WaitLines.copy` has returned."""
    words = memoryview(counters).cast("Q")
    return WaitCounts(*(sum(words[at::_COUNTERS]) for at in range(_COUNTERS)))


class _BatchAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_MAP_LOOKUP_BATCH."""

    _fields_ = (
        ("in_batch", ctypes.c_void_p),
        ("out_batch", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("map_fd", ctypes.c_uint32),
        ("element_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


def read_threads(map_fd: int) -> bytes:
    """All values of the map ``threads``, for :func:`parse_threads`.

    Each thread that is in it all the time is there once. Raises ``OSError``.
    """
    keys = (ctypes.c_uint64 * _BATCH)()
    values = ctypes.create_string_buffer(_BATCH * THREAD_BYTES)
    place = ctypes.c_uint32()
    found, first = [], True
    while True:
        attributes = _BatchAttributes(
            None if first else ctypes.addressof(place),
            ctypes.addressof(place),
            ctypes.addressof(keys),
            ctypes.addressof(values),
            _BATCH,
            map_fd,
        )
        try:
            bpf_call(_MAP_LOOKUP_BATCH, attributes)
        except OSError as error:
            if error.errno != errno.ENOENT:  # that was the last bucket
                raise
            found.append(values.raw[: attributes.count * THREAD_BYTES])
            return b"".join(found)
        found.append(values.raw[: attributes.count * THREAD_BYTES])
        first = False
