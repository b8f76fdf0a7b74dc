"""The user side of a sample as the kernel program records it.

The struct is that of ``bpf/programs/user_stack.bpf.h``; change both together.
"""

from __future__ import annotations

import enum
import errno
import struct
from array import array
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from otel_kprofiler.model.stack import STACK_OK, STACK_TRUNCATED, StackStatus

_HEAD: Final = struct.Struct("=BBHHH")  # end, mappings, frames, version, marker
_KEY: Final = struct.Struct("=QII")
_MAPPING: Final = struct.Struct("=QIIQ")
_WORD_BYTES: Final = 8
_VERSION: Final = 1
_MARKER: Final = 0xFFFF
ADDRESS_BITS: Final = 56
SOURCE_BITS: Final = 60
IN_MOVED_TEXT: Final = 8
"""A bit beside a frame's source: its file is that of the mappings around memory without a file,
to which the process has copied the file's text."""
_ADDRESS_MASK: Final = (1 << ADDRESS_BITS) - 1
NO_MAPPING: Final = 15


class StackEnd(enum.IntEnum):
    """Why a stack has no more frames."""

    COMPLETE = 0
    """Its outermost frame says that it has no caller."""
    FRAME_LIMIT = 1
    WORK_LIMIT = 2
    """Limit on the time that the kernel program may take."""
    PENDING = 3
    """The unwind table of the next file is not loaded yet."""
    NO_RULE = 4
    """Code without unwind table and without frame pointer."""
    UNREADABLE = 5
    """Memory that is not resident."""
    UNSUPPORTED = 6
    """A rule that the kernel program does not understand."""
    NOT_EXECUTABLE = 7
    """The return address points to no code."""
    NOT_A_CALL = 8
    """The return address does not follow a call."""
    NO_PROGRESS = 9
    """The caller's frame does not lie above its callee's."""
    DAMAGED = 10
    """The file's unwind table contradicts itself."""
    OVER_BUDGET = 11
    """The process has used up what its distinct stacks may cost; set in user space."""


_FIRST_TRUNCATED: Final = 16
_COMPLETE: Final = {StackEnd.COMPLETE: STACK_OK, StackEnd.FRAME_LIMIT: STACK_TRUNCATED}
_STATUSES: Final = {
    end: _COMPLETE.get(end, StackStatus(_FIRST_TRUNCATED + end)) for end in StackEnd
}
STATUS_BY_END: Final = tuple(
    _STATUSES[StackEnd(end)] if end < len(StackEnd) else StackStatus(-errno.EINVAL)
    for end in range(256)
)
"""Status of a user stack by the number of its end; ``-EINVAL`` where there is none."""
TRUNCATED_STACKS: Final[Mapping[StackStatus, StackEnd]] = {
    status: end for end, status in _STATUSES.items() if end is not StackEnd.COMPLETE
}
"""Why a stack with such a status is not complete."""
STACK_OVER_BUDGET: Final = _STATUSES[StackEnd.OVER_BUDGET]


class FrameSource(enum.IntEnum):
    """How a frame was found."""

    REGISTERS = 0
    """The leaf: where the interrupt hit."""
    TABLE = 1
    FRAME_POINTER = 2
    """A frame pointer, and the return address follows a call. A callee may be missing."""
    GUESS = 3
    """A leaf that its file's table leaves out: what lies on top of its stack follows a call."""
    SIGNAL = 4
    """Interrupted by a signal: the registers that the kernel saved."""


class FileKey(NamedTuple):
    """Identity of a mapped file on this host, as long as it runs.

    Attributes:
        inode: inode number.
        device: of its file system as ``MKDEV`` (major << 20 | minor); on overlayfs and btrfs
            another than ``st_dev``.
        generation: distinguishes two users of one inode number, and a file before and after it was
            overwritten in place; any number.
    """

    inode: int
    device: int
    generation: int

    def pack(self) -> bytes:
        """``struct file_key``."""
        return _KEY.pack(*self)


class StackMapping(NamedTuple):
    """A mapped file of a process.

    Attributes:
        file: the file.
        bias: runtime address of its first byte (modulo 2^64, were it mapped there).
    """

    file: FileKey
    bias: int


