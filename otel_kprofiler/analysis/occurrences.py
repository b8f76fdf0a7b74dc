"""Groups that a stack counts for: functions, lines, modules, and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from os.path import basename
from typing import Final, NamedTuple

from otel_kprofiler.formats import Entry, frame_entries, side_remarks, stack_entries
from otel_kprofiler.model import KERNEL_SIDE, Frame, ModuleKind, RawFrames, Stack, find_entry


class Key(NamedTuple):
    """The name of a group.

    Attributes:
        name: such as that of a function.
        place: where it is: its module or file, the process of a thread; may be empty.
    """

    name: str
    place: str = ""


class Occurrence(NamedTuple):
    """The groups of a stack: that of its leaf, and all that it occurs in."""

    own: Key
    all: Iterable[Key]


NO_STACK: Final = Key("[no stack]")
NO_LINE: Final = Key("[no line]")
NO_PROGRAM: Final = Key("[no BPF program]")
_PROGRAM: Final = re.compile(r"bpf_prog_([0-9a-f]{16})_(.+)")


class FrameKeys:
    """Keys of the entries of stacks, outermost first; made once for each frame.

    For stacks that live as long as this does.

    Args:
        key: the key of an entry.
    """

    def __init__(self, key: Callable[[Entry], Key]) -> None:
        self._key = key
        self._known: dict[int, tuple[Key, ...]] = {}  # by identity, since frames are large

    def __call__(self, stack: Stack) -> list[Key]:
        """The keys of a stack."""
        found: list[Key] = []
        for side in reversed(stack.sides):
            found += map(self._key, side_remarks(side))
            if isinstance(side.frames, RawFrames):  # whose frames are not kept
                for frame in reversed(side.frames):
                    found += map(self._key, frame_entries(frame))
                continue
            for frame in reversed(side.frames):
                keys = self._known.get(id(frame))
                if keys is None:
                    keys = self._known[id(frame)] = tuple(map(self._key, frame_entries(frame)))
                found += keys
        return found


def by_function() -> Callable[[Stack], Occurrence]:
    """Functions; a sample belongs to the innermost one."""
    return _by_frames(function_key)


def by_module() -> Callable[[Stack], Occurrence]:
    """Modules and files of code; a sample belongs to that of its innermost frame."""
    return _by_frames(lambda entry: Key(place_of(entry)))


def line_occurrence(stack: Stack) -> Occurrence:
    """Lines of source code; a sample belongs to the innermost one that is known.

    A line of an interpreted language comes before those of native code, so that the time of the
    kernel and of native libraries is that of the line that called them.
    """
    entries = [entry for entry in stack_entries(stack) if entry.line]
    if not entries:
        return Occurrence(NO_LINE, [NO_LINE])
    interpreted = [one for one in entries if one.side.has_files]
    return Occurrence(line_key((interpreted or entries)[-1]), {line_key(one) for one in entries})


def syscall_occurrence(stack: Stack) -> Occurrence:
    """System calls, interrupts, and other ways into the kernel; or user mode."""
    return only(Key(find_entry(stack)))


def program_occurrence(stack: Stack) -> Occurrence:
    """Functions of BPF programs; a sample belongs to the innermost one.

    So a program counts the time of the kernel's functions that it calls.
    """
    keys = [
        key
        for side in reversed(stack.sides)
        if side.kind is KERNEL_SIDE
        for frame in reversed(side.frames)
        if (key := program_key(frame))
    ]
    return Occurrence(keys[-1], set(keys)) if keys else only(NO_PROGRAM)


OF_STACKS: Final[dict[str, Callable[[], Callable[[Stack], Occurrence]]]] = {
    "function": by_function,
    "line": lambda: line_occurrence,
    "module": by_module,
    "syscall": lambda: syscall_occurrence,
    "bpf": lambda: program_occurrence,
}
"""Groupings by stacks: each makes a function that returns the occurrences of a stack."""


def place_of(entry: Entry) -> str:
    """Module of an entry, or the file of code without modules; else its side in brackets."""
    return entry.module or f"[{entry.side.name}]"


def function_key(entry: Entry) -> Key:
    """The function of an entry; frames of a module without names are one, by the reason."""
    if entry.reason and not entry.name.startswith(("[truncated", "[no ", "fun_")):
        return Key(f"[{entry.reason}]", place_of(entry))
    return Key(entry.name, place_of(entry))


def line_key(entry: Entry) -> Key:
    """The line of an entry as ``function (file:line)``."""
    return Key(f"{entry.name} ({basename(entry.file)}:{entry.line})", entry.file)


def program_key(frame: Frame) -> Key | None:
    """The function of a BPF program that a frame is in, with what is known of the program."""
    module = frame.module
    if module is None or module.kind is not ModuleKind.BPF:
        return None
    match = _PROGRAM.fullmatch(module.name)
    tag, name = match.groups() if match else ("", module.name)
    program = module.program
    if program is None:
        return Key(name, tag)
    return Key(name, " ".join(filter(None, (program.type, str(program.id), program.attached_to))))


def only(key: Key) -> Occurrence:
    """Returns the occurrence of a stack in a single group."""
    return Occurrence(key, (key,))


def _by_frames(key: Callable[[Entry], Key]) -> Callable[[Stack], Occurrence]:
    keys_of = FrameKeys(key)

    def occurrence(stack: Stack) -> Occurrence:
        keys: Sequence[Key] = keys_of(stack)
        return Occurrence(keys[-1], set(keys)) if keys else only(NO_STACK)

    return occurrence
