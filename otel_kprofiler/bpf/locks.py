"""Constants, settings and counters for the lock contention programs (``locks.bpf.h``)."""

import os
import struct
from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import KernelTypes
from otel_kprofiler.bpf.mapped_words import MappedWords
from otel_kprofiler.bpf.wait_maps import WAIT_UNIT_NS
from otel_kprofiler.model import UNCOUNTED_LOCK, LockTotal, LockTotals, add_lock_totals, name_lock

LOCK_BEGIN: Final = "kprofiler_lock_begin"
LOCK_END: Final = "kprofiler_lock_end"
LOCK_LAYOUT: Final = ".rodata.locks"
"""Section that contains the ``lock_layout`` constant."""
LOCK_PHASE: Final = 128
"""Phase of lock-wait records, to which the lock's flags are added."""
LOCK_BUCKETS: Final = 2048
"""Number of buckets for ongoing waits, a power of two. A bucket has room for eight waits."""
_CONSTANTS: Final = struct.Struct("=10Q")
_CONFIG_WORDS: Final = 2
_FLAGS: Final = 64
_GAPS: Final = 4
_FIRST_SUM: Final = 8
_LINE_WORDS: Final = _FIRST_SUM + 2 * _FLAGS


class LockOffsets(NamedTuple):
    """Byte offsets used to find lock owners; None if unknown. See ``struct lock_layout``."""

    mutex_owner: int | None
    rwsem_owner: int | None
    pid: int | None


def find_lock_offsets(types: KernelTypes) -> LockOffsets | None:
    """Returns the offsets of struct members; None if the kernel lacks lock tracepoints."""
    if types.arguments("contention_begin") is None or types.arguments("contention_end") is None:
        return None
    pid = types.offset("task_struct", "pid")
    if pid is None:
        return LockOffsets(None, None, None)
    # With PREEMPT_RT, these structs have no owner field.
    return LockOffsets(types.offset("mutex", "owner"), types.offset("rw_semaphore", "owner"), pid)


def pack_lock_layout(offsets: LockOffsets, number: int, by: int, *, python: bool) -> bytes:
    """Packs the constants for the lock programs that this process loads.

    ``number`` is the lock event's number, from 1. ``by`` is a value of ``enum user_frames``.
    """
    namespace = os.stat("/proc/self/ns/pid")
    owners = [0 if at is None else at + 1 for at in offsets[:2]]
    return _CONSTANTS.pack(
        number, by, python, LOCK_BUCKETS - 1,
        namespace.st_dev, namespace.st_ino, os.getpid(), *owners, offsets.pid or 0,
    )  # fmt: skip


class LockSettings(MappedWords):
    """The mapped ``struct lock_config``: changes need no system call."""

    def __init__(self, map_fd: int) -> None:
        super().__init__(map_fd, _CONFIG_WORDS, writable=True)

    def change(self, threshold_ns: int, sample_ns: int) -> None:
        """Set the threshold, a multiple of ``WAIT_UNIT_NS``, and the sampling interval."""
        if threshold_ns % WAIT_UNIT_NS:
            raise ValueError(f"the threshold {threshold_ns} is not a multiple of {WAIT_UNIT_NS}")
        self.words[1] = sample_ns
        self.words[0] = threshold_ns


class LockLines(MappedWords):
    """The mapped array of per-CPU ``struct lock_line``; reads require no system call."""

    def __init__(self, map_fd: int, cpus: int) -> None:
        super().__init__(map_fd, cpus * _LINE_WORDS)

    def totals(self) -> LockTotals:
        """Returns the counted waits by lock type, and the other waits as ``UNCOUNTED_LOCK``."""
        return parse_lock_lines(self.copy())


def parse_lock_lines(lines: bytes) -> LockTotals:
    """Sums the counters of all lines (``struct lock_line``) by lock type."""
    words = memoryview(lines).cast("Q")
    totals: LockTotals = {}
    for flags in range(_FLAGS):
        first = _FIRST_SUM + 2 * flags
        waits, total_ns = (sum(words[place::_LINE_WORDS]) for place in (first, first + 1))
        if waits:
            totals = add_lock_totals(totals, {name_lock(flags): LockTotal(waits, total_ns)})
    gaps = sum(sum(words[place::_LINE_WORDS]) for place in range(_GAPS))
    return {**totals, UNCOUNTED_LOCK: LockTotal(gaps, 0)} if gaps else totals
