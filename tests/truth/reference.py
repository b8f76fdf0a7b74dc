"""An independent unwinder: pyelftools decodes the tables, all registers are followed.

It works on a copy of a thread's registers and of some of its stack, and shares no code with the
kernel program or its loader.
"""

from __future__ import annotations

import bisect
import io
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

from elftools.dwarf.callframe import FDE
from elftools.dwarf.dwarf_expr import DWARFExprParser
from elftools.elf.elffile import ELFFile

_WORD = (1 << 64) - 1
_SP, _PC = 7, 16  # x86-64
_SCRATCH = (0, 1, 2, 4, 5, 8, 9, 10, 11)
"""Registers that a call does not preserve."""


class Row(NamedTuple):
    """A decoded row of a table, and whether its frame is a signal's."""

    rules: Mapping[Any, Any]
    signal: bool


class ElfTables:
    """.eh_frame of one ELF file."""

    def __init__(self, stream: BinaryIO) -> None:
        elf = ELFFile(stream)
        self._loads = [
            (segment["p_offset"], segment["p_filesz"], segment["p_vaddr"])
            for segment in elf.iter_segments()
            if segment["p_type"] == "PT_LOAD"
        ]
        self._rows: dict[int, Row | None] = {}
        self._entries: list[tuple[int, int, int, Any]] = []
        self.expressions: Any = None
        if elf.get_section_by_name(".eh_frame"):
            dwarf = elf.get_dwarf_info(relocate_dwarf_sections=False)
            self.expressions = DWARFExprParser(dwarf.structs)
            self._entries = sorted(
                (
                    entry["initial_location"],
                    entry["initial_location"] + entry["address_range"],
                    index,
                    entry,
                )
                for index, entry in enumerate(dwarf.EH_CFI_entries())
                if isinstance(entry, FDE)
            )
        self._starts = [entry[0] for entry in self._entries]

    def address(self, offset: int) -> int | None:
        """The address of an offset in the file."""
        for start, size, address in self._loads:
            if start <= offset < start + size:
                return offset - start + address
        return None

    def row(self, address: int) -> Row | None:
        """What holds at an address; None without an entry."""
        if address not in self._rows:
            self._rows[address] = self._decode(address)
        return self._rows[address]

    def _decode(self, address: int) -> Row | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._entries[index][1]:
            return None
        entry = self._entries[index][3]
        rows = [row for row in entry.get_decoded().table if row["pc"] <= address]
        return Row(rows[-1], "S" in str(entry.cie.header.augmentation)) if rows else None


class Maps:
    """Executable mappings of a process, and the tables of their files."""

    _tables: ClassVar[dict[tuple[str, str], ElfTables | None]] = {}
    """By device and inode; files do not change while tests run."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mappings = []
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(None, 5)
            start, end = (int(part, 16) for part in fields[0].split("-"))
            name = fields[5] if len(fields) > 5 else ""
            self.mappings.append(
                (start, end, fields[1], int(fields[2], 16), name, (fields[3], fields[4]))
            )
        self._starts = [mapping[0] for mapping in self.mappings]

    @classmethod
    def forget(cls) -> None:
        """Read the files again."""
        cls._tables.clear()

    def find(self, pc: int) -> Any:
        """The executable mapping at a pc, or None."""
        index = bisect.bisect_right(self._starts, pc) - 1
        if index < 0 or pc >= self.mappings[index][1] or "x" not in self.mappings[index][2]:
            return None
        return self.mappings[index]

    def tables(self, mapping: Any) -> ElfTables | None:
        """Tables of a mapping's file."""
        start, end, _, _, name, identity = mapping
        if name == "[vdso]":
            identity = ("vdso", "")
        elif not name.startswith("/"):
            return None
        if identity not in self._tables:
            self._tables[identity] = self._read(start, end, name)
        return self._tables[identity]

    def _read(self, start: int, end: int, name: str) -> ElfTables | None:
        if name == "[vdso]":
            with open(f"/proc/{self.pid}/mem", "rb") as memory:
                memory.seek(start)
                return ElfTables(io.BytesIO(memory.read(end - start)))
        try:
            content = Path(f"/proc/{self.pid}/map_files/{start:x}-{end:x}").read_bytes()
            return ElfTables(io.BytesIO(content))
        except (OSError, AssertionError, ValueError):
            return None

    def describe(self, pc: int) -> str:
        """File and offset, for messages."""
        mapping = self.find(pc)
        if mapping is None:
            return f"?{pc:x}"
        return f"{os.path.basename(mapping[4]) or 'anonymous'}+{pc - mapping[0] + mapping[3]:x}"


