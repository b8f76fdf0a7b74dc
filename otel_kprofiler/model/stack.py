"""Stacks and their frames. Each frame has a name, or a reason for its absence (``Unresolved``)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import Final, NamedTuple, NewType

BuildId = NewType("BuildId", str)
"""A GNU build id as a lower-case hexadecimal string."""

FileId = NewType("FileId", str)
"""The 128-bit file id sent as ``process.executable.build_id.htlhash``: 32 hex digits."""

StackStatus = NewType("StackStatus", int)
"""Outcome of collecting a stack: 0 if complete, positive if truncated, or a negative ``errno``."""

STACK_OK: Final = StackStatus(0)

STACK_TRUNCATED: Final = StackStatus(1)
"""The stack exceeds the frame limit, so its outermost frames are missing."""

_SIDE: Final = attrgetter("side")

MAX_FRAMES: Final = 127
"""Maximum depth of a kernel or user stack (default of ``kernel.perf_event_max_stack``)."""

PYTHON_FRAMES: Final = 64
"""Default maximum number of Python frames per stack."""


class ModuleKind(enum.Enum):
    """The kind of a module."""

    VMLINUX = "vmlinux"
    LOADED = "module"
    BPF = "bpf"
    OUT_OF_LINE = "ool"
    """Code pages that the kernel creates at run time: ftrace trampolines and kprobe slots."""
    USER = "user"

    __hash__ = object.__hash__  # Enum's __hash__ is Python code


class RangeSource(enum.Enum):
    """The source of a module's executable ranges, best source first."""

    SECTIONS = "sections"
    """/sys/module/NAME/sections: exact."""
    SYMBOLS = "symbols"
    """The base is from /proc/modules, and the extent from the module's text symbols."""
    KERNEL = "kernel"
    """``_text`` to ``_etext`` for vmlinux; for other code, the length that the kernel reported."""


class AddressRange(NamedTuple):
    """A named half-open range of runtime addresses, such as an executable section."""

    start: int
    end: int
    name: str


class BpfProgram(NamedTuple):
    """Properties of a loaded BPF program.

    Attributes:
        id: program id; reused only after billions of loads.
        type: program type, such as ``kprobe`` or ``xdp``; empty if unknown.
        tag: hash of the program's instructions, as 16 hexadecimal digits.
        load_time_ns: boottime at which the program was loaded; 0 if unknown.
        attached_to: attach point, such as a tracepoint or function; empty if unknown.
    """

    id: int
    type: str
    tag: str
    load_time_ns: int
    attached_to: str = ""


@dataclass(frozen=True, slots=True)
class Module:
    """An object that contains code: vmlinux, a loaded module, a BPF program or a user object.

    Attributes:
        name: ``vmlinux``, the module name without path or suffix, or the BPF symbol.
        build_id: GNU build id; None if absent or unreadable.
        file_id: 128-bit id derived from the build id (see ``docs/symbols.md``).
        base: base address for RVAs, as a runtime address: ``_text`` for vmlinux, the address of the
            ``.text`` section for a module, the start of the image for BPF. 0 for a user object,
            where addresses are SVMAs in the ELF file.
        ranges: executable ranges without init sections, sorted by start; for a user object, the
            segment that contains the frames, rounded to whole pages.
        generation: serial number, which distinguishes a reloaded module from the unloaded one.
        program: the BPF program containing the code, if known.
        file_offset: for a user object, the file offset of the first byte of ``ranges``.
    """

    name: str
    kind: ModuleKind
    build_id: BuildId | None
    file_id: FileId
    base: int
    ranges: tuple[AddressRange, ...] = ()
    range_source: RangeSource = RangeSource.KERNEL
    generation: int = 0
    program: BpfProgram | None = None
    file_offset: int = 0

    @property
    def extent(self) -> AddressRange:
        """Returns the range of addresses, relative to the base; empty if unknown.

        For kernel code, the range starts at the base.
        """
        if not self.ranges:
            return AddressRange(0, 0, "")
        start = self.ranges[0].start - self.base if self.kind is ModuleKind.USER else 0
        return AddressRange(start, self.ranges[-1].end - self.base, "")


