"""Builds stack entries for reports: names, reasons for missing names, colors and remarks."""

import errno
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    STACK_NOT_CAPTURED,
    STACK_OK,
    STACK_TRUNCATED,
    TRUNCATED_STACKS,
    USER_SIDE,
    Frame,
    ModuleKind,
    Resource,
    Side,
    SideKind,
    Stack,
    StackEnd,
    Unresolved,
)
from otel_kprofiler.otlp import PROGRAM

_MEMFD: Final = "memfd:"


class Entry(NamedTuple):
    """One line of a stack in a report.

    Attributes:
        name: name of the function; ``fun_`` and its address if only its bounds are known;
            ``[module+0xrva]`` or ``[0xaddress]`` if unresolved; or a remark such as
            ``[truncated]``.
        module: name of the module; empty if unknown. A built-in module is shown as ``vmlinux``
            followed by its name in brackets, as in kallsyms. For Python frames, this is the
            source file.
        reason: reason for a missing function name; empty if there is a name.
        inlined: whether the function was inlined into the preceding entry.
        file: source file; empty if unknown.
        line: 1-based source line; 0 if unknown.
        color: fill color of the entry's boxes in the flame graph.
    """

    name: str
    module: str
    side: SideKind
    reason: str = ""
    inlined: bool = False
    file: str = ""
    line: int = 0
    color: str = ""

    @property
    def label(self) -> str:
        """Returns the name, and the line if the function alone does not identify the code."""
        if not self.side.has_files or not self.file:
            return self.name
        file = self.file.rpartition("/")[2] or self.file
        return f"{self.name} ({file}:{self.line})" if self.line else f"{self.name} ({file})"


_TRUNCATED_REASONS: Final = {
    StackEnd.FRAME_LIMIT: "the stack is deeper than the frame limit",
    StackEnd.WORK_LIMIT: "unwinding the stack took longer than its limit",
    StackEnd.PENDING: "the unwind table of the caller's file was not loaded yet",
    StackEnd.NO_RULE: "the code has neither an unwind table nor a frame pointer",
    StackEnd.UNREADABLE: "the memory of the stack or the code was not resident",
    StackEnd.UNSUPPORTED: "the unwind table has a rule that is not supported",
    StackEnd.NOT_EXECUTABLE: "the return address does not point to code",
    StackEnd.NOT_A_CALL: "the return address does not follow a call",
    StackEnd.NO_PROGRESS: "the caller's frame does not lie above its callee's",
    StackEnd.DAMAGED: "the unwind table contradicts itself",
    StackEnd.OVER_BUDGET: "the process makes more distinct stacks than its budget allows",
}
_MODULE_COLORS: Final = {ModuleKind.LOADED: "module", ModuleKind.BPF: "bpf"}


def stack_entries(stack: Stack) -> tuple[Entry, ...]:
    """Returns the entries in a stack, outermost first.

    A remark takes the place of the missing frames in a truncated or unavailable stack.
    """
    entries: list[Entry] = []
    for side in reversed(stack.sides):
        entries += side_remarks(side)
        for frame in reversed(side.frames):
            entries += frame_entries(frame)
    return tuple(entries)


def frame_entries(frame: Frame) -> tuple[Entry, ...]:
    """Returns the entries for a frame: the physical function, then functions inlined into it."""
    module = frame.module.name if frame.module else ""
    place = f"{module}+{frame.address:#x}" if module else f"{frame.address:#x}"
    module = " ".join((module, *(f"[{name}]" for name in frame.builtin)))
    side = frame.side
    color = _MODULE_COLORS.get(frame.module.kind, side.color) if frame.module else side.color
    if frame.lines:
        physical = len(frame.lines) - 1
        return tuple(
            Entry(
                line.function,
                line.file if side.has_files else module,
                side,
                "",
                at != physical,
                line.file,
                line.line,
                color,
            )
            for at, line in reversed(list(enumerate(frame.lines)))
        )
    reason = frame.unresolved.value if frame.unresolved else "unknown"
    if frame.unresolved is Unresolved.NO_NAME:
        place = f"fun_{frame.address - frame.offset:x}"
    else:
        place = f"[{side.name if side.has_files else place}]"
    return (Entry(place, module, side, reason, color=color),)


def process_name(resource: Resource, thread_name: str) -> str:
    """Returns the name of a process: its script and executable, or else the thread's name.

    An executable without a name, such as a file created by memfd_create(2), is omitted.
    """
    executable = str(resource.attributes.get("process.executable.name") or "")
    program = str(resource.attributes.get(PROGRAM) or "")
    if executable.startswith(_MEMFD):
        executable = ""
    if program and executable:
        return f"{program} ({executable})"
    return program or executable or thread_name


def process_id(resource: Resource) -> int | None:
    """Returns a resource's process id; None if it has none."""
    pid = resource.attributes.get("process.pid")
    return pid if isinstance(pid, int) else None


def side_remarks(side: Side) -> Iterator[Entry]:
    """Yields remarks about missing kernel, user or Python frames in a stack."""
    kind, status = side.kind, side.status
    if status == STACK_OK:
        return
    if status == STACK_TRUNCATED or status in TRUNCATED_STACKS:
        reason = _TRUNCATED_REASONS[TRUNCATED_STACKS.get(status, StackEnd.FRAME_LIMIT)]
        yield Entry("[truncated]", "", kind, reason, color=kind.color)
    elif status == STACK_NOT_CAPTURED and kind is USER_SIDE:
        reason = "the wait lasted longer than expected: only the kernel stack could be captured"
        yield Entry("[user stack not captured]", "", kind, reason, color=kind.color)
    elif kind.is_expected:
        reason = f"the kernel could not capture the stack: {errno.errorcode.get(-status, status)}"
        yield Entry(f"[no {kind.name} stack]", "", kind, reason, color=kind.color)
