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
from otel_kprofiler.model import WaitState

THREAD_ENDED: Final = 3
"""``enum wait_phases``."""

_MAP_LOOKUP_BATCH: Final = 24  # enum bpf_cmd
_BATCH: Final = 1024
_LINE_BYTES: Final = 64
_LINE_WORDS: Final = _LINE_BYTES // 8
_CONFIG: Final = struct.Struct("=3Q")
_THREAD: Final = struct.Struct(f"={7 + len(WaitState)}Q6I")
THREAD_BYTES: Final = _THREAD.size


class WaitOffsets(NamedTuple):
    """Offsets in the kernel's ``task_struct``."""

    state: int
    on_rq: int


def find_wait_offsets(types: KernelTypes) -> WaitOffsets | None:
    """What the programs must know of a kernel, None if it has other structs."""
    state = types.offset("task_struct", "__state")  # since 5.14
    if state is None:
        state = types.offset("task_struct", "state")
    on_rq = types.offset("task_struct", "on_rq")
    return None if state is None or on_rq is None else WaitOffsets(state, on_rq)


def pack_wait_config(offsets: WaitOffsets, epoch: int) -> bytes:
    """``struct wait_config``; epoch 0: threads are not followed now."""
    return _CONFIG.pack(*offsets, epoch)


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
        *times, waits, below, tgid, tid, _, state, epoch, _ = words
        yield WaitThread(
            times[0], times[2], times[3], times[4], tuple(times[5 : 5 + states]),
            waits, below, tgid, tid, state if state < states else 0, epoch,
        )  # fmt: skip


class WaitCounts(NamedTuple):
    """Counters of the programs over all CPUs (``struct wait_line``)."""

    no_room: int
    missed: int
    lost: int


class WaitLines:
    """The array of ``struct wait_line``, mapped: reading it makes no system call."""

    def __init__(self, map_fd: int, cpus: int) -> None:
        size = cpus * _LINE_BYTES
        self._mapped = mmap.mmap(
            map_fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ
        )
        self._words = memoryview(self._mapped)[:size].cast("Q")

    def counts(self) -> WaitCounts:
        """The sums over all CPUs."""
        return WaitCounts(*(sum(self._words[at::_LINE_WORDS]) for at in range(3)))

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._mapped.close()


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
