"""Samples as the kernel programs record them."""

from __future__ import annotations

from typing import NamedTuple

from otel_kprofiler.model.kind import ProfileKind
from otel_kprofiler.model.stack import StackStatus


class SpanLink(NamedTuple):
    """The span that was current in the sampled thread: 16 and 8 bytes, not all zero."""

    trace_id: bytes
    span_id: bytes


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
        kernel_stack: runtime addresses as native-endian 64-bit words, leaf first.
        user_stack: likewise, of the process.
        kernel_status: outcome of collecting ``kernel_stack``.
        user_status: outcome of collecting ``user_stack``.
        link: the span that was current in the thread, if one was published.
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
    kernel_stack: bytes
    user_stack: bytes
    kernel_status: StackStatus
    user_status: StackStatus
    link: SpanLink | None


class ProcessKey(NamedTuple):
    """Identity of a process; the start time tells apart two users of one pid."""

    tgid: int
    start_time_ns: int | None
