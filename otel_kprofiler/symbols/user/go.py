"""Reads the functions and lines of Go programs from the runtime's table (``.gopclntab``).

Even stripped programs contain this table. Supported formats are those of Go 1.16, 1.18, and 1.20
and later (``pclntab`` in src/runtime/symtab.go, src/cmd/link/internal/ld/pcln.go and
src/internal/abi/symtab.go)::

    0  magic (u32), two zero bytes, code quantum, pointer size
    8  words: number of functions, number of files, start of the code (not in 1.16; unused since
       1.26), then the offsets of five sections: names, units, files, pc tables, functions

The last section, functions, starts with a table of each function's start and the offset of its
struct ``_func``. Function starts are relative to the start of the code, which is read from the
runtime's ``moduledata``. ``moduledata`` is located by searching for the table's address.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable
from itertools import count, islice, pairwise
from operator import sub
from typing import Any, Final, NamedTuple, TypeVar

from otel_kprofiler.elf import (
    ElfError,
    ElfFile,
    ElfProblem,
    FileSource,
    Section,
    Source,
    find_offset,
)
from otel_kprofiler.model import Line
from otel_kprofiler.symbols.cache import KeptValues
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.go_pc_table import PcTable
from otel_kprofiler.symbols.user.symbol_tables import COLUMN_BYTES, STB_LOCAL, STT_FUNC, Symbols

MAX_PART_BYTES: Final = 128 << 20
"""Size limit on the names section and on the functions section; enough for a million functions."""
MAX_DATA_BYTES: Final = 64 << 20
"""Size limit for the sections that may contain the runtime's ``moduledata``."""
MAX_INLINED: Final = 64
MAX_PC_TABLE_BYTES: Final = 16 * 1024
"""Size limit of a pc table. Parsing its roughly 5,000 entries takes 2 ms and 100 KB."""
_MAX_KEPT_BYTES: Final = 4 << 20
"""Memory limit for functions, pc tables and names cached from all files."""
_ENTRY_BYTES, _PC_BYTES, _CHARACTER_BYTES = 600, 10, 4
"""Bytes of memory used per cached value, per pc table byte, and per character of a name."""
_MAX_NAME_BYTES: Final = 4096
_MOST_PC_TABLES_BYTES, _MOST_NAMES_BYTES, _MOST_FUNCTIONS_BYTES = 256, 128, 128  # read initially

_T = TypeVar("_T")
_SECTIONS: Final = (b".gopclntab", b".data.rel.ro.gopclntab")
_SHT_PROGBITS, _SHF_WRITE = 1, 1
_HEADER: Final = struct.Struct("<IHBB8Q")
_FUNCTION: Final = struct.Struct("<8I")
_WORD: Final = struct.Struct("<I")
_PART_BYTES: Final = 1 << 20  # bytes read at a time
_QUANTA: Final = (1, 2, 4)
_POINTER_BYTES: Final = 8
_NO_OFFSET: Final = 0xFFFFFFFF
_SPAN_LIMIT: Final = 1 << 32
_FUNCTION_KIND: Final = STB_LOCAL << 4 | STT_FUNC

# Table indices from src/internal/abi/symtab.go
_PC_INLINED: Final = 2
_DATA_INLINED: Final = 3
_INLINED_CALL: Final = struct.Struct("<4xIIi")  # name, pc of the call, first line of the function
# Indices of words in struct moduledata (src/runtime/symtab.go)
_MODULE_NAMES, _MODULE_TEXT, _MODULE_CALLS = 1, 22, 40
_MODULE_WORDS: Final = 41


class _Format(NamedTuple):
    parts: int  # index of the header word that contains the offset of the names
    start: str  # struct format character of a start address
    count_at: int  # offset of nfuncdata in _func; pcdata offsets follow
    has_calls: bool  # whether inlined calls have the format of ``_INLINED_CALL``


_FORMATS: Final = {
    0xFFFFFFFA: _Format(2, "Q", 43, has_calls=False),
    0xFFFFFFF0: _Format(3, "I", 39, has_calls=False),
    0xFFFFFFF1: _Format(3, "I", 43, has_calls=True),
}


