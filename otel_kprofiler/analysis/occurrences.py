"""Determines the groups that a stack counts towards: functions, lines, modules, and so on."""

import re
from collections.abc import Callable, Iterable, Sequence
from os.path import basename
from typing import Final, NamedTuple

from otel_kprofiler.formats import Entry, frame_entries, side_remarks, stack_entries
from otel_kprofiler.model import KERNEL_SIDE, Frame, ModuleKind, RawFrames, Stack, find_entry


class Key(NamedTuple):
    """The name of a function, line or other unit, and a place that distinguishes equal names.

    ``place`` is the function's module or source file, or the thread's process; it may be empty.
    """

    name: str
    place: str = ""


class Occurrence(NamedTuple):
    """A stack's groups: ``own`` is the leaf's group, and ``all`` contains every frame's group."""

    own: Key
    all: Iterable[Key]


NO_STACK: Final = Key("[no stack]")
NO_LINE: Final = Key("[no line]")
NO_PROGRAM: Final = Key("[no BPF program]")
_PROGRAM: Final = re.compile(r"bpf_prog_([0-9a-f]{16})_(.+)")


class FrameKeys:
    """Lists the keys of a stack's entries, outermost first. Caches keys by ``Frame`` object."""

    def __init__(self, key: Callable[[Entry], Key]) -> None:
        self._key = key
        self._known: dict[Frame, tuple[Key, ...]] = {}

    def __call__(self, stack: Stack) -> list[Key]:
        """Returns the keys for a stack."""
        keys_of_stack: list[Key] = []
        for side in reversed(stack.sides):
            keys_of_stack += map(self._key, side_remarks(side))
            if isinstance(side.frames, RawFrames):  # RawFrames builds new frames on each access
                for frame in reversed(side.frames):
                    keys_of_stack += map(self._key, frame_entries(frame))
                continue
            for frame in reversed(side.frames):
                keys = self._known.get(frame)
                if keys is None:
                    keys = self._known[frame] = tuple(map(self._key, frame_entries(frame)))
                keys_of_stack += keys
        return keys_of_stack


def by_function() -> Callable[[Stack], Occurrence]:
    """Returns a grouping by function, in which a sample belongs to the innermost function."""
    return _by_frames(function_key)


def by_module() -> Callable[[Stack], Occurrence]:
    """Returns a function that groups samples by module or source file.

    A sample belongs to the module or source file of its innermost frame.
    """
    return _by_frames(lambda entry: Key(place_of(entry)))


def line_occurrence(stack: Stack) -> Occurrence:
    """Groups by source line.

    A sample is attributed to the innermost frame with a known source line. Lines of interpreted
    code take precedence over native code, so time in the kernel and in native libraries is
    attributed to the line that called them.
    """
    entries = [entry for entry in stack_entries(stack) if entry.line]
    if not entries:
        return Occurrence(NO_LINE, [NO_LINE])
    interpreted = [entry for entry in entries if entry.side.has_files]
    return Occurrence(
        line_key((interpreted or entries)[-1]), {line_key(entry) for entry in entries}
    )


def syscall_occurrence(stack: Stack) -> Occurrence:
    """Groups samples by kernel entry (system call, interrupt, …); user mode is one group."""
    return only(Key(find_entry(stack)))


def program_occurrence(stack: Stack) -> Occurrence:
    """Groups by BPF function. A sample belongs to the innermost BPF function in its stack.

    A program's time includes the time in kernel functions that it calls.
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
"""Stack groupings, by name. Each value creates a function that maps a stack to its groups."""


def place_of(entry: Entry) -> str:
    """Returns an entry's module or source file; the frame type in brackets if both are unknown."""
    return entry.module or f"[{entry.side.name}]"


def function_key(entry: Entry) -> Key:
    """Returns the key for an entry's function.

    The key for a function without a name consists of the reason and the module.
    """
    if entry.reason and not entry.name.startswith(("[truncated", "[no ", "fun_")):
        return Key(f"[{entry.reason}]", place_of(entry))
    return Key(entry.name, place_of(entry))


def line_key(entry: Entry) -> Key:
    """Returns the key for an entry's line: ``function (file:line)``."""
    return Key(f"{entry.name} ({basename(entry.file)}:{entry.line})", entry.file)


def program_key(frame: Frame) -> Key | None:
    """Returns a BPF frame's function and program details as a key; None for other frames."""
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
    """Returns the occurrence for a stack that belongs to a single group."""
    return Occurrence(key, (key,))


def _by_frames(key: Callable[[Entry], Key]) -> Callable[[Stack], Occurrence]:
    keys_of = FrameKeys(key)

    def occurrence(stack: Stack) -> Occurrence:
        keys: Sequence[Key] = keys_of(stack)
        return Occurrence(keys[-1], set(keys)) if keys else only(NO_STACK)

    return occurrence
