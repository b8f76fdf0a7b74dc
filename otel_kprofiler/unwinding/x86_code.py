"""Decodes x86-64 instructions: their length and their effect on the stack and frame pointers.

The opcode maps are in the Intel SDM, volume 2, appendix A. Writes to rsp are decoded only in the
forms that compilers and C libraries use; any other write to rsp is :attr:`Effect.LOSE_SP`. This
module runs in child processes, so it imports nothing from this package.
"""

import enum
import struct
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple


class Effect(enum.IntEnum):
    """The effect of an instruction.

    The comments describe the values associated with the effects.
    """

    NONE = 0
    SHIFT = 1  # bytes by which rsp moves
    PUSH_FP = 2
    POP_FP = 3
    SET_FP = 4  # rbp = rsp + bytes
    FROM_FP = 5  # rsp = rbp + bytes
    LEAVE = 6
    STORE_FP = 7  # rbp is saved at rsp + bytes
    LOAD_FP = 8  # rbp is loaded from rsp + bytes
    CLEAR_FP = 9
    LOSE_SP = 10
    CALL = 11  # distance of the target from the next instruction
    CALL_INDIRECT = 12  # distance to the slot that holds the target address; 0: no slot
    JUMP = 13  # distance, as for CALL
    JUMP_INDIRECT = 14  # distance, as for CALL_INDIRECT
    BRANCH = 15  # conditional jump; distance, as for CALL
    RETURN = 16
    END = 17  # the next instruction is not executed
    REFERENCE = 18  # distance, as for CALL, of the address that LEA loads
    ABSOLUTE = 19  # a number that may be an address


Instruction = tuple[int, int, int]
"""The length of an instruction in bytes, its :class:`Effect`, and the value of the effect."""

MAX_BYTES: Final = 15
INVALID: Final[Instruction] = (0, Effect.END, 0)

_SP, _FP = 4, 5
_B, _X, _R, _W = 1, 2, 4, 8
_REGISTERS: Final = 0xC0  # the smallest ModRM byte with two register operands
_ADD, _SUBTRACT, _COMPARE = 0, 5, 7
# ModRM byte of a RIP-relative operand, with the reg field masked out
_BY_PC: Final = 5
_BARE_SP: Final = 0x24  # a SIB byte with rsp as base and no index

_BYTE: Final = struct.Struct("<b").unpack_from
_WORD: Final = struct.Struct("<i").unpack_from


def _numbers(*parts: int | range) -> frozenset[int]:
    return frozenset(n for part in parts for n in (part if isinstance(part, range) else (part,)))


def _arithmetic(form: int) -> list[int]:
    return list(range(form, 0x40, 8))


def _table(members: frozenset[int]) -> bytes:
    return bytes(n in members for n in range(256))


_PREFIXES: Final = _numbers(0x66, 0x67, 0xF0, 0xF2, 0xF3, 0x2E, 0x36, 0x3E, 0x26, 0x64, 0x65)
_MODRM: Final = _table(
    _numbers(
        *(n for form in range(4) for n in _arithmetic(form)),
        0x63, 0x69, 0x6B, range(0x80, 0x90), 0xC0, 0xC1, 0xC6, 0xC7, range(0xD0, 0xD4),
        range(0xD8, 0xE0), 0xF6, 0xF7, 0xFE, 0xFF,
    )
)  # fmt: skip
_IMMEDIATE_8: Final = _numbers(
    *_arithmetic(4), 0x6A, 0x6B, range(0x70, 0x80), 0x80, 0x83, 0xA8, range(0xB0, 0xB8),
    0xC0, 0xC1, 0xC6, 0xCD, range(0xE0, 0xE8), 0xEB,
)  # fmt: skip
_IMMEDIATE_32: Final = _numbers(*_arithmetic(5), 0x68, 0x69, 0x81, 0xA9, 0xC7)
_IMMEDIATES: Final = bytes(
    1 if n in _IMMEDIATE_8
    else 2 if n in (0xC2, 0xCA)
    else 3 if n == 0xC8
    else 4 if n in _IMMEDIATE_32
    else 0
    for n in range(256)
)  # fmt: skip
_ABSENT: Final = _numbers(
    0x06, 0x07, 0x0E, 0x16, 0x17, 0x1E, 0x1F, 0x27, 0x2F, 0x37, 0x3F, 0x60, 0x61, 0x82, 0x9A, 0xCE,
    range(0xD4, 0xD7), 0xEA,
)  # fmt: skip
_NO_MODRM_0F: Final = _numbers(
    range(0x05, 0x0A), 0x0B, 0x0E, range(0x30, 0x38), 0x77, range(0x80, 0x90), range(0xA0, 0xA3),
    range(0xA8, 0xAB), range(0xC8, 0xD0),
)  # fmt: skip
_ABSENT_0F: Final = _numbers(0x04, 0x0A, 0x0C, range(0x24, 0x28), range(0x39, 0x40), 0xA6, 0xA7)
_IMMEDIATE_0F: Final = _numbers(0x0F, range(0x70, 0x74), 0xA4, 0xAC, 0xBA, 0xC2, 0xC4, 0xC5, 0xC6)
_VECTOR_MAPS: Final = {0xC4: 0x1F, 0x62: 0x07}
"""The VEX and EVEX prefixes, each with the mask of the opcode map in the next byte."""

