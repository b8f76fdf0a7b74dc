"""What every report shows of a stack: root first, one entry per function, with honest gaps."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import NamedTuple

from otel_kprofiler.model import (
    STACK_NOT_COLLECTED,
    STACK_OK,
    STACK_TRUNCATED,
    Frame,
    FrameKind,
    Resource,
    Stack,
    StackStatus,
)


class Entry(NamedTuple):
    """One line of a stack as people see it.

    Attributes:
        name: function; ``[module+0xrva]`` or ``[0xaddress]`` when it is unresolved; or a
            remark such as ``[truncated]``.
        module: name of the module, empty if unknown; that of built-in code stands in brackets
            behind ``vmlinux``, as in kallsyms.
        kind: where the code runs.
        reason: why there is no function name, empty when there is one.
        inlined: whether it was inlined into the entry before it.
        file: source file, empty if unknown.
        line: 1-based source line, 0 if unknown.
    """

    name: str
    module: str
    kind: FrameKind
    reason: str = ""
    inlined: bool = False
    file: str = ""
    line: int = 0


def stack_entries(stack: Stack) -> tuple[Entry, ...]:
    """Entries of a stack, outermost first: user frames, then kernel frames.

    A stack that was cut, or that could not be taken, has a remark in the place of what is
    missing.
    """
    frames = stack.frames
    kernel = [frame for frame in frames if frame.kind is not FrameKind.USER]
    user = [frame for frame in frames if frame.kind is FrameKind.USER]
    found: list[Entry] = []
    for status, side, kind in (
        (stack.user_status, user, FrameKind.USER),
        (stack.kernel_status, kernel, FrameKind.KERNEL),
    ):
        found += _remark(status, kind)
        for frame in reversed(side):
            found += frame_entries(frame)
    return tuple(found)


def frame_entries(frame: Frame) -> tuple[Entry, ...]:
    """Entries of one frame, the physical function first, then what was inlined into it."""
    module = frame.module.name if frame.module else ""
    place = f"{module}+{frame.address:#x}" if module else f"{frame.address:#x}"
    module = " ".join((module, *(f"[{name}]" for name in frame.builtin)))
    if frame.lines:
        physical = len(frame.lines) - 1
        return tuple(
            Entry(line.function, module, frame.kind, "", at != physical, line.file, line.line)
            for at, line in reversed(list(enumerate(frame.lines)))
        )
    reason = frame.unresolved.value if frame.unresolved else "unknown"
    return (Entry(f"[{place}]", module, frame.kind, reason),)


def process_name(resource: Resource, thread_name: str) -> str:
    """Name of a process: its executable, else the name of the thread that was sampled."""
    return str(resource.attributes.get("process.executable.name") or thread_name)


def process_id(resource: Resource) -> int | None:
    """Process id of a resource, None if it has none."""
    pid = resource.attributes.get("process.pid")
    return pid if isinstance(pid, int) else None


def _remark(status: StackStatus, kind: FrameKind) -> Iterator[Entry]:
    if status in (STACK_OK, STACK_NOT_COLLECTED):
        return
    if status == STACK_TRUNCATED:
        yield Entry("[truncated]", "", kind, "the stack is deeper than the limit of frames")
    elif kind is FrameKind.KERNEL:  # a missing user stack is normal: kernel threads have none
        reason = f"the kernel could not take the stack: {errno.errorcode.get(-status, status)}"
        yield Entry("[no kernel stack]", "", kind, reason)
