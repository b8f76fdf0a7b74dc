"""Reads a binary's symbols from one source after another, until all functions have names."""

import logging
import lzma
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate, chain, compress, islice
from operator import add
from typing import Final

from otel_kprofiler.elf import (
    ElfError,
    ElfFile,
    ElfProblem,
    ImageSource,
    Section,
    Source,
    read_debug_elf,
    read_sections,
)
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.debug_files import DebugFile
from otel_kprofiler.symbols.user.functions import Bounds
from otel_kprofiler.symbols.user.go import read_go_symbols
from otel_kprofiler.symbols.user.symbol_tables import (
    SHT_SYMTAB,
    Symbols,
    SymbolTable,
    parse_symbols,
    pick,
    read_table,
    sort_bytes,
    sort_symbols,
)

MAX_UNPACKED_BYTES: Final = 64 << 20
"""Size limit of the decompressed ``.gnu_debugdata``, and of the memory for decompressing it."""
_UNPACKING: Final = 2.25
"""Memory for the decompression dictionary and the output, per byte of the size limit."""
_PIECE_BYTES: Final = 256 << 10
_LARGEST: Final = (1 << 64) - 1
_PART: Final = 1 << 15  # functions compared per step
_COVERED_BYTES: Final = 28
"""Memory used by a symbol while :class:`_Covered` is built."""
_VALUE_BYTES: Final = 160
"""Memory used by a symbol's address in two Python sets."""
_log: Final = logging.getLogger(__name__)


class StaticSymbols:
    """Reads ``.symtab``, the debug file, ``.gnu_debugdata`` and Go's table until no gap is left."""

    def __init__(
        self,
        source: Source,
        elf: ElfFile,
        sections: list[Section],
        max_bytes: int,
        budget: ReadingBudget,
    ) -> None:
        self._source, self._elf, self._sections = source, elf, sections
        self._max_bytes, self._budget = max_bytes, budget

    def read(self, find_debug: Callable[[], DebugFile | None], bounds: Bounds) -> list[Symbols]:
        """Returns each source's symbols. Raises ``ElfError`` if the first source is unreadable."""
        tables: list[Symbols] = []
        reads: tuple[Callable[[], Symbols | None], ...] = (
            lambda: self._read_table(self._source, self._sections),
            lambda: self._read_debug(find_debug()),
            self._read_packed,
            lambda: read_go_symbols(self._source, self._elf, self._sections, self._budget),
        )
        for read in reads:
            left_at_start = self._budget.left_bytes
            try:
                if tables and not _have_holes(tables, bounds, self._sections, self._budget):
                    break
                symbols = read()
                if symbols is not None:
                    tables.append(find_outside(tables, symbols, self._budget))
            except ElfError as error:
                if not tables:
                    raise
                self._budget.give_back(left_at_start - self._budget.left_bytes)
                _log.info("some functions have no names: %s", error)
        return tables

    def _read_table(self, source: Source, sections: list[Section]) -> Symbols | None:
        return self._parse(read_table(source, sections, SHT_SYMTAB, self._max_bytes, self._budget))

    def _parse(self, table: SymbolTable | None) -> Symbols | None:
        if table is None:
            return None
        symbols = parse_symbols(table, self._budget)
        self._budget.give_back(len(table.content))
        if symbols.names is not table.names:
            self._budget.give_back(len(table.names))
        return symbols

    def _read_debug(self, debug: DebugFile | None) -> Symbols | None:
        if debug is None:
            return None
        return self._read_table(debug.source, read_sections(debug.source, debug.elf))

    def _read_packed(self) -> Symbols | None:
        packed = next(
            (section for section in self._sections if section.name == b".gnu_debugdata"), None
        )
        if packed is None:
            return None
        content = self._budget.read_content(self._source, packed, self._max_bytes)
        unpacked = _unpack(content, self._budget)
        self._budget.give_back(len(content))
        del content
        image = ImageSource(unpacked)
        sections = read_sections(image, read_debug_elf(image))
        table = read_table(image, sections, SHT_SYMTAB, self._max_bytes, self._budget)
        self._budget.give_back(len(unpacked))
        return self._parse(table)


