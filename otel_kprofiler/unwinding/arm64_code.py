"""Finds arm64 instructions that change the frame pointer, the link register or the stack pointer.

Encodings: Arm Architecture Reference Manual for A-profile architecture, C4.1. An instruction that
this module does not decode is assumed to change its destination register. Runs in a child process,
so it imports only a few modules from this package.
"""

import struct
from collections.abc import Iterator
from typing import Final

FP, LINK, SP = 29, 30, 31
"""DWARF register numbers. As a destination register, 31 may also encode the zero register."""
WORD: Final = struct.Struct("<I")
CIE_REST: Final = b"\4\x78\x1e\1\x1b\x0c\x1f\0"
"""Alignment factors 4 and -8, return address register 30, pcrel|sdata4 pointers; def_cfa sp 0."""
NO_RULE: Final = b"\x0c\x1f\x10\x16\x1e\0"
"""def_cfa sp 16 (any CFA above sp will do); val_expression x30 with an empty expression."""
_PC_BYTES: Final = WORD.size


def find_changes(code: bytes) -> Iterator[tuple[int, int]]:
    """Yields the end and the register of each instruction that may change FP, LINK or SP."""
    for index, (word,) in enumerate(WORD.iter_unpack(code[: len(code) & -_PC_BYTES])):
        for register in _find_targets(word):
            if register >= FP:
                yield (index + 1) * _PC_BYTES, register


def _find_targets(word: int) -> tuple[int, ...]:
    """Returns the general-purpose registers that an instruction may change, where 31 is SP."""
    group, target = word >> 25 & 15, word & 31
    if group & 5 == 4:
        return _find_loaded(word)
    if word & 0xFC000000 == 0x94000000 or word & 0xFEE00000 == 0xD6200000:
        return (LINK,)  # BL, or BLR with or without pointer authentication
    if group in (0, 1, 3):  # undefined
        return ()
    if group in (10, 11) and word & 0xFFE00000 != 0xD5200000:  # branches, system (except MRS)
        return ()
    if group & 7 == 7 and not _is_general(word):
        return ()
    return (target,) if target != SP or _sets_sp(word) else ()


def _is_general(word: int) -> bool:
    """Returns whether a vector or floating-point instruction may write to a general register."""
    converts = word & 0x5F200000 == 0x1E000000 or word & 0x5F20FC00 == 0x1E200000
    return converts or word & 0xBFE0EC00 == 0x0E002C00  # SMOV, UMOV


def _sets_sp(word: int) -> bool:
    """Returns whether destination register 31 means SP. Loads and stores are not supported."""
    if word & 0x1F800000 == 0x12000000:
        return word & 0x60000000 != 0x60000000  # AND, ORR and EOR with an immediate, but not ANDS
    adds = word & 0x1F000000 == 0x11000000 or word & 0x1FE00000 == 0x0B200000
    is_scalable = word >> 25 & 15 == 2
    return (adds and not word & 0x20000000) or is_scalable  # ADD, SUB, but not ADDS, SUBS


def _find_loaded(word: int) -> tuple[int, ...]:
    kind, base, status = word >> 28 & 3, word >> 5 & 31, word >> 16 & 31
    is_load, moves_base = bool(word & 1 << 22), False
    pair = (word & 31, word >> 10 & 31)
    if kind == 0:  # exclusive, ordered and compare-and-swap accesses; vector structures
        targets: tuple[int, ...] = (status, *pair) if is_load else (status,)
    elif kind == 1:  # literal loads
        targets = pair[:1]
    elif kind == 2:  # load and store pair
        targets, moves_base = pair if is_load else (), bool(word & 1 << 23)
    else:
        is_atomic = word & 0x01200C00 == 0x00200000
        targets = pair[:1] if is_atomic or word & 0x00C00000 else ()
        # loads and stores with write-back; LDRAA and LDRAB with write-back
        moves_base = word & 0x01200400 == 0x00000400 or word & 0x01200C00 == 0x00200C00
    if word & 1 << 26:  # vector registers
        targets, moves_base = (), bool(word & 1 << 23) if kind == 0 else moves_base
    return (*(target for target in targets if target != SP), *((base,) if moves_base else ()))