class UserStack(NamedTuple):
    """A user stack, leaf first.

    Attributes:
        end: why it ends.
        mappings: files that its frames lie in.
        addresses: runtime addresses: the interrupted instruction, then return addresses.
        places: for each frame its mapping's index, None in memory without a file.
        sources: for each frame how it was found.
    """

    end: StackEnd
    mappings: tuple[StackMapping, ...]
    addresses: tuple[int, ...]
    places: tuple[int | None, ...]
    sources: tuple[FrameSource, ...]


def parse_user_stack(raw: bytes) -> UserStack:
    """Decode ``RawSample.user_stack``; raises ``ValueError`` if it is damaged."""
    end, packed, words = split_user_stack(raw)
    mappings = mapping_fields(packed)
    places = (word >> ADDRESS_BITS & NO_MAPPING for word in words)
    return UserStack(
        StackEnd(end),
        tuple(StackMapping(FileKey(*fields[:3]), fields[3]) for fields in mappings),
        tuple(word & _ADDRESS_MASK for word in words),
        tuple(place if place < len(mappings) else None for place in places),
        tuple(FrameSource(word >> SOURCE_BITS & ~IN_MOVED_TEXT) for word in words),
    )


def find_user_addresses(raw: bytes) -> array[int]:
    """The addresses of ``RawSample.user_stack`` at which its code is to be looked up.

    That is the byte before a return address, which belongs to the call.

    Raises:
        ValueError: it is damaged.
    """
    words = split_user_stack(raw)[2]
    exact = (FrameSource.REGISTERS, FrameSource.SIGNAL)
    return array(
        "Q",
        [
            (word & _ADDRESS_MASK) - (word >> SOURCE_BITS & ~IN_MOVED_TEXT not in exact)
            for word in words
        ],
    )


def pack_user_stack(
    end: StackEnd,
    frames: Iterable[tuple[int, int | None, FrameSource]],
    mappings: tuple[StackMapping, ...] = (),
) -> bytes:
    """The inverse of :func:`parse_user_stack`; frames as (address, place, source)."""
    words = array("Q", [
        address | (NO_MAPPING if place is None else place) << ADDRESS_BITS
        | source << SOURCE_BITS
        for address, place, source in frames
    ])  # fmt: skip
    return (
        _HEAD.pack(end, len(mappings), len(words), _VERSION, _MARKER)
        + b"".join(_MAPPING.pack(*mapping.file, mapping.bias) for mapping in mappings)
        + words.tobytes()
    )


def user_stack_bytes(raw: bytes, at: int) -> int:
    """Size of the user stack at a place of ``raw``, by its head; 0 if there is none."""
    if len(raw) - at < _HEAD.size:
        return 0
    _, mappings, frames, version, marker = _HEAD.unpack_from(raw, at)
    if version != _VERSION or marker != _MARKER:
        return 0
    return int(_HEAD.size + mappings * _MAPPING.size + frames * _WORD_BYTES)


def split_user_stack(raw: bytes) -> tuple[int, bytes, memoryview[int]]:
    """End, mappings, and words of the frames; without an object for each.

    What is known of the words holds for all stacks with equal mappings.

    A word is the address in its lower :data:`ADDRESS_BITS`, then four bits of the mapping's index
    (:data:`NO_MAPPING` for none), and four of the source; one bit of that is :data:`IN_MOVED_TEXT`.

    Raises:
        ValueError: the stack is damaged.
    """
    if not raw:
        return StackEnd.COMPLETE, b"", memoryview(b"").cast("Q")
    if len(raw) < _HEAD.size:
        raise ValueError("the user stack is damaged")
    end, mappings, frames, version, marker = _HEAD.unpack_from(raw)
    first = _HEAD.size + mappings * _MAPPING.size
    if (version, marker, len(raw)) != (_VERSION, _MARKER, first + frames * _WORD_BYTES):
        raise ValueError("the user stack is damaged")
    return end, raw[_HEAD.size : first], memoryview(raw)[first:].cast("Q")


def mapping_fields(mappings: bytes) -> list[tuple[int, int, int, int]]:
    """Fields of the mappings of a stack: those of the file's key, and the bias."""
    return list(_MAPPING.iter_unpack(mappings))
