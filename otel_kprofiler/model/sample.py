"""Samples, as recorded by the BPF programs."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from otel_kprofiler.model.kind import ProfileKind
from otel_kprofiler.model.lock import LockWait
from otel_kprofiler.model.stack import STACK_OK, SideKind, StackStatus
from otel_kprofiler.model.wait import Wait

_WORD_BYTES: Final = 8


class SpanLink(NamedTuple):
    """The sampled thread's current span. Trace and span ids (16 and 8 bytes) are nonzero.

    ``local_root`` is the name of the process's topmost span in the trace; empty if unknown.
    """

    trace_id: bytes
    span_id: bytes
    local_root: str = ""


LabelSet = tuple[tuple[str, str], ...]
"""Labels of a sample: names and values, sorted."""
MAX_LABELS: Final = 16
MAX_LABEL_NAME_CHARS: Final = 100
MAX_LABEL_VALUE_CHARS: Final = 200

COARSE: Final = "otel_kprofiler.coarse"
"""Label that is ``true`` on samples with reduced detail, whose process exceeds its budget."""


class RawSide(NamedTuple):
    """The kernel, Python or user stack of a sample, as recorded by the BPF program.

    For the kernel, ``words`` are native-endian 64-bit words: the address to look up at the leaf,
    followed by return addresses. For user code, ``words`` has the format that
    :func:`parse_user_stack` reads, or is empty.
    """

    kind: SideKind
    words: bytes
    status: StackStatus = STACK_OK

    def addresses(self) -> array[int]:
        """Returns the addresses, ignoring an incomplete last word."""
        return array("Q", self.words[: len(self.words) & -_WORD_BYTES])


Collected = tuple[tuple[SideKind, StackStatus], ...]
"""The kinds of stacks (kernel, Python, user), each with the outcome of collecting it."""


class RawSample(NamedTuple):
    """A single sampled event, as recorded by the BPF program.

    Attributes:
        value: the sample's value, in the unit of its kind.
        time_ns: the event's ``CLOCK_BOOTTIME``.
        tgid, tid: ids in the initial pid namespace; the idle task's ``tgid`` is 0.
        start_time_ns: ``CLOCK_BOOTTIME`` at which the process started; None if unknown.
        cgroup_id: cgroup v2 id (inode number); 0 or 1 on hosts with cgroup v1.
        comm: thread name, at most 15 bytes, without trailing zeros.
        collected: kinds of stacks (kernel, Python, user), from leaf to root, each with its
            collection outcome. Samples with the same outcomes share a tuple.
        stacks: words of each stack, as in :class:`RawSide`.
        labels: number of the thread's current label set; 0 for none.
        wait: details of the off-CPU or lock wait; None for samples of other kinds.
        exec_id, owner: see :class:`ProcessKey`.
        stack_start: start address of the main thread's stack (``startstack`` of
            ``/proc/PID/stat``); 0 if unknown, and during execve(2).
        context: the thread context that ``link`` was read from; empty if there was none. The
            context consists of a byte for its kind, a byte for the trace flags, and either
            attributes as encoded by the process (OTEP 4947) or a goroutine's labels.
    """

    kind: ProfileKind
    value: int
    time_ns: int
    cpu: int
    tgid: int
    tid: int
    start_time_ns: int | None
    cgroup_id: int
    comm: bytes
    collected: Collected
    stacks: tuple[bytes, ...]
    link: SpanLink | None
    labels: int = 0
    wait: Wait | LockWait | None = None
    exec_id: int = 0
    owner: int | None = None
    stack_start: int = 0
    context: bytes = b""

    @property
    def process(self) -> ProcessKey:
        """Returns the key of the sampled process."""
        return ProcessKey(self.tgid, self.start_time_ns, self.exec_id, self.owner)

    @property
    def sides(self) -> tuple[RawSide, ...]:
        """Returns the collected kernel, Python and user stacks, in leaf-to-root order."""
        sides = zip(self.collected, self.stacks, strict=True)
        return tuple([RawSide(kind, words, status) for (kind, status), words in sides])

    def words(self, kind: SideKind) -> bytes:
        """Returns the words of the kernel, Python or user stack; empty if not collected."""
        return next((side.words for side in self.sides if side.kind is kind), b"")


class ProcessKey(NamedTuple):
    """Identity of a process, which changes when the process changes its program or user.

    Attributes:
        tgid: process id, as in samples.
        start_time_ns: ``CLOCK_BOOTTIME`` at which the process started, which distinguishes
            processes that had the same id; None if unknown.
        exec_id: ``self_exec_id`` of the process's ``task_struct``, which each execve(2) increments;
            a child inherits its parent's value.
        owner: effective user id; None if unknown or irrelevant.
    """

    tgid: int
    start_time_ns: int | None
    exec_id: int = 0
    owner: int | None = None

    @property
    def process(self) -> tuple[int, int | None]:
        """Returns the process id and start time, which do not change with the program or user."""
        return self.tgid, self.start_time_ns