class _Function(NamedTuple):
    """Fields of a struct ``_func``. The offset of a missing pc table is 0."""

    name_at: int
    files: int
    lines: int
    unit: int
    inlined: int  # PCDATA table of inlined calls
    calls: int | None  # file offset of the inlined calls


_NUMBERS: Final = count()
_KEPT: Final = KeptValues[tuple[Any, ...], Any](_MAX_KEPT_BYTES)


class _Module(NamedTuple):
    text: int  # start of the code (SVMA)
    calls: int | None  # SVMA that the offsets of inlined calls are relative to


def find_go_section(sections: list[Section]) -> Section | None:
    """Returns the section with a Go table; None if the file is not a Go program."""
    return next((section for section in sections if section.name in _SECTIONS), None)


class GoTable:
    """The function table of a Go program. Not thread-safe.

    Raises:
        ElfError: the table is malformed or too large. The ``problem`` attribute is ``NO_SECTION``
            if the table's version is unsupported, or if the start address of the code is unknown.
    """

    def __init__(
        self,
        source: Source,
        elf: ElfFile,
        sections: list[Section],
        section: Section,
        budget: ReadingBudget | None = None,
    ) -> None:
        self._source, self._elf = source, elf
        self._budget = budget or ReadingBudget()
        self._at, self._size = section.offset, section.size
        magic, zeros, self._quantum, pointer, *words = _HEADER.unpack(self._read(0, _HEADER.size))
        form = _FORMATS.get(magic)
        if form is None or zeros or self._quantum not in _QUANTA or pointer != _POINTER_BYTES:
            raise ElfError(
                ElfProblem.NO_SECTION,
                f"unsupported .gopclntab: magic {magic:#x}, quantum {self._quantum}, pointer size "
                f"{pointer}",
            )
        self._form = form
        self._number = next(_NUMBERS)
        parts = words[form.parts : form.parts + 5]
        if max(parts) > self._size:
            raise _damaged("a part is out of bounds")
        self._names, self._units, self._files, self._pc_tables, self._functions = parts
        self._starts, self._structs = self._read_starts(words[0])
        self._module = _Module(0, None)
        if form.start == "I":
            self._module = self._find_module(sections, section.address)

    @property
    def nbytes(self) -> int:
        """Returns the memory used by the table, in bytes, excluding the shared cache."""
        return sys.getsizeof(self._starts) + sys.getsizeof(self._structs)

    def symbols(self) -> Symbols:
        """Returns the functions. Each function extends to the start of the next one."""
        text = self._module.text
        at = self._functions
        functions_bytes = max(self._structs) + self._form.count_at + 1
        names_bytes = self._part_end(self._names) - self._names
        self._budget.take(
            functions_bytes + names_bytes + COLUMN_BYTES * len(self._structs), ".gopclntab"
        )
        functions = self._read(at, functions_bytes)
        names = self._read(self._names, names_bytes)
        field = struct.calcsize(self._form.start)
        names_at = array("I", (_WORD.unpack_from(functions, at + field)[0] for at in self._structs))
        if max(names_at, default=0) >= len(names):
            raise _damaged("a name is out of bounds")
        sizes = array("Q", map(sub, islice(self._starts, 1, None), self._starts))
        starts = array("Q", (text + start for start in islice(self._starts, len(sizes))))
        return Symbols(starts, sizes, bytes([_FUNCTION_KIND]) * len(starts), names_at, names)

    def lookup(self, svma: int) -> tuple[Line, ...]:
        """Returns the functions at an address, innermost inlined first; empty if not found.

        Raises ``ElfError`` if the file is malformed or no longer readable.
        """
        pc = svma - self._module.text
        index = bisect_right(self._starts, pc) - 1
        if not 0 <= index < len(self._structs):
            return ()
        function = self._keep(self._read_function, self._structs[index])
        pc -= self._starts[index]
        lines: list[Line] = []
        call = self._pc_value(function.inlined, pc)
        while call >= 0 and len(lines) < MAX_INLINED:
            if function.calls is None:  # the inlined function is unknown
                return (Line(self._keep(self._read_text, self._names + function.name_at)),)
            at = function.calls + call * _INLINED_CALL.size
            name_at, caller, _ = _INLINED_CALL.unpack(self._source.read(at, _INLINED_CALL.size))
            lines.append(self._line(function, name_at, pc))
            pc = caller
            call = self._pc_value(function.inlined, pc)
        lines.append(self._line(function, function.name_at, pc))
        return tuple(lines)

    def _line(self, function: _Function, name_at: int, pc: int) -> Line:
        file = self._pc_value(function.files, pc)
        line = self._pc_value(function.lines, pc)
        path = ""
        if file >= 0 and function.unit != _NO_OFFSET:
            path = self._keep(self._read_path, function.unit + file)
        return Line(
            self._keep(self._read_text, self._names + name_at),
            "",
            path,
            max(line, 0) if path else 0,
        )

    def _read_starts(self, count: int) -> tuple[array[int], array[int]]:
        """Returns (function starts with the end of the last function appended, struct offsets)."""
        form = self._form.start
        size = (2 * count + 1) * struct.calcsize(form)
        if not count or size > MAX_PART_BYTES:
            raise _damaged(f"{count} is not a valid number of functions")
        # the raw bytes, the array, and the array's two columns
        self._budget.take(3 * size, ".gopclntab")
        columns = array(form, self._read(self._functions, size))
        starts, structs = columns[0::2], columns[1::2]
        if any(low > high for low, high in pairwise(starts)):
            raise _damaged("functions are not sorted by address")
        if starts[-1] - starts[0] >= _SPAN_LIMIT or max(structs) > MAX_PART_BYTES:
            raise _damaged("functions are out of bounds")
        return starts, structs

    def _read_function(self, at: int) -> _Function:
        count_at = self._form.count_at
        at += self._functions
        data = self._read_most(at, _MOST_FUNCTIONS_BYTES)
        try:
            fields = _FUNCTION.unpack_from(data, struct.calcsize(self._form.start))
            name_at, _, _, _, files, lines, count, unit = fields
            inlined, calls = 0, None
            if count > _PC_INLINED:
                (inlined,) = _WORD.unpack_from(data, count_at + 1 + 4 * _PC_INLINED)
            if inlined and self._module.calls is not None and data[count_at] > _DATA_INLINED:
                offset = self._word(at + count_at + 1 + 4 * (count + _DATA_INLINED))
                if offset != _NO_OFFSET:
                    address = self._module.calls + offset
                    calls = find_offset(self._elf.loads, address, _INLINED_CALL.size)
        except (struct.error, IndexError) as error:
            raise _damaged("a function is truncated") from error
        return _Function(name_at, files, lines, unit, inlined, calls)

    def _pc_value(self, table: int, target: int) -> int:
        """Returns a pc table's value at an offset in the function; -1 if there is no value."""
        if not table:
            return -1
        place = target // self._quantum
        try:
            return self._keep(self._read_pc_table, table, _MOST_PC_TABLES_BYTES).find(place)
        except StopIteration:
            pass  # the table is longer than the first read
        try:
            return self._keep(self._read_pc_table, table, MAX_PC_TABLE_BYTES).find(place)
        except StopIteration as error:
            raise _damaged("a pc table has no end") from error

    def _keep(self, read: Callable[..., _T], *place: int) -> _T:
        """Returns a value from the cache shared by all files, or reads and caches the value."""
        key = (self._number, read.__name__, *place)
        value: _T | None = _KEPT.get(key)
        if value is None:
            value = read(*place)
            size = _CHARACTER_BYTES * len(value) if isinstance(value, str) else 0
            if isinstance(value, PcTable):
                size = _PC_BYTES * place[-1]
            _KEPT.put(key, value, _ENTRY_BYTES + size)
        return value

    def _read_pc_table(self, table: int, size: int) -> PcTable:
        return PcTable(self._read_most(self._pc_tables + table, size))

    def _find_module(self, sections: list[Section], address: int) -> _Module:
        """Finds ``moduledata``, which begins with the addresses of the table and of its names."""
        wanted = struct.pack("<QQ", address, address + self._names)
        left = MAX_DATA_BYTES
        for section in sections:
            if section.kind != _SHT_PROGBITS or not section.flags & _SHF_WRITE:
                continue
            left -= section.size
            if left < 0:
                break
            words = self._find_words(section, wanted)
            if words:
                calls = words[_MODULE_CALLS] if self._form.has_calls else None
                return _Module(words[_MODULE_TEXT], calls)
        raise ElfError(ElfProblem.NO_SECTION, "the start address of the Go code is unknown")

    def _find_words(self, section: Section, wanted: bytes) -> tuple[int, ...]:
        size = 8 * _MODULE_WORDS
        for at in range(0, section.size, _PART_BYTES):
            part = min(_PART_BYTES + size - 1, section.size - at)
            data = self._source.read(section.offset + at, part)
            position = data.find(wanted)
            if 0 <= position <= len(data) - size:
                return struct.unpack_from(f"<{_MODULE_WORDS}Q", data, position)
        return ()

    def _part_end(self, start: int) -> int:
        parts = (self._units, self._files, self._pc_tables, self._functions)
        end = min((part for part in parts if part > start), default=self._size)
        if end - start > MAX_PART_BYTES:
            raise _damaged(f"the names take {end - start} bytes, more than the limit")
        return end

    def _read(self, at: int, size: int) -> bytes:
        if not 0 <= at <= self._size - size:
            raise _damaged(f"{size} bytes at {at} exceed the size of {self._size}")
        return self._source.read(self._at + at, size)

    def _read_most(self, at: int, size: int) -> bytes:
        """Reads ``size`` bytes, or fewer at the end of the table."""
        size = min(size, self._size - at)
        if at < 0 or size < 0:
            raise _damaged(f"a part at {at} exceeds the size of {self._size}")
        return self._source.read(self._at + at, size)

    def _word(self, at: int) -> int:
        return int.from_bytes(self._read(at, 4), "little")

    def _read_path(self, index: int) -> str:
        at = self._word(self._units + 4 * index)
        return self._read_text(self._files + at) if at != _NO_OFFSET else ""

    def _read_text(self, at: int) -> str:
        for size in (_MOST_NAMES_BYTES, _MAX_NAME_BYTES):
            data = self._read_most(at, size)
            if b"\0" in data:
                break
        return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


