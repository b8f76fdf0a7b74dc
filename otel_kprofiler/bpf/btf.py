"""Offsets of struct members from the kernel's BTF, without walking all of its types.

Format: Documentation/bpf/btf.rst. A struct is found by searching the bytes for the offset of
its name, and proven by its members: a few milliseconds for the 5 MB of a kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

VMLINUX: Final = "/sys/kernel/btf/vmlinux"
_MAGIC: Final = 0xEB9F
_HEADER: Final = struct.Struct("=HBBIIIII")
_TYPE: Final = struct.Struct("=III")  # name_off, info, size or type
_MEMBER: Final = struct.Struct("=III")  # name_off, type, offset in bits
_KIND_STRUCT: Final = 4


def find_member_offsets(
    btf: bytes, struct_name: str, members: Sequence[str]
) -> tuple[int, ...] | None:
    """Byte offsets of direct members of a struct.

    Args:
        btf: content of ``/sys/kernel/btf/vmlinux``, in the byte order of this machine.
        struct_name: the struct's tag.
        members: names of members that are not bit fields.

    Returns:
        One offset for each member; None when ``btf`` is no BTF, or no struct of that name has
        all of the members directly (with structure randomization they are one level deeper).
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
        found = _struct_members(types, at)
        if found is not None and all(offset in found for offset in wanted):
            return tuple(found[offset] for offset in wanted if offset is not None)
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
    """Byte offset by name offset, if what stands at ``at`` can be a struct."""
    if at + _TYPE.size > len(types):
        return None
    _, info, size = _TYPE.unpack_from(types, at)
    count, kind, bit_fields = info & 0xFFFF, info >> 24 & 0x1F, info >> 31
    end = at + _TYPE.size + count * _MEMBER.size
    if kind != _KIND_STRUCT or info & 0x60FF0000 or not count or end > len(types):
        return None
    found = {}
    for name, _, bits in _MEMBER.iter_unpack(types[at + _TYPE.size : end]):
        if bit_fields and bits >> 24:
            continue  # a bit field: no address
        offset = (bits & 0xFFFFFF if bit_fields else bits) // 8
        if offset >= size:
            return None
        found[name] = offset
    return found