class _Covered:
    def __init__(self, tables: list[Symbols]) -> None:
        starts, sizes = array("Q"), array("Q")
        for table in tables:
            starts += table.values
            sizes += table.sizes
        order = sort_symbols(starts)
        self.starts = starts = pick(order, starts)
        sizes = pick(order, sizes)
        del order
        ends = (min(add(*pair), _LARGEST) for pair in zip(starts, sizes, strict=True))
        self._ends = array("Q", accumulate(ends, max))

    def __contains__(self, svma: int) -> bool:
        at = bisect_right(self.starts, svma) - 1
        return at >= 0 and svma < self._ends[at]


def _covered_bytes(tables: list[Symbols]) -> int:
    count = sum(len(table.values) for table in tables)
    return _COVERED_BYTES * count + sort_bytes(count)


def _have_holes(
    tables: list[Symbols], bounds: Bounds, sections: list[Section], budget: ReadingBudget
) -> bool:
    """Returns whether a function in the unwind information, other than a PLT stub, has no symbol.

    Looks up the middle of each function, because some entries begin a byte before the function.
    """
    if not bounds.starts:
        return False
    with budget.hold(_covered_bytes(tables), "its symbols"):
        covered = _Covered(tables)
        stubs = [section for section in sections if section.name.startswith(b".plt")]
        for at in range(0, len(bounds.starts), _PART):
            starts = {bounds.base + start for start in bounds.starts[at : at + _PART]}
            first = bisect_left(covered.starts, min(starts))
            last = bisect_right(covered.starts, max(starts))
            starts.difference_update(islice(covered.starts, first, last))
            for start in starts:
                _, end = bounds.around(start) or (start, start)
                is_stub = any(stub.address <= start < stub.address + stub.size for stub in stubs)
                if not is_stub and (start + end) // 2 not in covered:
                    return True
    return False


def _unpack(packed: bytes, budget: ReadingBudget) -> bytearray:
    memory = most = min(MAX_UNPACKED_BYTES, int(budget.left_bytes / _UNPACKING))
    content, rest = bytearray(), memoryview(packed)
    try:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memory)
        while not decompressor.eof and len(content) <= most:
            part = rest[:_PIECE_BYTES] if decompressor.needs_input else b""
            if decompressor.needs_input and not part:
                raise ElfError(ElfProblem.DAMAGED_SECTION, ".gnu_debugdata is truncated")
            rest = rest[len(part) :]
            # Decompressing everything in one call would hold two copies of the result while joining
            # its chunks.
            content += decompressor.decompress(part, _PIECE_BYTES)
    except (lzma.LZMAError, MemoryError) as error:
        raise ElfError(ElfProblem.DAMAGED_SECTION, f".gnu_debugdata: {error}") from error
    if len(content) > most:
        budget.take(int(len(content) * _UNPACKING) + 1, ".gnu_debugdata")
        raise ElfError(ElfProblem.TOO_LARGE, f".gnu_debugdata is larger than {most} bytes")
    budget.take(len(content), ".gnu_debugdata")
    return content


def find_outside(tables: list[Symbols], symbols: Symbols, budget: ReadingBudget) -> Symbols:
    """Returns the symbols that start outside all functions in the tables."""
    if not tables:
        return symbols
    taken_bytes = _VALUE_BYTES * len(symbols.values) + _covered_bytes(tables)
    with budget.hold(taken_bytes, "its symbols"):
        values = set(symbols.values)
        taken = values.intersection(chain.from_iterable(table.values for table in tables))
        new = bytearray(value not in taken for value in symbols.values)
        if 1 in new:
            covered = _Covered(tables)
            new = bytearray(
                is_new and value not in covered
                for is_new, value in zip(new, symbols.values, strict=True)
            )
        return Symbols(
            array("Q", compress(symbols.values, new)),
            array("Q", compress(symbols.sizes, new)),
            bytes(compress(symbols.kinds, new)),
            array("I", compress(symbols.names_at, new)),
            symbols.names,
        )