class GoLines(GoTable):
    """Source lines and inlined calls of a Go program. Thread-safe.

    For Go before 1.20, inlined code is attributed to the function that contains it, without a line.
    Duplicates the file's descriptor; raises ``OSError`` on failure.
    """

    def __init__(
        self,
        source: FileSource,
        elf: ElfFile,
        sections: list[Section],
        section: Section,
        budget: ReadingBudget | None = None,
    ) -> None:
        self._fd = os.dup(source.fd)
        self._lock = threading.Lock()
        try:
            source = FileSource(self._fd, source.size)
            super().__init__(source, elf, sections, section, budget)
        except BaseException:
            self.close()
            raise

    def lookup(self, svma: int) -> tuple[Line, ...]:
        """Returns the functions at an address; empty if the file is malformed or closed."""
        with self._lock:
            if self._fd < 0:
                return ()
            try:
                return super().lookup(svma)
            except ElfError:
                return ()

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()


def read_go_symbols(
    source: Source, elf: ElfFile, sections: list[Section], budget: ReadingBudget
) -> Symbols | None:
    """Reads the functions in a Go program; None for other programs and unsupported Go versions.

    Raises ``ElfError`` if the program's table is malformed, too large, or exceeds the budget.
    """
    section = find_go_section(sections)
    if section is None:
        return None
    try:
        return GoTable(source, elf, sections, section, budget).symbols()
    except ElfError as error:
        if error.problem is not ElfProblem.NO_SECTION:
            raise
        return None


def _damaged(what: str) -> ElfError:
    return ElfError(ElfProblem.DAMAGED_SECTION, f"in .gopclntab, {what}")