class Unresolved(enum.Enum):
    """The reason why a frame has no function name. The value is shown to users."""

    HIDDEN = "kernel symbols are hidden from this process"
    NO_SYMBOL = "the address lies between the symbols of its module"
    NO_SYMBOL_TABLE = "no symbol table for the module"
    UNMAPPED = "no module is known at the address"
    NOT_YET_KNOWN = "the module was just loaded and its symbols are not read yet"
    MODULE_GONE = "the module at the address was unloaded before or around the time of the sample"
    RECORDS_LOST = "the kernel's records of what was loaded at the address were lost"
    FREED_INIT = "the code was freed after the kernel had booted"
    USER_ADDRESS = "user code is exported as addresses"
    NO_FILE = "the code is in memory without a file, such as JIT-compiled code"
    FILE_UNKNOWN = "the file that contains the code could not be determined in time"
    NO_NAME = "the file has no name for the function"
    SYMBOLS_PENDING = "the file's symbols have not been read yet"
    SYMBOLS_DROPPED = "the file's symbols were not read due to a memory or time limit"
    SYMBOLS_REFUSED = "the symbols of the file are malformed or too large"
    NO_PROCESS = "no process was given for the address"
    PROCESS_GONE = "the process has exited or executed another program"
    PROCESS_HIDDEN = "this process may not read the mappings of the process that ran the code"
    FILE_UNREADABLE = "the file that contains the code could not be opened or read"
    LEFT_OUT = "the process is left out by a filter"
    CODE_UNKNOWN = "the Python code object was not described in time"
    NOT_HERE = "this host has no readable symbols with the build id of the code"
    NOT_KEPT = "the store has no name, and does not keep the reason"

    __hash__ = object.__hash__  # Enum's __hash__ is Python code, which would run for each frame


@dataclass(frozen=True, slots=True, eq=False)
class SideKind:
    """A type of frames that are collected separately, such as kernel frames.

    Attributes:
        name: name in reports and in OTLP attribute names.
        frame_type: OTLP ``profile.frame.type`` for the frames.
        color: color of the frames in the flame graph, from the viewer's palette.
        folded_mark: suffix for frames in folded stacks, which flamegraph.pl maps to a color.
        is_expected: whether every thread should have frames of this type; if so, reports note their
            absence.
        usual_reason: default reason why frames of this type have no names; not exported.
        has_files: whether the functions belong to source files rather than modules; if so, reports
            show lines after names.
    """

    name: str
    frame_type: str
    color: str
    folded_mark: str = ""
    is_expected: bool = False
    usual_reason: Unresolved | None = None
    has_files: bool = False


KERNEL_SIDE: Final = SideKind("kernel", "kernel", "kernel", "_[k]", is_expected=True)
"""Kernel code: vmlinux, modules, BPF programs."""

USER_SIDE: Final = SideKind("user", "native", "user", usual_reason=Unresolved.USER_ADDRESS)
"""Native code in a process. Decoding creates a new kind for each frame type not in ``SIDES``."""

PYTHON_SIDE: Final = SideKind("python", "cpython", "python", "_[p]", has_files=True)
"""Python functions in CPython processes, from the interpreter's frames."""

SIDES: Final = [KERNEL_SIDE, USER_SIDE, PYTHON_SIDE]
"""All kinds of frames, from leaf to root."""


class Line(NamedTuple):
    """A function at an address, either inlined or out of line.

    ``system_name`` is the linkage name (``foo.isra.0``), or empty if it is the same. ``line`` and
    ``start_line`` are 1-based; 0 if unknown. ``file`` is empty if unknown.
    """

    function: str
    system_name: str = ""
    file: str = ""
    line: int = 0
    start_line: int = 0


