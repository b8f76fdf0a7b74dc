"""Builds the function table of a user-space binary from all its sources of names.

The sources are ``.symtab``, ``.dynsym`` and PLT stubs, in this order. If unwind information shows
functions without names, ``.symtab`` is followed by the debug file's ``.symtab``, ``.gnu_debugdata``
(an ELF file compressed with xz), and the Go runtime's table. Later sources do not name code inside
functions from earlier sources.

A symbol without a size ends at the end of its unwind entry, at the next symbol or at the end of its
section, whichever comes first. A symbol whose end is uncertain names only its first byte.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import compress, islice
from operator import add
from typing import Final

from otel_kprofiler.elf import MAPPING_SYMBOL, ElfFile, Section, Source, read_sections
from otel_kprofiler.symbols.user.bounds import read_bounds
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.columns import NamedCode
from otel_kprofiler.symbols.user.debug_files import DebugFile
from otel_kprofiler.symbols.user.functions import (
    MAX_RANKED,
    MAX_SPAN_BYTES,
    NO_BOUNDS,
    Alias,
    Bounds,
    FunctionTable,
    make_alias,
    sort_aliases,
)
from otel_kprofiler.symbols.user.static_symbols import StaticSymbols, find_outside
from otel_kprofiler.symbols.user.stubs import Stub, read_stubs
from otel_kprofiler.symbols.user.symbol_tables import (
    SHF_EXECINSTR,
    SHT_DYNSYM,
    STB_LOCAL,
    STT_FUNC,
    STT_NOTYPE,
    Symbols,
    parse_symbols,
    pick,
    read_table,
    sort_bytes,
    sort_symbols,
)

MAX_SECTION_BYTES: Final = 256 << 20
"""Size limit for the names in a symbol table, and for ``.eh_frame``."""
_LARGEST_WORD: Final = (1 << 32) - 1
_SORTED_BYTES: Final = 20
"""Memory used per symbol while the table is built, excluding the table's columns."""
_ALIAS_BYTES: Final = 200
_WANTED_BYTES: Final = 160
"""Bytes used by each alias, excluding its name, and by each address that has aliases."""
_RANKS: Final = bytes((2, 0, 1, 3)[kind >> 4 & 3] << 1 for kind in range(256))
"""Rank by ``st_info``: global first, local last. The lowest bit marks symbols without a size."""
_UNKNOWN: Final = 1  # placeholder until the last step, which sets the sizes
_NOWHERE: Final = 1 << 64
_STUB_KIND: Final = STB_LOCAL << 4 | STT_FUNC
_NO_SYMBOLS: Final = Symbols(array("Q"), array("Q"), b"", array("I"), b"")
_NOT_NAMES: Final = re.compile(rb"\.L|" + MAPPING_SYMBOL + rb"\0")
"""Pattern for symbols that are not functions: assembler labels and mapping symbols."""


def read_functions(
    source: Source,
    elf: ElfFile,
    find_debug: Callable[[], DebugFile | None] = lambda: None,
    *,
    max_bytes: int = MAX_SECTION_BYTES,
    budget: ReadingBudget | None = None,
) -> FunctionTable:
    """Reads the functions in a file.

    ``elf`` comes from :func:`read_debug_elf` if the file is only a debug file. ``find_debug`` opens
    the file's debug file, which the caller closes. ``find_debug`` is called only if ``.symtab`` is
    missing or does not name all functions. ``max_bytes`` limits the size of each section.

    Raises:
        ElfError: a section is malformed or too large, or exceeds the budget. Debug symbols that
            cannot be read are omitted if an earlier source has names.
    """
    budget = budget or ReadingBudget()
    sections = read_sections(source, elf)
    bounds = read_bounds(source, elf, sections, max_bytes, budget) or NO_BOUNDS
    reader = StaticSymbols(source, elf, sections, max_bytes, budget)
    tables = reader.read(find_debug, bounds)
    first_dynamic = sum(len(table.values) for table in tables)
    dynamic = read_table(source, sections, SHT_DYNSYM, max_bytes, budget)
    if dynamic is not None:
        tables.append(find_outside(tables, parse_symbols(dynamic, budget), budget))
    columns = _Columns(tables, budget)
    del tables
    columns.add_stubs(read_stubs(source, elf, sections, dynamic, max_bytes, budget=budget))
    code = [section for section in sections if section.flags & SHF_EXECINSTR]
    return columns.make_table(first_dynamic, code, bounds)