_WRITES_RM: Final = _numbers(*_arithmetic(1), 0x89, 0x87, 0xC7, 0xC1, 0xD1, 0xD3) - {0x39}
_WRITES_REG: Final = _numbers(*_arithmetic(3), 0x8B, 0x8D, 0x87, 0x63, 0x69, 0x6B) - {0x3B}
_WRITES_REG_0F: Final = _numbers(range(0x40, 0x50), 0xAF, range(0xB6, 0xC0)) - {0xBA, 0xBB}
_PLAIN: Final = _table(
    _numbers(range(256))
    - _numbers(range(0x50, 0x60), 0x68, 0x6A, range(0x70, 0x80), range(0x81, 0x84), 0x8F, 0x94)
    - _numbers(0x9C, 0x9D, range(0xB8, 0xC0), range(0xC8, 0xD0), 0xC2, 0xC3, 0xF1, 0xF4, 0xF7)
    - _numbers(range(0xE0, 0xE4), 0xE8, 0xE9, 0xEB, 0xFF)
    - _WRITES_RM
    - _WRITES_REG
)
"""Opcodes that change neither the stack pointer, nor the frame pointer, nor the control flow."""

_DISTANCES: Final = {
    **dict.fromkeys([*range(0x70, 0x80), *range(0xE0, 0xE4)], (Effect.BRANCH, 1)),
    0xE8: (Effect.CALL, 4),
    0xE9: (Effect.JUMP, 4),
    0xEB: (Effect.JUMP, 1),
}
"""Effects of jumps and calls, and the sizes of their displacements."""
_FIXED: Final = {
    0x68: (Effect.SHIFT, -8),
    0x6A: (Effect.SHIFT, -8),
    0x94: (Effect.LOSE_SP, 0),
    0x9C: (Effect.SHIFT, -8),
    0x9D: (Effect.SHIFT, 8),
    0xC3: (Effect.RETURN, 0),
    0xC8: (Effect.LOSE_SP, 0),
    0xC9: (Effect.LEAVE, 0),
    0xCD: (Effect.NONE, 0),
}


def decode(code: bytes, at: int) -> Instruction:  # noqa: PLR0911 - one for each opcode map
    """Decodes one instruction; returns :data:`INVALID` if the bytes are not an instruction.

    At least :data:`MAX_BYTES` bytes must follow the instruction, which is at offset ``at``.
    """
    start, rex, narrow = at, 0, False
    op = code[at]
    while op in _PREFIXES:
        narrow |= op == 0x66
        at += 1
        if at - start >= MAX_BYTES:
            return INVALID
        op = code[at]
    if op & 0xF0 == 0x40:
        rex = op
        at += 1
        op = code[at]
    at += 1
    if op == 0x0F:
        return _decode_0f(code, start, at, rex)
    if op in (0xC4, 0xC5, 0x62):
        return _decode_vector(code, start, at, op)
    if op in _ABSENT or op & 0xF0 == 0x40 or op in _PREFIXES:
        return INVALID
    immediate = _IMMEDIATES[op]
    if immediate == 4 and narrow:
        immediate = 2
    if _MODRM[op]:
        end = _operand_end(code, at)
        if op & 0xFE == 0xF6 and not code[at] & 0x30:
            immediate = 1 if op == 0xF6 else 2 if narrow else 4
        if _PLAIN[op]:
            return end + immediate - start, Effect.NONE, 0
        rm = code[at] & 7 | (rex & _B) << 3 if code[at] >= _REGISTERS else -1
        reg = code[at] >> 3 & 7 | (rex & _R) << 1
        effect, value = _modrm_effect(_Operands(code, at, end, rex, rm, reg, narrow), op)
        return end + immediate - start, effect, value
    if _PLAIN[op]:
        if op & 0xFC == 0xA0:
            immediate = 8
        return at + immediate - start, Effect.NONE, 0
    return _simple(code, start, at, rex, narrow)