class Frame(NamedTuple):
    """An entry in a stack.

    Compared by value, but hashed by identity, so sets and dictionaries find only the same object.
    Frames are shared by resolvers, and hashing by value would cost more than all other processing
    of an already resolved frame.

    Attributes:
        module: module that contains the code; None if unknown.
        address: RVA in ``module``, or the runtime address if ``module`` is None. The leaf's address
            is exact; a caller's address is its return address minus one. The leaf of a thread that
            is off-CPU called the scheduler, and is thus a caller.
        lines: functions at the address, innermost inlined function first; empty if unresolved.
        offset: distance in bytes from the start of the physical function; 0 if its bounds are
            unknown. An unnamed function may still have known bounds (``NO_NAME``).
        unresolved: why ``lines`` is empty; None if resolved.
        builtin: names of the built-in modules that contain the code; more than one if modules share
            an object file.
        found_by: how the frame was identified, if the method is not conclusive: ``frame_pointer``
            (the frame's callee may be missing), ``guess``, ``disassembly``, or ``moved_text`` (the
            file is inferred, because the memory fills a hole between two mappings of the file).
    """

    module: Module | None
    address: int
    lines: tuple[Line, ...]
    offset: int
    side: SideKind
    unresolved: Unresolved | None = None
    builtin: tuple[str, ...] = ()
    found_by: str = ""

    @property
    def function(self) -> str:
        """Returns the name of the physical function; empty if unresolved."""
        return self.lines[-1].function if self.lines else ""


Frame.__hash__ = object.__hash__  # type: ignore[method-assign]  # NamedTuple forbids it


class RawFrames:
    """Frames that have only addresses. The addresses of callers are adjusted as in :class:`Frame`.

    The frames are created on demand, and not cached, because few of them recur.
    """

    __slots__ = ("addresses", "reason", "side")

    def __init__(self, side: SideKind, addresses: Sequence[int], reason: Unresolved) -> None:
        self.side = side
        self.addresses = addresses
        self.reason = reason

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, index: int) -> Frame:
        return Frame(None, self.addresses[index], (), 0, self.side, self.reason)

    def __iter__(self) -> Iterator[Frame]:
        return map(self.__getitem__, range(len(self)))


class Side(NamedTuple):
    """A stack's frames of one kind, such as its kernel frames.

    Attributes:
        frames: the frames, leaf first. A tuple holds strong references to the frames.
        status: outcome of collecting the frames.
        is_provisional: whether more frames may be resolved when the window closes.
        entries: for Python frames, one plus the index of each frame entered from C code.
    """

    kind: SideKind
    frames: tuple[Frame, ...] | RawFrames
    status: StackStatus = STACK_OK
    is_provisional: bool = False
    entries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A resolved stack; compared by identity.

    Equal stacks are the same object until their symbols change, so grouping samples requires only a
    dictionary lookup. ``sides`` are ordered from leaf to root. If frames of two kinds alternate,
    each run of frames is a separate :class:`Side`.
    """

    sides: tuple[Side, ...] = ()

    @classmethod
    def from_frames(
        cls, frames: Iterable[Frame], statuses: Mapping[SideKind, StackStatus] | None = None
    ) -> Stack:
        """Build a stack from frames, leaf first.

        ``statuses`` contains the status of each incomplete kind. A kind without frames is added
        only if it is in ``statuses``. Its position is the root end if it is truncated, and
        otherwise follows the order of :data:`SIDES`. If a kind has several runs of frames, the last
        run receives the status.
        """
        left = dict(statuses or {})
        sides: list[Side] = []
        for kind, run in groupby(reversed(tuple(frames)), _SIDE):
            sides.append(Side(kind, tuple(run)[::-1], left.pop(kind, STACK_OK)))
        sides.reverse()
        for kind, status in left.items():
            place = sum(SIDES.index(side.kind) < SIDES.index(kind) for side in sides)
            if status > STACK_OK:
                place = len(sides)
            sides.insert(place, Side(kind, (), status))
        return cls(tuple(sides))

    @property
    def is_provisional(self) -> bool:
        """Returns whether more frames may be resolved when the window closes."""
        for side in self.sides:  # noqa: SIM110 - any() takes three times as long
            if side.is_provisional:
                return True
        return False

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Returns all frames, leaf first."""
        return tuple(chain.from_iterable(side.frames for side in self.sides))