class _Columns:
    def __init__(self, tables: list[Symbols], budget: ReadingBudget) -> None:
        self._budget = budget
        first = tables[0] if tables else _NO_SYMBOLS
        self._values, self._sizes, self._kinds, self._names_at, self._names = first
        for table in tables[1:]:
            self._add(table)

    def _add(self, table: Symbols) -> None:
        if table.values:
            shift = len(self._names) + 1
            self._budget.take(shift + len(table.names), "its names")
            self._values += table.values
            self._sizes += table.sizes
            self._kinds += table.kinds
            self._names_at.extend(min(at + shift, _LARGEST_WORD) for at in table.names_at)
            self._names = b"\0".join((self._names, table.names))
            self._budget.give_back(shift)

    def add_stubs(self, stubs: list[Stub]) -> None:
        resolvers = self._named({stub.resolver for stub in stubs if stub.resolver})
        names, values, sizes, names_at = bytearray(), array("Q"), array("Q"), array("I")
        for stub in stubs:
            if name := stub.name or resolvers.get(stub.resolver):
                values.append(stub.start)
                sizes.append(stub.size)
                names_at.append(len(names))
                names += name + b"@plt\0"
        kinds = bytes([_STUB_KIND]) * len(values)
        self._add(Symbols(values, sizes, kinds, names_at, names))

    def _named(self, addresses: set[int]) -> dict[int, bytes]:
        if not addresses:
            return {}
        self._budget.take(_WANTED_BYTES * len(addresses), "its PLT")
        aliases: dict[int, list[Alias]] = {address: [] for address in addresses}
        for index, value in enumerate(self._values):
            if value in addresses and len(aliases[value]) < MAX_RANKED:
                rank = _RANKS[self._kinds[index]] + (not self._sizes[index])
                alias = make_alias(rank, self._names, self._names_at[index], index)
                self._budget.take(_ALIAS_BYTES + len(alias[2]), "names of PLT targets")
                aliases[value].append(alias)
        return {value: sort_aliases(some)[0][2] for value, some in aliases.items() if some}

    def make_table(self, first_dynamic: int, code: list[Section], bounds: Bounds) -> FunctionTable:
        """Builds the table; symbols from ``first_dynamic`` on are from ``.dynsym``."""
        taken = _SORTED_BYTES * len(self._values) + sort_bytes(len(self._values))
        with self._budget.hold(taken, "its symbols"):
            return self._make_table(first_dynamic, code, bounds)

    def _make_table(self, first_dynamic: int, code: list[Section], bounds: Bounds) -> FunctionTable:
        order = sort_symbols(self._values)
        starts = pick(order, self._values)
        self._values = array("Q")
        sizes = pick(order, self._sizes)
        self._sizes = array("Q")
        names_at = pick(order, self._names_at)
        ranks = bytearray(self._kinds.translate(_RANKS))
        ranks = bytearray(map(ranks.__getitem__, order))
        if 0 in sizes:
            for at in _zeros(sizes):
                ranks[at] |= 1
            self._set_sizes(starts, sizes, order, _Limits(first_dynamic, code, bounds))
        if 0 in sizes:
            ranks = bytearray(compress(ranks, sizes))
            starts, names_at, sizes = (
                array(column.typecode, compress(column, sizes))
                for column in (starts, names_at, sizes)
            )
        base = starts[0] if starts and starts[-1] >= MAX_SPAN_BYTES else 0
        end = bisect_left(starts, base + MAX_SPAN_BYTES)
        if sizes and max(sizes) >= MAX_SPAN_BYTES:
            sizes = array("Q", (min(size, MAX_SPAN_BYTES - 1) for size in sizes))
        kept = islice(starts, end)
        offsets = array("I", (start - base for start in kept) if base else kept)
        del starts
        columns = array("I", islice(sizes, end)), names_at[:end]
        named = NamedCode(offsets, *columns, self._names, bytes(ranks[:end]))
        return FunctionTable(base, named, bounds)

    def _set_sizes(
        self, starts: array[int], sizes: array[int], order: array[int], limits: _Limits
    ) -> None:
        """Set the sizes of symbols that name code but have size 0."""
        largest = max(sizes)
        end_before = reach = following = 0
        waiting, followed = array("I"), array("I")
        for at in _zeros(sizes):
            start, index = starts[at], order[at]
            if at >= following:  # the first symbol at this start address
                first = bisect_left(starts, start, following, at)
                near = bisect_left(starts, start - largest, following, first)
                end_before = _find_end(starts, sizes, slice(near, first), reach)
                following = bisect_right(starts, start, at)
                reach = _find_end(starts, sizes, slice(first, following), end_before)
            alias = reach - start  # to the end of the longest alias or enclosing symbol
            if self._kinds[index] & 0xF == STT_NOTYPE and (
                alias > 0
                or not limits.is_entry(start)
                or _NOT_NAMES.match(self._names, self._names_at[index])
            ):
                continue
            if end_before > start:
                sizes[at] = 1  # a symbol in the middle of a function
            elif alias > 0:
                sizes[at] = alias
            else:
                waiting.append(at)
                followed.append(following)
                sizes[at] = _UNKNOWN
        seen = end = _NOWHERE
        for at, following in zip(waiting, followed, strict=True):
            if following != seen:
                seen = following
                stop = next((i for i in range(following, len(sizes)) if sizes[i]), None)
                end = starts[stop] if stop is not None else _NOWHERE
            sizes[at] = limits.size(starts[at], end, order[at])


class _Limits:
    """Upper bounds for the ends of symbols without a size.

    Symbols from ``first_dynamic`` on are from ``.dynsym``, which omits local functions.
    """

    def __init__(self, first_dynamic: int, code: list[Section], bounds: Bounds) -> None:
        self._first_dynamic, self._bounds = first_dynamic, bounds
        self._sections = sorted(
            (section.address, section.address + section.size) for section in code
        )

    def is_entry(self, start: int) -> bool:
        around = self._bounds.around(start)
        return around is None or around[0] == start

    def size(self, start: int, following: int, index: int) -> int:
        """Returns the size of a symbol that must end by ``following``; 0 outside code sections."""
        at = bisect_right(self._sections, (start, _NOWHERE)) - 1
        if at < 0 or start >= self._sections[at][1]:
            return 0
        end = min(following, self._sections[at][1])
        around = self._bounds.around(start)
        if around:
            return min(end, around[1]) - start
        if index >= self._first_dynamic:
            return 1
        return min(end, self._bounds.next_start(start) or end) - start


def _zeros(sizes: array[int]) -> Iterator[int]:
    """Yields the indices of zeros. The caller may replace each zero after receiving its index."""
    at = -1
    for _ in range(sizes.count(0)):
        at = sizes.index(0, at + 1)
        yield at


def _find_end(starts: array[int], sizes: array[int], span: slice, end_before: int) -> int:
    return max(end_before, max(map(add, starts[span], sizes[span]), default=0))
