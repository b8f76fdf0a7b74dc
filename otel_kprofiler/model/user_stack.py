"""A sample's user stack, as recorded by the BPF program.

Must match the struct in ``bpf/programs/user_stack.bpf.h``.
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
"""Flag in a frame's source: the code was moved to anonymous memory between mappings of its file."""
_ADDRESS_MASK: Final = (1 << ADDRESS_BITS) - 1
_TRAMPOLINE_MASK: Final = (1 << SOURCE_BITS) - 1 | IN_MOVED_TEXT << SOURCE_BITS
"""Mask that sets the source in a frame's word to :attr:`FrameSource.REGISTERS`."""
NO_MAPPING: Final = 15


class StackEnd(enum.IntEnum):
    """Reason why a user stack ends."""

    COMPLETE = 0
    """The outermost frame is marked as having no caller."""
    FRAME_LIMIT = 1
    WORK_LIMIT = 2
    """The BPF program reached the work limit per stack."""
    PENDING = 3
    """The unwind table of the last frame's file is not loaded yet."""
    NO_RULE = 4
    """The code has neither an unwind table nor a frame pointer."""
    UNREADABLE = 5
    """The required stack memory is not resident."""
    UNSUPPORTED = 6
    """An unwind rule is not supported by the BPF program."""
    NOT_EXECUTABLE = 7
    """The return address does not point to code."""
    NOT_A_CALL = 8
    """The return address does not follow a call instruction."""
    NO_PROGRESS = 9
    """The caller's frame is not at a higher address than the callee's frame."""
    DAMAGED = 10
    """The file's unwind table is inconsistent."""
    OVER_BUDGET = 11
    """The process exceeded its budget for distinct stacks; set by user space."""


_FIRST_TRUNCATED: Final = 16
_COMPLETE: Final = {StackEnd.COMPLETE: STACK_OK, StackEnd.FRAME_LIMIT: STACK_TRUNCATED}
_STATUSES: Final = {
    end: _COMPLETE.get(end, StackStatus(_FIRST_TRUNCATED + end)) for end in StackEnd
}
STATUS_BY_END: Final = tuple(
    _STATUSES[StackEnd(end)] if end < len(StackEnd) else StackStatus(-errno.EINVAL)
    for end in range(256)
)
"""Status of a user stack, indexed by :class:`StackEnd`; ``-EINVAL`` for unused numbers."""
TRUNCATED_STACKS: Final[Mapping[StackStatus, StackEnd]] = {
    status: end for end, status in _STATUSES.items() if end is not StackEnd.COMPLETE
}
STACK_OVER_BUDGET: Final = _STATUSES[StackEnd.OVER_BUDGET]


class FrameSource(enum.IntEnum):
    """The method by which a frame was unwound."""

    REGISTERS = 0
    """The leaf (the interrupted instruction) or, after :func:`mark_trampolines`, a trampoline."""
    TABLE = 1
    FRAME_POINTER = 2
    """Unwound through the frame pointer. The return address follows a call instruction. The
    function that it called may be missing from the stack."""
    GUESS = 3
    """Caller of a leaf without an unwind entry. The address at the stack's top follows a call."""
    SIGNAL = 4
    """Code interrupted by a signal; the address is from the registers that the kernel saved."""
    DISASSEMBLY = 5
    """Unwound by rules from the callee's code. The return address follows a call instruction."""


class FileKey(NamedTuple):
    """Identity of a mapped file on this host, valid until reboot.

    Attributes:
        inode: the file's inode number.
        device: device of the file system, as ``MKDEV`` (major << 20 | minor); differs from
            ``st_dev`` on overlayfs and btrfs.
        generation: distinguishes files with a reused inode number, and the old and new contents of
            a file that was overwritten in place, unless their sizes and modification times are
            equal.
    """

    inode: int
    device: int
    generation: int

    def pack(self) -> bytes:
        """Encode the key as a ``struct file_key``."""
        return _KEY.pack(*self)


class StackMapping(NamedTuple):
    """A file's mapping in a process; ``bias`` is address minus file offset, modulo 2^64."""

    file: FileKey
    bias: int


