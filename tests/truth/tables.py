"""Decodes the unwind tables ``.eh_frame`` and Go's ``.debug_frame`` with pyelftools."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from elftools.dwarf.callframe import CallFrameInfo
from elftools.dwarf.dwarf_expr import DWARFExprParser
from elftools.elf.elffile import ELFFile

_ENTRY = struct.Struct("<II")
_FORMATS = {0x00: "<QQ", 0x03: "<II", 0x04: "<QQ", 0x0B: "<iI", 0x0C: "<qQ"}
_PC_RELATIVE = 0x10
_CIE_ID = 0xFFFFFFFF  # in .debug_frame; 0 in .eh_frame
_GO = "runtime."


class Row(NamedTuple):
    """A decoded unwind table row. If ``go`` is true, the function preserves no registers."""

    rules: Mapping[Any, Any]
    signal: bool
    go: bool


class GoOffsets(NamedTuple):
    """The offsets of members in the Go runtime's structs."""

    g_m: int
    g_stack: int
    g_sched: int
    m_curg: int


class Section:
    """A section with unwind tables; decodes entries on demand."""

    def __init__(self, info: CallFrameInfo) -> None:
        self._info = info
        self._rows: dict[int, Row | None] = {}
        self._entries = sorted(self._scan())
        self._starts = [entry[0] for entry in self._entries]

    def _scan(self) -> Iterator[tuple[int, int, int]]:
        """Yields the start, end and entry offset of each function."""
        info = self._info
        info.stream.seek(0)
        data, at, eh_frame = info.stream.read(info.size), 0, info.for_eh_frame
        while at + _ENTRY.size <= len(data):
            length, back = _ENTRY.unpack_from(data, at)
            if length and back != (0 if eh_frame else _CIE_ID):
                encoding = 0
                if eh_frame:
                    encoding = self._entry(at + 4 - back).augmentation_dict.get("FDE_encoding", 0)
                place = at + _ENTRY.size
                start, size = struct.unpack_from(_FORMATS[encoding & 0x0F], data, place)
                if encoding & _PC_RELATIVE:
                    start += info.address + place
                yield start, start + size, at
            at += 4 + length

    def _entry(self, offset: int) -> Any:
        return self._info._parse_entry_at(offset)

    def row(self, address: int) -> Row | None:
        """Returns the row for an address, or None if there is no entry."""
        if address not in self._rows:
            self._rows[address] = self._decode(address)
        return self._rows[address]

    def rows(self) -> Iterator[Mapping[Any, Any]]:
        for _, end, at in self._entries:
            yield from (row for row in self._entry(at).get_decoded().table if row["pc"] < end)

    def functions(self) -> Iterator[tuple[int, int, list[Mapping[Any, Any]]]]:
        for start, end, at in self._entries:
            yield start, end, self._entry(at).get_decoded().table

    def _decode(self, address: int) -> Row | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._entries[index][1]:
            return None
        entry = self._entry(self._entries[index][2])
        rows = [row for row in entry.get_decoded().table if row["pc"] <= address]
        signal = "S" in str(entry.cie.header.augmentation)
        return Row(rows[-1], signal, not self._info.for_eh_frame) if rows else None


class ElfTables:
    """The unwind tables in an ELF file. ``go`` is None for files without the Go runtime."""

    def __init__(self, stream: BinaryIO) -> None:
        elf = ELFFile(stream)
        self._loads = [
            (segment["p_offset"], segment["p_filesz"], segment["p_vaddr"])
            for segment in elf.iter_segments()
            if segment["p_type"] == "PT_LOAD"
        ]
        self._functions: list[tuple[int, int, str]] = []
        self.go: GoOffsets | None = None
        dwarf = elf.get_dwarf_info(relocate_dwarf_sections=False)
        self.expressions = DWARFExprParser(dwarf.structs)
        self._sections = [
            Section(CallFrameInfo(part.stream, part.size, part.address, dwarf.structs, eh_frame))
            for part, eh_frame in ((dwarf.eh_frame_sec, True), (dwarf.debug_frame_sec, False))
            if part is not None
        ]
        symbols = elf.get_section_by_name(".symtab")
        if symbols and any(part.name.endswith("gopclntab") for part in elf.iter_sections()):
            self._functions = sorted(
                (s["st_value"], s["st_value"] + s["st_size"], s.name.removesuffix(".abi0"))
                for s in symbols.iter_symbols()
                if s.name.startswith(_GO) or s.name in ("time.now", "gogo")
            )
            self.go = _find_offsets(dwarf)

    def address(self, offset: int) -> int | None:
        for start, size, address in self._loads:
            if start <= offset < start + size:
                return offset - start + address
        return None

    def row(self, address: int) -> Row | None:
        return next((row for part in self._sections if (row := part.row(address))), None)

    def rows(self) -> Iterator[Mapping[Any, Any]]:
        for part in self._sections:
            yield from part.rows()

    def functions(self) -> Iterator[tuple[int, int, list[Mapping[Any, Any]]]]:
        for part in self._sections:
            yield from part.functions()

    def go_function(self, address: int) -> str:
        """Returns the name of the Go runtime function at an address; empty if there is none."""
        index = bisect.bisect_right(self._functions, (address, 1 << 64, "")) - 1
        if index < 0 or address >= self._functions[index][1]:
            return ""
        return self._functions[index][2]


def _find_offsets(dwarf: Any) -> GoOffsets | None:
    results: dict[bytes, dict[bytes, int]] = {}
    for unit in dwarf.iter_CUs():
        top = unit.get_top_DIE()
        if top.attributes["DW_AT_name"].value != b"runtime":
            continue
        for die in top.iter_children():
            if die.tag == "DW_TAG_structure_type":
                name = die.attributes["DW_AT_name"].value
                if name in (b"runtime.g", b"runtime.m"):
                    results[name] = {
                        member.attributes["DW_AT_name"].value: member.attributes[
                            "DW_AT_data_member_location"
                        ].value
                        for member in die.iter_children()
                    }
    if len(results) < 2:
        return None
    g, m = results[b"runtime.g"], results[b"runtime.m"]
    return GoOffsets(g[b"m"], g[b"stack"], g[b"sched"], m[b"curg"])
