"""Derives thread states from the rows of the thread dump program, and accesses its BPF maps."""

import struct
from typing import Final, NamedTuple

from otel_kprofiler.bpf.mapped_words import MappedWords
from otel_kprofiler.model import WaitState

_ROW: Final = struct.Struct("=10Q3Ii16s")
DUMP_ROW_BYTES: Final = _ROW.size
HAS_STACKS: Final = 1
ON_A_CPU: Final = 2
NO_RING: Final = 4
IN_IOWAIT: Final = 8
"""``enum row_flags``."""
_LAYOUT: Final = struct.Struct("=5Q")
_DIRECT_MAP_WORD, _TRIED_WORD = 0, 2
# include/linux/sched.h
_STOPPED: Final = 0x4 | 0x8  # TASK_STOPPED, TASK_TRACED
_ENDED: Final = 0x10 | 0x20 | 0x80  # EXIT_DEAD, EXIT_ZOMBIE, TASK_DEAD
_IDLE: Final = 0x40 | 0x400  # TASK_PARKED, TASK_NOLOAD
_UNINTERRUPTIBLE: Final = 0x2 | 0x1000 | 0x8000  # also TASK_RTLOCK_WAIT and TASK_FROZEN
_WAITING: Final = 0x1 | _STOPPED | _IDLE | _UNINTERRUPTIBLE


class DumpRow(NamedTuple):
    """The state of a thread when the BPF program visited it. All times are in nanoseconds.

    Attributes:
        time_ns: time at which the row was written, on ``CLOCK_BOOTTIME``.
        monotonic_ns: the same time as ``time_ns``, on ``CLOCK_MONOTONIC``.
        clock_ns: time on the scheduler's clock, as last read on the CPU that ran the dump.
        arrived_ns: when the thread was last scheduled, on the scheduler's clock; 0 if unknown.
        ran_ns: how long the thread has run since ``arrived_ns``, excluding interrupts and stolen
            time.
        ran_until_ns: time at which the thread last ran, on a clock that excludes interrupts and
            stolen time; 0 if unknown.
        lacking_ns: how far the clock of ``ran_until_ns`` lagged behind the scheduler's clock at
            ``time_ns``.
        queued_ns: time at which the thread was queued for a CPU, on the scheduler's clock; 0 if it
            is not queued. Since Linux 6.12, it may also be set for a sleeping thread that was moved
            to another CPU (delayed dequeue, ``kernel/sched/fair.c``).
        switches: number of context switches since the thread started.
        state: state bits of the task, including its exit state.
        tgid: process id, in the pid namespace of the process that runs the dump.
        tid: thread id, in the pid namespace of ``tgid``.
        flags: a combination of ``enum row_flags``, such as :data:`HAS_STACKS`.
        cpu: CPU on which the thread runs or last ran; -1 if unknown.
    """

    time_ns: int
    monotonic_ns: int
    clock_ns: int
    arrived_ns: int
    ran_ns: int
    ran_until_ns: int
    lacking_ns: int
    queued_ns: int
    switches: int
    state: int
    tgid: int
    tid: int
    flags: int
    cpu: int
    comm: bytes

    @property
    def has_ended(self) -> bool:
        """Returns whether the thread has exited."""
        return bool(self.state & _ENDED)

    @property
    def wait_state(self) -> WaitState | None:
        """Returns why the thread is off-CPU; None while it is running."""
        if self.flags & ON_A_CPU:
            return None
        if not self.state & _WAITING:
            return WaitState.RUNNABLE  # preempted, or woken
        states = (
            (_STOPPED, WaitState.STOPPED),
            (_IDLE, WaitState.IDLE),
            (_UNINTERRUPTIBLE, WaitState.UNINTERRUPTIBLE),
        )
        matching = (state for bits, state in states if self.state & bits)
        return next(matching, WaitState.INTERRUPTIBLE)

    @property
    def since_ns(self) -> int:
        """Returns the time at which the thread left its CPU or was queued; 0 if unknown.

        The time is on the scheduler's clock, like :attr:`clock_ns`. The result precedes the event
        by the interrupt time and stolen time during the thread's last run. If the kernel does not
        record when the thread was last scheduled, the result is too late by the interrupt time and
        stolen time during the whole wait.
        """
        if self.queued_ns and self.wait_state is WaitState.RUNNABLE:
            return self.queued_ns
        latest = self.ran_until_ns + self.lacking_ns if self.ran_until_ns else 0
        return min(self.arrived_ns + self.ran_ns, latest) if self.arrived_ns else latest


def parse_dump_rows(data: bytes) -> list[DumpRow]:
    """Parses the output of the thread iterator. Raises ``ValueError`` if a row is truncated."""
    if len(data) % DUMP_ROW_BYTES:
        raise ValueError("a row in the dump is truncated")
    rows = (DumpRow(*fields) for fields in _ROW.iter_unpack(data))
    return [row._replace(comm=row.comm.partition(b"\0")[0]) for row in rows]


def pack_memory_layout(physical_mask: int, proof_at: int, proof: int) -> bytes:
    """Encodes ``struct memory_layout``, which the program uses to find the direct map.

    ``physical_mask`` selects the bits of a page table entry that hold the physical address.
    ``proof`` is the value of a word in resident memory, at address ``proof_at`` in this process.
    """
    return _LAYOUT.pack(0, physical_mask, 0, proof_at, proof)


class MemoryLayoutMap(MappedWords):
    """Maps ``struct memory_layout``, which the BPF program updates."""

    def __init__(self, map_fd: int) -> None:
        super().__init__(map_fd, _LAYOUT.size // 8)

    @property
    def is_found(self) -> bool:
        """Returns whether the direct map was found."""
        return bool(self.words[_DIRECT_MAP_WORD])

    @property
    def tried(self) -> int:
        """Returns how many addresses were tried as the start of the direct map."""
        return self.words[_TRIED_WORD]