def _operand_end(code: bytes, at: int) -> int:
    """Returns the offset just past the ModRM byte and its SIB byte and displacement, if any."""
    modrm = code[at]
    at += 1
    if modrm >= _REGISTERS:
        return at
    mode, rm = modrm >> 6, modrm & 7
    if rm == 4:
        if not mode and code[at] & 7 == 5:
            return at + 5
        at += 1
    elif not mode and rm == 5:
        return at + 4
    return at if not mode else at + 1 if mode == 1 else at + 4


def _signed(code: bytes, at: int, end: int) -> int:
    size = end - at
    number: int = 0 if not size else _BYTE(code, at)[0] if size == 1 else _WORD(code, at)[0]
    return number


class _Operands(NamedTuple):
    """Operands of an instruction whose ModRM byte is at ``at``; ``rm`` is -1 for memory."""

    code: bytes
    at: int
    end: int
    rex: int
    rm: int
    reg: int
    is_narrow: bool


def _modrm_effect(operands: _Operands, op: int) -> tuple[int, int]:
    read = _READERS.get(op)
    if read is not None:
        return read(operands)
    if op in (0x31, 0x33) and operands.rm == operands.reg == _FP:
        return Effect.CLEAR_FP, 0
    is_written = (operands.rm == _SP and op in _WRITES_RM) or (
        operands.reg == _SP and op in _WRITES_REG
    )
    return (Effect.LOSE_SP if is_written else Effect.NONE), 0


def _group_1(operands: _Operands, size: int) -> tuple[int, int]:
    number = operands.reg & 7
    if operands.rm != _SP or number == _COMPARE:
        return Effect.NONE, 0
    if operands.is_narrow or number not in (_ADD, _SUBTRACT):
        return Effect.LOSE_SP, 0
    value = _signed(operands.code, operands.end, operands.end + size)
    return Effect.SHIFT, value if number == _ADD else -value


def _group_3(operands: _Operands) -> tuple[int, int]:
    is_written = operands.rm == _SP and operands.reg & 7 in (2, 3)  # not, neg
    return (Effect.LOSE_SP if is_written else Effect.NONE), 0


def _group_5(operands: _Operands) -> tuple[int, int]:
    number = operands.reg & 7
    is_slot = operands.code[operands.at] & 0xC7 == _BY_PC
    slot = _WORD(operands.code, operands.at + 1)[0] if is_slot else 0
    if number in (2, 3):
        return Effect.CALL_INDIRECT, slot
    if number in (4, 5):
        return Effect.JUMP_INDIRECT, slot
    if number == 6:
        return Effect.SHIFT, -8
    return (Effect.LOSE_SP if operands.rm == _SP else Effect.NONE), 0


def _pop_to(operands: _Operands) -> tuple[int, int]:
    is_unusual = operands.rm == _SP or operands.reg & 7
    return (Effect.LOSE_SP, 0) if is_unusual else (Effect.SHIFT, 8)


def _move_immediate(operands: _Operands) -> tuple[int, int]:
    if operands.rm == _SP:
        return Effect.LOSE_SP, 0
    if operands.rm < 0:
        return Effect.NONE, 0
    return Effect.ABSOLUTE, _WORD(operands.code, operands.end)[0]


def _store(operands: _Operands) -> tuple[int, int]:
    return _move(operands, operands.rm, operands.reg, Effect.STORE_FP)


def _load(operands: _Operands) -> tuple[int, int]:
    return _move(operands, operands.reg, operands.rm, Effect.LOAD_FP)


def _move(operands: _Operands, to: int, source: int, memory: Effect) -> tuple[int, int]:
    """Decodes a move; ``memory`` is the effect of a move between rbp and memory."""
    if to == _SP:
        return (Effect.FROM_FP if source == _FP else Effect.LOSE_SP), 0
    if to == _FP and source == _SP:
        return Effect.SET_FP, 0
    if {to, source} == {_FP, -1} and operands.rex & (_W | _B | _X) == _W:
        place = _displacement(operands)
        if place is not None:
            return memory, place
    return Effect.NONE, 0


