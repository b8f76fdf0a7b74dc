"""Builds stacks from the frame columns in a ClickHouse table.

The table contains the names, files, lines, mappings and addresses of frames. A frame's type is
derived from its mapping and file, and inlining from equal addresses. The reason for a missing name
is available only if the sender replaced the name with the reason (``UnnamedFrames.NAMES``).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from otel_kprofiler.clickhouse.queries import KERNEL_FLOOR, KERNEL_MAPPINGS
from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Side,
    SideKind,
    Stack,
    StackStatus,
    Unresolved,
)

_KERNEL: Final = re.compile(KERNEL_MAPPINGS)
_REASONS: Final = {f"[{name.lower()}]": reason for name, reason in Unresolved.__members__.items()}
_SIDES: Final = {
    SideKind(name, name, USER_SIDE.color, has_files=True): suffixes
    for name, suffixes in {
        "jvm": (".java", ".kt", ".scala", ".clj", ".groovy"),
        "ruby": (".rb",),
        "php": (".php",),
        "perl": (".pl", ".pm"),
        "v8js": (".js", ".mjs", ".cjs", ".ts"),
        "dotnet": (".cs", ".fs", ".vb"),
        "luajit": (".lua",),
        "beam": (".erl", ".ex"),
    }.items()
} | {PYTHON_SIDE: (".py", ".pyx", ">")}
"""Suffixes that identify the type of a frame without a mapping. ``>`` matches ``<frozen os>``."""

IN_KERNEL: Final = Stack(
    (Side(KERNEL_SIDE, (Frame(None, KERNEL_FLOOR, (), 0, KERNEL_SIDE, Unresolved.NOT_KEPT),)),)
)
NOT_IN_KERNEL: Final = Stack()

Statuses = tuple[tuple[SideKind, StackStatus], ...]


class _Row(NamedTuple):
    address: int
    function: str
    file: str
    line: int
    mapping: str

    @property
    def is_kernel(self) -> bool:
        """Returns whether the row is known to be kernel code."""
        if self.mapping:
            return _KERNEL.match(self.mapping) is not None
        return self.address >= KERNEL_FLOOR

    @property
    def reason(self) -> Unresolved | None:
        if not self.function:
            return Unresolved.NOT_KEPT
        place, _, reason_name = self.function.rpartition(" ")
        name = self.mapping.rpartition("/")[2]
        is_made_up = place == (f"{name}+{self.address:#x}" if name else "")
        return _REASONS.get(reason_name) if is_made_up else None


class Stacks:
    """Builds stacks, and caches them by number. Equal frames and equal stacks are stored once."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[Frame, ...]] = {}
        self._known: dict[tuple[SideKind, tuple[_Row, ...]], Frame] = {}
        self._modules: dict[tuple[str, bool], Module] = {}
        self._stacks: dict[tuple[int, Statuses], Stack] = {}

    def __len__(self) -> int:
        return len(self._frames)

    def __contains__(self, number: int) -> bool:
        return number in self._frames

    def add(self, number: int, columns: Iterable[Sequence[Any]]) -> None:
        """Add a stack, given the columns of its frames, leaf first."""
        self._frames[number] = tuple(self._make(list(map(_Row, *columns))))

    def get(self, number: int, statuses: Statuses) -> Stack:
        """Returns stack ``number`` with the given collection statuses."""
        key = number, statuses
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = Stack.from_frames(self._frames[number], dict(statuses))
        return stack

    def _make(self, rows: Sequence[_Row]) -> Iterator[Frame]:
        # A kernel module may have the same name as a file, but frames of kernel modules are nearer
        # to the leaf than the last frame in vmlinux.
        kernel = max((at + 1 for at, row in enumerate(rows) if row.is_kernel), default=0)
        for part, is_kernel in ((rows[:kernel], True), (rows[kernel:], False)):
            for lines in _frames(part):
                side = KERNEL_SIDE if is_kernel else _side(lines[0])
                key = side, lines
                frame = self._known.get(key)
                if frame is None:
                    frame = self._known[key] = self._frame(side, lines)
                yield frame

    def _frame(self, side: SideKind, rows: tuple[_Row, ...]) -> Frame:
        first = rows[0]
        module = self._module(first.mapping, side is KERNEL_SIDE) if first.mapping else None
        if reason := first.reason:
            return Frame(module, first.address, (), 0, side, reason)
        lines = tuple(Line(row.function, "", row.file, row.line) for row in rows)
        return Frame(module, first.address, lines, 0, side)

    def _module(self, name: str, is_kernel: bool) -> Module:
        module = self._modules.get((name, is_kernel))
        if module is None:
            kind = ModuleKind.USER
            if is_kernel:
                kind = ModuleKind.BPF if name.startswith("bpf_") else ModuleKind.LOADED
                kind = ModuleKind.VMLINUX if name == "vmlinux" else kind
            module = self._modules[name, is_kernel] = Module(name, kind, None, FileId(""), 0)
        return module


def _frames(rows: Sequence[_Row]) -> Iterator[tuple[_Row, ...]]:
    """Yields the rows of each frame: consecutive, distinct rows with the same address."""
    for (address, mapping), group in groupby(rows, key=itemgetter(0, 4)):
        frames: list[_Row] = []
        for row in group:
            is_inlined = bool(address and mapping and not row.reason) and row not in frames
            if frames and not is_inlined:  # a repeated row is recursion, not inlining
                yield tuple(frames)
                frames = []
            frames.append(row)
        yield tuple(frames)


def _side(row: _Row) -> SideKind:
    if row.mapping or not row.file:
        return USER_SIDE
    return next((side for side, ends in _SIDES.items() if row.file.endswith(ends)), USER_SIDE)