class UserStack(NamedTuple):
    """A user stack, leaf first.

    Attributes:
        mappings: file mappings that contain the frames' code.
        addresses: runtime address of the interrupted instruction, then the return addresses.
        places: index into ``mappings`` for each frame; None for memory without a file.
        sources: how each frame was unwound.
    """

    end: StackEnd
    mappings: tuple[StackMapping, ...]
    addresses: tuple[int, ...]
    places: tuple[int | None, ...]
    sources: tuple[FrameSource, ...]


def parse_user_stack(raw: bytes) -> UserStack:
    """Decodes a user stack. Raises ``ValueError`` if the data is malformed."""
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
    """Returns the addresses at which to look up a user stack's symbols.

    A caller's address is the return address minus one, which belongs to the call instruction.
    Raises ``ValueError`` if the stack is malformed.
    """
    words = mark_trampolines(split_user_stack(raw)[2])
    exact = (FrameSource.REGISTERS, FrameSource.SIGNAL)
    return array(
        "Q",
        [
            (word & _ADDRESS_MASK) - (word >> SOURCE_BITS & ~IN_MOVED_TEXT not in exact)
            for word in words
        ],
    )


def mark_trampolines(words: memoryview[int]) -> memoryview[int] | array[int]:
    """Marks each signal trampoline as a frame with an exact address.

    A signal handler returns to the first instruction of a trampoline. No call precedes that
    instruction, and the preceding byte may belong to another function.
    """
    marked: array[int] | None = None
    for at in range(1, len(words)):
        if words[at] >> SOURCE_BITS & ~IN_MOVED_TEXT == FrameSource.SIGNAL:
            marked = marked or array("Q", words)
            marked[at - 1] &= _TRAMPOLINE_MASK
    return words if marked is None else marked


def pack_user_stack(
    end: StackEnd,
    frames: Iterable[tuple[int, int | None, int]],
    mappings: tuple[StackMapping, ...] = (),
) -> bytes:
    """Encode a user stack from frames, which are tuples of (address, mapping index, source)."""
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
    """Returns the size of the user stack at an offset in ``raw``; 0 if there is no stack."""
    if len(raw) - at < _HEAD.size:
        return 0
    _, mappings, frames, version, marker = _HEAD.unpack_from(raw, at)
    if version != _VERSION or marker != _MARKER:
        return 0
    return int(_HEAD.size + mappings * _MAPPING.size + frames * _WORD_BYTES)


def split_user_stack(raw: bytes) -> tuple[int, bytes, memoryview[int]]:
    """Returns a stack's end, mappings and frame words, without creating an object per frame.

    Frame words have the same meaning in all stacks with the same mappings. From the lowest bit up,
    a word contains the address (:data:`ADDRESS_BITS` bits), the mapping index (four bits;
    :data:`NO_MAPPING` if there is no mapping), and the frame source (four bits, including the
    :data:`IN_MOVED_TEXT` flag). Raises ``ValueError`` if the stack is malformed.
    """
    mappings, start = split_mappings(raw)
    return raw[0] if raw else StackEnd.COMPLETE, mappings, memoryview(raw)[start:].cast("Q")


def split_mappings(raw: bytes) -> tuple[bytes, int]:
    """Returns a user stack's mappings and the offset of its first word, as in split_user_stack."""
    if not raw:
        return b"", 0
    if len(raw) < _HEAD.size:
        raise ValueError("the user stack is malformed")
    _, mappings, frames, version, marker = _HEAD.unpack_from(raw)
    start = _HEAD.size + mappings * _MAPPING.size
    if version != _VERSION or marker != _MARKER or len(raw) != start + frames * _WORD_BYTES:
        raise ValueError("the user stack is malformed")
    return raw[_HEAD.size : start], start


def mapping_fields(mappings: bytes) -> list[tuple[int, int, int, int]]:
    """Decode each mapping in a stack into the fields of a file key, and a bias."""
    return list(_MAPPING.iter_unpack(mappings))