def _address(operands: _Operands) -> tuple[int, int]:
    code, at, rex, to = operands.code, operands.at, operands.rex, operands.reg
    if code[at] & 0xC7 == _BY_PC:
        return (Effect.LOSE_SP if to == _SP else Effect.REFERENCE), _WORD(code, at + 1)[0]
    if to not in (_SP, _FP):
        return Effect.NONE, 0
    place = None if rex & (_B | _X) else _displacement(operands)
    if place is not None:
        return (Effect.SET_FP if to == _FP else Effect.SHIFT), place
    if to == _FP:
        return Effect.NONE, 0
    if code[at] & 7 == _FP and not rex & _B:
        return Effect.FROM_FP, _signed(code, at + 1, operands.end)
    return Effect.LOSE_SP, 0


def _displacement(operands: _Operands) -> int | None:
    """Returns the displacement of a memory operand from rsp; None if its base is not rsp."""
    code, at = operands.code, operands.at
    if code[at] & 7 != _SP or code[at] >= _REGISTERS or code[at + 1] != _BARE_SP:
        return None
    return _signed(code, at + 2, operands.end)


_READERS: Final[Mapping[int, Callable[[_Operands], tuple[int, int]]]] = {
    0x81: lambda operands: _group_1(operands, 4),
    0x83: lambda operands: _group_1(operands, 1),
    0x89: _store,
    0x8B: _load,
    0x8D: _address,
    0x8F: _pop_to,
    0xC7: _move_immediate,
    0xF7: _group_3,
    0xFF: _group_5,
}


def _simple(code: bytes, start: int, at: int, rex: int, narrow: bool) -> Instruction:
    """Decodes an instruction that has no ModRM byte.

    ``at`` is the index of the byte after the opcode.
    """
    op = code[at - 1]
    register = op & 7 | (rex & _B) << 3
    if op & 0xF0 == 0x50:
        return at - start, *_push_or_pop(op, register, narrow)
    if op & 0xF8 == 0xB8:
        size = 8 if rex & _W else 2 if narrow else 4
        effect = Effect.LOSE_SP if register == _SP else Effect.ABSOLUTE
        return at + size - start, effect, _WORD(code, at)[0]
    if op in _DISTANCES:
        effect, size = _DISTANCES[op]
        return at + size - start, effect, _signed(code, at, at + size)
    if op == 0x94 and rex & _B:
        return at - start, Effect.NONE, 0
    effect, value = _FIXED.get(op, (Effect.END, 0))
    size = 2 if op == 0x68 and narrow else _IMMEDIATES[op]
    return at + size - start, effect, value


def _push_or_pop(op: int, register: int, narrow: bool) -> tuple[int, int]:
    is_pop = op >= 0x58
    if narrow or (is_pop and register == _SP):
        return Effect.LOSE_SP, 0
    if register == _FP:
        return (Effect.POP_FP if is_pop else Effect.PUSH_FP), 0
    return Effect.SHIFT, 8 if is_pop else -8


def _decode_0f(  # noqa: PLR0911 - one for each form
    code: bytes, start: int, at: int, rex: int
) -> Instruction:
    op = code[at]
    at += 1
    if op in (0x38, 0x3A):
        return _operand_end(code, at + 1) + (op == 0x3A) - start, Effect.NONE, 0
    if op in _ABSENT_0F:
        return INVALID
    if op in _NO_MODRM_0F:
        if op & 0xF0 == 0x80:
            return at + 4 - start, Effect.BRANCH, _WORD(code, at)[0]
        if op & 0xF7 in (0xA0, 0xA1):
            return at - start, Effect.SHIFT, 8 if op & 1 else -8
        is_end = op in (0x07, 0x0B, 0x34, 0x35)
        return at - start, Effect.END if is_end else Effect.NONE, 0
    end = _operand_end(code, at) + (op in _IMMEDIATE_0F)
    if op in (0xB9, 0xFF):
        return end - start, Effect.END, 0
    is_written = op in _WRITES_REG_0F and code[at] & 0x38 == _SP << 3 and not rex & _R
    return end - start, Effect.LOSE_SP if is_written else Effect.NONE, 0


def _decode_vector(code: bytes, start: int, at: int, prefix: int) -> Instruction:
    numbers = code[at] & _VECTOR_MAPS.get(prefix, 0) or 1
    at += {0xC5: 1, 0xC4: 2, 0x62: 3}[prefix]
    op = code[at]
    if prefix != 0x62 and numbers == 1 and op == 0x77:
        return at + 1 - start, Effect.NONE, 0
    has_immediate = numbers == 3 or (numbers == 1 and op in _IMMEDIATE_0F)
    return _operand_end(code, at + 1) + has_immediate - start, Effect.NONE, 0
