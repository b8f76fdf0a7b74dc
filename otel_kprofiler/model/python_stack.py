"""The Python stack of a sample, as recorded by the BPF program.

Layout: a header, then one word per frame, leaf first. The header is ``struct python_head`` in
``bpf/programs/``; change both together. Equal stacks in a process are encoded as identical bytes.
"""

from __future__ import annotations

import enum
import errno
import struct
from array import array
from collections.abc import Iterable
from typing import Final, NamedTuple

from otel_kprofiler.model.stack import STACK_OK, STACK_TRUNCATED, StackStatus
from otel_kprofiler.model.user_stack import STATUS_BY_END, StackEnd

_HEAD: Final = struct.Struct("=BBHI")  # end, version, frames, tag
_VERSION: Final = 1
_WORD_BYTES: Final = 8
_ID_BITS: Final = 40
_INSTRUCTION_BITS: Final = 22
MAX_CODE_ID: Final = (1 << _ID_BITS) - 1
NO_CODE: Final = 0
"""Code id for frames whose code object has no description."""
NO_INSTRUCTION: Final = (1 << _INSTRUCTION_BITS) - 1
"""Stands for an instruction index that is unknown or too large for the field."""
_FROM_C: Final = 1 << (_ID_BITS + _INSTRUCTION_BITS)


class PythonEnd(enum.IntEnum):
    """Reason why a Python stack ends."""

    COMPLETE = 0
    FRAME_LIMIT = 1
    UNREADABLE = 2
    """The next frame's memory is not resident or is inconsistent."""


_STATUSES: Final = {
    PythonEnd.COMPLETE: STACK_OK,
    PythonEnd.FRAME_LIMIT: STACK_TRUNCATED,
    PythonEnd.UNREADABLE: STATUS_BY_END[StackEnd.UNREADABLE],
}
STATUS_BY_PYTHON_END: Final = tuple(
    _STATUSES[PythonEnd(end)] if end < len(PythonEnd) else StackStatus(-errno.EINVAL)
    for end in range(256)
)
"""Status of a Python stack, indexed by :class:`PythonEnd`; ``-EINVAL`` for unused numbers."""


class PythonFrame(NamedTuple):
    """One Python frame in a sample.

    Attributes:
        code: id of the frame's :class:`PythonCode`, or :data:`NO_CODE`.
        instruction: index of the current instruction, in two-byte code units from the start of the
            code; or :data:`NO_INSTRUCTION`.
        is_from_c: whether C code entered the interpreter for this frame, creating a native frame
            for ``_PyEval_EvalFrameDefault``.
    """

    code: int
    instruction: int
    is_from_c: bool


class PythonStack(NamedTuple):
    """A decoded Python stack, leaf first. ``tag`` identifies the stack's process."""

    end: PythonEnd
    tag: int
    frames: tuple[PythonFrame, ...]


def parse_python_word(word: int) -> PythonFrame:
    """Decode a word into a frame: code id, instruction and flag, from the lowest bit up."""
    return PythonFrame(word & MAX_CODE_ID, word >> _ID_BITS & NO_INSTRUCTION, word & _FROM_C != 0)


def parse_python_stack(raw: bytes) -> PythonStack:
    """Decodes a sample's Python stack. Raises ``ValueError`` if the data is malformed."""
    end, tag, words = split_python_stack(raw)
    return PythonStack(PythonEnd(end), tag, tuple(map(parse_python_word, words)))


def split_python_stack(raw: bytes) -> tuple[int, int, memoryview[int]]:
    """Returns a stack's end, tag and frame words; raises ``ValueError`` if malformed."""
    if not raw:
        return PythonEnd.COMPLETE, 0, memoryview(b"").cast("Q")
    if python_stack_bytes(raw, 0) != len(raw):
        raise ValueError("the Python stack is malformed")
    end, _, _, tag = _HEAD.unpack_from(raw)
    return end, tag, memoryview(raw)[_HEAD.size :].cast("Q")


def find_entries(words: Iterable[int]) -> tuple[int, ...]:
    """Returns the 1-based index of each frame that was entered from C code."""
    return tuple([end for end, word in enumerate(words, start=1) if word & _FROM_C])


def pack_python_stack(end: int, frames: Iterable[tuple[int, int, bool]], tag: int = 0) -> bytes:
    """Encode a Python stack; the inverse of :func:`parse_python_stack`."""
    words = array("Q", [
        code | instruction << _ID_BITS | _FROM_C * is_from_c
        for code, instruction, is_from_c in frames
    ])  # fmt: skip
    return _HEAD.pack(end, _VERSION, len(words), tag) + words.tobytes()


def python_stack_bytes(raw: bytes, at: int) -> int:
    """Returns the size of the Python stack at an offset in ``raw``; 0 if there is none."""
    if len(raw) - at < _HEAD.size:
        return 0
    _, version, frames, _ = _HEAD.unpack_from(raw, at)
    return int(_HEAD.size + frames * _WORD_BYTES) if version == _VERSION else 0