class Dump(NamedTuple):
    """Registers by DWARF number, and a copy of the stack from ``base`` on."""

    registers: Sequence[int]
    base: int
    memory: bytes

    def word(self, address: int) -> int:
        """A word of the stack; raises ``LookupError`` outside of the copy."""
        at = address - self.base
        if not 0 <= at <= len(self.memory) - 8:
            raise LookupError(address)
        return int(struct.unpack_from("=Q", self.memory, at)[0])


class Truth(NamedTuple):
    """Return addresses, leaf first, and how it ended: ``end``, or why no more is known."""

    frames: list[int]
    end: str

    @property
    def complete(self) -> bool:
        """Whether the outermost frame was reached."""
        return self.end == "end"


def unwind(maps: Maps, dump: Dump, limit: int = 127) -> Truth:
    """Unwind a dump as far as tables and the copy of the stack go."""
    registers = dict(enumerate(dump.registers))
    frames, leaf = [registers[_PC]], True
    while len(frames) < limit:
        pc = registers[_PC] - (not leaf)
        mapping = maps.find(pc)
        if mapping is None:
            return Truth(frames, "no mapping")
        tables = maps.tables(mapping)
        address = tables.address(pc - mapping[0] + mapping[3]) if tables else None
        row = tables.row(address) if tables and address is not None else None
        if tables and address is not None and row is None and leaf:
            row = tables.row(address - 1) if _after_syscall(dump, maps, pc) else None
        if tables is None or row is None:
            return Truth(frames, "no entry")
        try:
            following = _caller(tables, row, registers, dump)
        except LookupError:
            return Truth(frames, "outside of the dump")
        except NotImplementedError as error:
            return Truth(frames, f"not implemented: {error}")
        if following is None or following.get(_PC, 0) == 0:
            return Truth(frames, "end")
        registers, leaf = following, row.signal
        frames.append(registers[_PC])
    return Truth(frames, "limit")


def _after_syscall(dump: Dump, maps: Maps, pc: int) -> bool:
    with open(f"/proc/{maps.pid}/mem", "rb", buffering=0) as memory:
        memory.seek(pc - 2)
        return memory.read(2) == b"\x0f\x05"


class _Frame(NamedTuple):
    """What the rules of one frame are applied to."""

    tables: ElfTables
    registers: dict[int, int]
    dump: Dump


def _caller(
    tables: ElfTables, row: Row, registers: dict[int, int], dump: Dump
) -> dict[int, int] | None:
    frame = _Frame(tables, registers, dump)
    cfa_rule = row.rules["cfa"]
    if cfa_rule.expr is not None:
        cfa = _evaluate(frame, cfa_rule.expr)
    else:
        cfa = registers[cfa_rule.reg] + cfa_rule.offset & _WORD
    found = dict(registers)
    if not row.signal:
        for register in _SCRATCH:
            found.pop(register, None)
    found[_SP] = cfa
    for register, rule in row.rules.items():
        if register in ("pc", "cfa"):
            continue
        if rule.type == "UNDEFINED":
            if register == _PC:
                return None
            found.pop(register, None)
            continue
        value = _value(frame, register, rule, cfa)
        if value is None:
            found.pop(register, None)
        else:
            found[register] = value
    return found


def _value(frame: _Frame, register: int, rule: Any, cfa: int) -> int | None:
    match rule.type:
        case "OFFSET":
            return frame.dump.word(cfa + rule.arg)
        case "VAL_OFFSET":
            return int(cfa + rule.arg)
        case "SAME_VALUE":
            return frame.registers.get(register)
        case "REGISTER":
            return frame.registers.get(rule.arg)
        case "EXPRESSION":
            return frame.dump.word(_evaluate(frame, rule.arg))
        case "VAL_EXPRESSION":
            return _evaluate(frame, rule.arg)
    raise NotImplementedError(rule.type)


def _evaluate(frame: _Frame, code: Any) -> int:
    stack: list[int] = []
    for operation in frame.tables.expressions.parse_expr(list(code)):
        name, arguments = operation.op_name.removeprefix("DW_OP_"), operation.args
        if name.startswith("breg"):
            stack.append(frame.registers[int(name[4:])] + arguments[0] & _WORD)
        elif name.startswith("lit"):
            stack.append(int(name[3:]))
        elif name == "deref":
            stack.append(frame.dump.word(stack.pop()))
        elif name == "plus_uconst":
            stack.append(stack.pop() + arguments[0] & _WORD)
        elif name in ("and", "ge", "shl", "plus"):
            right, left = stack.pop(), stack.pop()
            results = {
                "and": left & right,
                "ge": int(left >= right),
                "shl": left << min(right, 64),
                "plus": left + right,
            }
            stack.append(results[name] & _WORD)
        else:
            raise NotImplementedError(name)
    return stack[-1]
