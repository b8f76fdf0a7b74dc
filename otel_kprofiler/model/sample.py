"""Samples as the kernel programs record them."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from otel_kprofiler.model.kind import ProfileKind
from otel_kprofiler.model.stack import STACK_OK, SideKind, StackStatus
from otel_kprofiler.model.wait import Wait

_WORD_BYTES: Final = 8


class SpanLink(NamedTuple):
    """The span that was current in the sampled thread.

    Attributes:
        trace_id: 16 bytes, not all zero.
        span_id: 8 bytes, not all zero.
        local_root: name of the topmost span of its process in the trace; empty if unknown.
    """

    trace_id: bytes
    span_id: bytes
    local_root: str = ""


LabelSet = tuple[tuple[str, str], ...]
"""Labels of a sample: names and values, sorted."""
MAX_LABELS: Final = 16
"""Labels of a sample."""
MAX_LABEL_NAME_CHARS: Final = 100
MAX_LABEL_VALUE_CHARS: Final = 200

COARSE: Final = "otel_kprofiler.coarse"
"""Label of samples with less detail, because their process is above its budget; its value is
``true``."""


class RawSide(NamedTuple):
    """One side of a stack, as the kernel program recorded it.

    Attributes:
        kind: which side.
        words: of the kernel, runtime addresses as native-endian 64-bit words, leaf first; of user
            code, those with the mappings of its files (:func:`parse_user_stack`), or nothing.
        status: outcome of collecting it.
    """

    kind: SideKind
    words: bytes
    status: StackStatus = STACK_OK

    def addresses(self) -> array[int]:
        """The addresses; an incomplete last word is dropped."""
        return array("Q", self.words[: len(self.words) & -_WORD_BYTES])


Collected = tuple[tuple[SideKind, StackStatus], ...]
"""Sides of a stack with the outcome of collecting each."""


class RawSample(NamedTuple):
    """One event, as the kernel program recorded it.

    Attributes:
        kind: what was sampled.
        value: in the unit of ``kind``.
        time_ns: ``CLOCK_BOOTTIME`` of the event.
        cpu: logical CPU.
        tgid: process id in the initial pid namespace; 0 is the idle task.
        tid: thread id in the initial pid namespace.
        start_time_ns: ``CLOCK_BOOTTIME`` at which the process started, None if unknown.
        cgroup_id: cgroup v2 id (inode number), 0 or 1 on hosts that use cgroup v1.
        comm: thread name, at most 15 bytes, without the trailing zeros.
        collected: the sides of its stack that were collected, from leaf to root, each with the
            outcome. Samples share such tuples.
        stacks: the words of each of them, as :class:`RawSide` has them.
        link: the span that was current in the thread, if it is known.
        labels: number of the set of labels that was current in the thread; 0 for none.
        wait: what is known of the wait; None for kinds that are not waits.
        exec_id: see :class:`ProcessKey`.
        owner: see :class:`ProcessKey`.
        stack_start: address at which the stack of the program's main thread starts, which
            ``/proc/PID/stat`` shows, too; 0 if that is unknown, and during execve(2).
        context: trace flags (one byte) and attributes of the thread context that ``link`` is from,
            as the process encodes them (OTEP 4947); empty: there was none.
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
    wait: Wait | None = None
    exec_id: int = 0
    owner: int | None = None
    stack_start: int = 0
    context: bytes = b""

    @property
    def process(self) -> ProcessKey:
        """The process that was sampled."""
        return ProcessKey(self.tgid, self.start_time_ns, self.exec_id, self.owner)

    @property
    def sides(self) -> tuple[RawSide, ...]:
        """The sides of its stack that were collected, from leaf to root."""
        sides = zip(self.collected, self.stacks, strict=True)
        return tuple([RawSide(kind, words, status) for (kind, status), words in sides])

    def words(self, kind: SideKind) -> bytes:
        """The words of a side; empty if it was not collected."""
        return next((side.words for side in self.sides if side.kind is kind), b"")


class ProcessKey(NamedTuple):
    """Identity of a process while it runs one program as one user.

    Attributes:
        tgid: its process id.
        start_time_ns: ``CLOCK_BOOTTIME`` at which it started, which distinguishes two users of one
            process id; None if unknown.
        exec_id: ``self_exec_id`` of its ``task_struct``, which grows with each execve(2); a child
            starts with its parent's.
        owner: effective user id; None if neither is known, or of no matter.
    """

    tgid: int
    start_time_ns: int | None
    exec_id: int = 0
    owner: int | None = None

    @property
    def process(self) -> tuple[int, int | None]:
        """The process, whatever it runs."""
        return self.tgid, self.start_time_ns
