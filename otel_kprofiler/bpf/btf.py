"""Reads BTF, the type information of the kernel and of programs.

Format: Documentation/bpf/btf.rst. In the kernel's BTF, a struct is found by searching for the
offset of its name and confirmed by its members, which takes a few milliseconds for 5 MB. The BTF of
a program is small and parsed completely.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

VMLINUX: Final = "/sys/kernel/btf/vmlinux"
_MAGIC: Final = 0xEB9F
_HEADER: Final = struct.Struct("=HBBIIIII")
_TYPE: Final = struct.Struct("=III")  # name_off, info, size or type
_MEMBER: Final = struct.Struct("=III")  # name_off, type, offset in bits
_KIND_STRUCT: Final = 4
_KIND_FUNC: Final = 12
# Bytes after the three words of a type, by kind: fixed, and per member.
_TAILS: Final = {1: (4, 0), 3: (12, 0), 4: (0, 12), 5: (0, 12), 6: (0, 8), 13: (0, 8), 14: (4, 0),
                 15: (0, 12), 17: (4, 0), 19: (0, 12)}  # fmt: skip


def find_member_offsets(
    btf: bytes, struct_name: str, members: Sequence[str]
) -> tuple[int, ...] | None:
    """Finds the byte offsets of direct members of a struct.

    Args:
        btf: content of ``/sys/kernel/btf/vmlinux``, in the byte order of this machine.
        struct_name: the struct's tag.
        members: names of members that are not bit fields.

    Returns:
        One offset per member; None if ``btf`` is invalid or no struct with that name has all of the
        members directly (with structure randomization they are one level deeper).
    """
    if len(btf) < _HEADER.size:
        return None
    magic, _, _, header, types_at, types_len, text_at, text_len = _HEADER.unpack_from(btf)
    if magic != _MAGIC:
        return None
    text = btf[header + text_at : header + text_at + text_len]
    types = btf[header + types_at : header + types_at + types_len]
    wanted = [_name_offset(text, name) for name in members]
    name = _name_offset(text, struct_name)
    if name is None or None in wanted:
        return None
    for at in _occurrences(types, struct.pack("=I", name)):
        offsets = _struct_members(types, at)
        if offsets is not None and all(offset in offsets for offset in wanted):
            return tuple(offsets[offset] for offset in wanted if offset is not None)
    return None


def _name_offset(text: bytes, name: str) -> int | None:
    at = text.find(b"\0" + name.encode() + b"\0")
    return None if at < 0 else at + 1


def _occurrences(types: bytes, needle: bytes) -> Iterator[int]:
    at = types.find(needle)
    while at >= 0:
        if at % 4 == 0:
            yield at
        at = types.find(needle, at + 1)


def _struct_members(types: bytes, at: int) -> dict[int, int] | None:
    """Returns byte offsets of members by name offset; None if there is no struct at ``at``."""
    if at + _TYPE.size > len(types):
        return None
    _, info, size = _TYPE.unpack_from(types, at)
    count, kind, bit_fields = info & 0xFFFF, info >> 24 & 0x1F, info >> 31
    end = at + _TYPE.size + count * _MEMBER.size
    if kind != _KIND_STRUCT or info & 0x60FF0000 or not count or end > len(types):
        return None
    members = {}
    for name, _, bits in _MEMBER.iter_unpack(types[at + _TYPE.size : end]):
        if bit_fields and bits >> 24:
            continue  # a bit field: no address
        offset = (bits & 0xFFFFFF if bit_fields else bits) // 8
        if offset > size:  # at the end is a flexible array
            return None
        members[name] = offset
    return members


class ProgramBtf(NamedTuple):
    """BTF of a program: function names by type id, and the string section."""

    functions: dict[int, str]
    texts: bytes

    def text(self, offset: int) -> str:
        """Returns the string at an offset; empty if there is none."""
        return self.texts[offset : self.texts.find(b"\0", offset)].decode("utf-8", "replace")


def parse_program_btf(btf: bytes) -> ProgramBtf:
    """Parse a program's BTF; skips damaged parts."""
    if len(btf) < _HEADER.size or _HEADER.unpack_from(btf)[0] != _MAGIC:
        return ProgramBtf({}, b"")
    _, _, _, header, types_at, types_len, text_at, text_len = _HEADER.unpack_from(btf)
    program = ProgramBtf({}, btf[header + text_at : header + text_at + text_len])
    at, end = header + types_at, min(header + types_at + types_len, len(btf))
    number = 1  # 0 is void, which is implicit
    while at + _TYPE.size <= end:
        name, info, _ = _TYPE.unpack_from(btf, at)
        kind = info >> 24 & 0x1F
        if kind == _KIND_FUNC:
            program.functions[number] = program.text(name)
        fixed, each = _TAILS.get(kind, (0, 0))
        at += _TYPE.size + fixed + each * (info & 0xFFFF)
        number += 1
    return program
