"""Builds the table of a user file's functions from all that the file says about them.

Names come from ``.symtab`` of the file; where it leaves functions without names, as unwind
information shows, from that of its debug file, then from ``.gnu_debugdata`` (a small ELF file
packed by xz), then from the table of Go's runtime; from ``.dynsym``; and from PLT stubs. An earlier
source counts wherever a function of it is: a later one names nothing that starts inside.

Bounds of functions without names come from unwind information. No name reaches beyond the end of
its symbol; one without a size ends with its unwind entry, at the next symbol or with its section,
and without any certainty names its first byte alone.
"""

from __future__ import annotations

import logging
import lzma
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, compress
from operator import add, itemgetter
from typing import Final

from otel_kprofiler.elf import (
    MAPPING_SYMBOL,
    ElfError,
    ElfFile,
    ElfProblem,
    ImageSource,
    Section,
    Source,
    read_content,
    read_debug_elf,
    read_sections,
)
from otel_kprofiler.symbols.user.bounds import read_bounds
from otel_kprofiler.symbols.user.debug_files import DebugFile
from otel_kprofiler.symbols.user.functions import (
    MAX_RANKED,
    MAX_SPAN_BYTES,
    NO_BOUNDS,
    Alias,
    Bounds,
    FunctionTable,
    NamedCode,
    make_alias,
    sort_aliases,
)
from otel_kprofiler.symbols.user.go import read_go_symbols
from otel_kprofiler.symbols.user.stubs import Stub, read_stubs
from otel_kprofiler.symbols.user.symbol_tables import (
    SHF_EXECINSTR,
    SHT_DYNSYM,
    SHT_SYMTAB,
    STB_LOCAL,
    STT_FUNC,
    STT_NOTYPE,
    Symbols,
    SymbolTable,
    parse_symbols,
    read_table,
)

MAX_TABLE_BYTES: Final = 32 << 20
"""Of a symbol table: 1.4 million symbols, for which three seconds and 280 MB are taken."""
MAX_SECTION_BYTES: Final = 256 << 20
"""Of the names of a symbol table, or of ``.eh_frame``."""
MAX_UNPACKED_BYTES: Final = 64 << 20
"""Of what is in ``.gnu_debugdata``, and of the memory to unpack it."""
_MAX_RESOLVERS: Final = 1 << 14  # names of them; libc has some hundred
_RANKS: Final = bytes((2, 0, 1, 3)[kind >> 4 & 3] << 1 for kind in range(256))
"""By ``st_info``: global before weak before local; the lowest bit is for those without a size."""
_UNKNOWN: Final = -1
_NOWHERE: Final = 1 << 64
_STUB_KIND: Final = STB_LOCAL << 4 | STT_FUNC
_log: Final = logging.getLogger(__name__)
_NOT_NAMES: Final = re.compile(rb"\.L|" + MAPPING_SYMBOL + rb"\0")
"""Labels of assemblers, and mapping symbols."""


def read_functions(
    source: Source,
    elf: ElfFile,
    find_debug: Callable[[], DebugFile | None] = lambda: None,
    *,
    max_bytes: int = MAX_SECTION_BYTES,
) -> FunctionTable:
    """Read the functions of a file.

    Args:
        source: the file.
        elf: its headers; of a debug file alone those by :func:`read_debug_elf`.
        find_debug: opens its debug file, which the caller closes; called if the file has no
            ``.symtab``, or one that leaves functions without names.
        max_bytes: limit for each section.

    Raises:
        ElfError: a section that names functions is damaged or too large, and nothing before it
            names any.
    """
    sections = read_sections(source, elf)
    bounds = read_bounds(source, elf, sections, max_bytes) or NO_BOUNDS
    tables = _static_symbols(source, elf, sections, find_debug, bounds=bounds, max_bytes=max_bytes)
    first_dynamic = sum(len(table.values) for table in tables)
    dynamic = _read_table(source, sections, SHT_DYNSYM, max_bytes)
    if dynamic is not None:
        symbols = parse_symbols(dynamic)
        tables.append(_outside(tables, symbols))
    columns = _Columns(tables)
    columns.add_stubs(read_stubs(source, elf, sections, dynamic, max_bytes))
    code = [one for one in sections if one.flags & SHF_EXECINSTR]
    return columns.make_table(first_dynamic, code, bounds)


class _Columns:
    """Columns of symbols of several tables, unsorted."""

    def __init__(self, tables: list[Symbols]) -> None:
        first = tables[0] if tables else Symbols([], [], [], [], b"")
        self._values, self._sizes, self._kinds, self._names_at, self._names = first
        for table in tables[1:]:
            self._add(table)

    def _add(self, table: Symbols) -> None:
        if table.values:
            self._values += table.values
            self._sizes += table.sizes
            self._kinds += table.kinds
            shift = len(self._names) + 1
            self._names_at += [at + shift for at in table.names_at]
            self._names = b"\0".join((self._names, table.names))

    def add_stubs(self, stubs: list[Stub]) -> None:
        """Add PLT stubs, named after what they call."""
        resolvers = self._named({stub.resolver for stub in stubs if stub.resolver})
        names, values, sizes, names_at = bytearray(), [], [], []
        for stub in stubs:
            if name := stub.name or resolvers.get(stub.resolver):
                values.append(stub.start)
                sizes.append(stub.size)
                names_at.append(len(names))
                names += name + b"@plt\0"
        kinds = [_STUB_KIND] * len(values)
        self._add(Symbols(values, sizes, kinds, names_at, bytes(names)))

    def _named(self, addresses: set[int]) -> dict[int, bytes]:
        """The best name of each of some functions."""
        if not addresses:
            return {}
        found: dict[int, list[Alias]] = {address: [] for address in addresses}
        for index, value in enumerate(self._values):
            if value in addresses and len(found[value]) < MAX_RANKED:
                rank = _RANKS[self._kinds[index]] + (not self._sizes[index])
                found[value].append(make_alias(rank, self._names, self._names_at[index], index))
        return {value: sort_aliases(some)[0][2] for value, some in found.items() if some}

    def make_table(self, first_dynamic: int, code: list[Section], bounds: Bounds) -> FunctionTable:
        """The table of all functions.

        Args:
            first_dynamic: index of the first symbol of ``.dynsym``.
            code: sections with code.
            bounds: of functions, by unwind information.
        """
        order = sorted(range(len(self._values)), key=self._values.__getitem__)
        starts, sizes, names_at, kinds = _pick(
            order, self._values, self._sizes, self._names_at, self._kinds
        )
        ranks = bytearray(bytes(kinds).translate(_RANKS))
        if 0 in sizes:
            for at in _zeros(sizes):
                ranks[at] |= 1
            self._set_sizes(starts, sizes, order, _Limits(first_dynamic, code, bounds))
        if 0 in sizes:
            ranks = bytearray(compress(ranks, sizes))
            starts, names_at, sizes = (
                list(compress(column, sizes)) for column in (starts, names_at, sizes)
            )
        base = starts[0] if starts and starts[-1] >= MAX_SPAN_BYTES else 0
        end = bisect_left(starts, base + MAX_SPAN_BYTES)
        if sizes and max(sizes) >= MAX_SPAN_BYTES:
            sizes = [min(size, MAX_SPAN_BYTES - 1) for size in sizes]
        offsets = array("I", [start - base for start in starts[:end]] if base else starts[:end])
        columns = array("I", sizes[:end]), array("I", names_at[:end])
        named = NamedCode(offsets, *columns, self._names, bytes(ranks[:end]))
        return FunctionTable(base, named, bounds)

    def _set_sizes(
        self, starts: list[int], sizes: list[int], order: list[int], limits: _Limits
    ) -> None:
        """Give sizes to symbols without one, as far as they name code; others keep 0."""
        largest = max(sizes)
        before = reach = following = 0
        waiting = []
        for at in _zeros(sizes):
            start, index = starts[at], order[at]
            if at >= following:  # those with another start are behind us
                first = bisect_left(starts, start, following, at)
                near = bisect_left(starts, start - largest, following, first)
                before = _find_end(starts, sizes, slice(near, first), reach)
                following = bisect_right(starts, start, at)
                reach = _find_end(starts, sizes, slice(first, following), before)
            alias = reach - start  # or what lies around
            if self._kinds[index] & 0xF == STT_NOTYPE and (
                alias > 0
                or not limits.is_entry(start)
                or _NOT_NAMES.match(self._names, self._names_at[index])
            ):
                continue
            if before > start:
                sizes[at] = 1  # an entry in the middle of a function
            elif alias > 0:
                sizes[at] = alias
            else:
                waiting.append((at, following))
                sizes[at] = _UNKNOWN
        seen = end = _NOWHERE
        for at, following in waiting:
            if following != seen:
                seen = following
                stop = next((i for i in range(following, len(sizes)) if sizes[i]), None)
                end = starts[stop] if stop is not None else _NOWHERE
            sizes[at] = limits.size(starts[at], end, order[at])


class _Limits:
    """Where code of a symbol without a size ends at the latest.

    Args:
        first_dynamic: index of the first symbol of ``.dynsym``, which omits local functions.
        code: sections with code.
        bounds: of functions, by unwind information.
    """

    def __init__(self, first_dynamic: int, code: list[Section], bounds: Bounds) -> None:
        self._first_dynamic, self._bounds = first_dynamic, bounds
        self._sections = sorted((one.address, one.address + one.size) for one in code)

    def is_entry(self, start: int) -> bool:
        """Whether a label may be that of a function: it is not inside of one."""
        around = self._bounds.around(start)
        return around is None or around[0] == start

    def size(self, start: int, following: int, index: int) -> int:
        """Size of a symbol before the ``following`` one; 0 if it is in no section."""
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


def _static_symbols(
    source: Source,
    elf: ElfFile,
    sections: list[Section],
    find_debug: Callable[[], DebugFile | None],
    *,
    bounds: Bounds,
    max_bytes: int,
) -> list[Symbols]:
    """Symbols that are there for debuggers, each source in the holes of those before it."""

    def read_own() -> Symbols | None:
        return _parse(_read_table(source, sections, SHT_SYMTAB, max_bytes))

    def read_debug() -> Symbols | None:
        debug = find_debug()
        if debug is None:
            return None
        found = read_sections(debug.source, debug.elf)
        return _parse(_read_table(debug.source, found, SHT_SYMTAB, max_bytes))

    def read_packed() -> Symbols | None:
        packed = next((one for one in sections if one.name == b".gnu_debugdata"), None)
        if packed is None:
            return None
        image = ImageSource(_unpack(read_content(source, packed, max_bytes)))
        found = read_sections(image, read_debug_elf(image))
        return _parse(_read_table(image, found, SHT_SYMTAB, max_bytes))

    tables: list[Symbols] = []
    for read in (read_own, read_debug, read_packed, lambda: read_go_symbols(source, elf, sections)):
        if tables and not _have_holes(tables, bounds, sections):
            break
        try:
            symbols = read()
        except ElfError as error:
            if not tables:
                raise
            _log.info("some functions have no names: %s", error)
            continue
        if symbols is not None:
            tables.append(_outside(tables, symbols))
    return tables


def _parse(table: SymbolTable | None) -> Symbols | None:
    return parse_symbols(table) if table else None


class _Covered:
    """Where the functions of some tables are, as far as they have sizes."""

    def __init__(self, tables: list[Symbols]) -> None:
        code = sorted(
            pair for table in tables for pair in zip(table.values, table.sizes, strict=True)
        )
        self._starts = [start for start, _ in code]
        self._ends = list(accumulate((start + size for start, size in code), max))

    def __contains__(self, svma: int) -> bool:
        at = bisect_right(self._starts, svma) - 1
        return at >= 0 and svma < self._ends[at]


def _have_holes(tables: list[Symbols], bounds: Bounds, sections: list[Section]) -> bool:
    """Returns whether unwind information knows a function that no symbol is in.

    Stubs of the PLT do not count: they are named after what they call. The middle of a function
    is compared, because some entries begin a byte before their function.
    """
    starts = {bounds.base + start for start in bounds.starts}
    for table in tables:
        starts.difference_update(table.values)
    if not starts:
        return False
    covered = _Covered(tables)
    stubs = [one for one in sections if one.name.startswith(b".plt")]
    for start in starts:
        _, end = bounds.around(start) or (start, start)
        is_stub = any(one.address <= start < one.address + one.size for one in stubs)
        if not is_stub and (start + end) // 2 not in covered:
            return True
    return False


def _unpack(packed: bytes) -> bytes:
    """The content of ``.gnu_debugdata``."""
    try:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_UNPACKED_BYTES)
        content = decompressor.decompress(packed, MAX_UNPACKED_BYTES)
    except lzma.LZMAError as error:
        raise ElfError(ElfProblem.DAMAGED_SECTION, f".gnu_debugdata: {error}") from error
    if not decompressor.eof:
        raise ElfError(ElfProblem.DAMAGED_SECTION, ".gnu_debugdata is cut off or too large")
    return content


def _read_table(
    source: Source, sections: list[Section], kind: int, max_bytes: int
) -> SymbolTable | None:
    return read_table(source, sections, kind, min(max_bytes, MAX_TABLE_BYTES), max_bytes)


def _outside(tables: list[Symbols], symbols: Symbols) -> Symbols:
    """The symbols that start where no function of the tables is."""
    if not tables:
        return symbols
    taken = set().union(*(table.values for table in tables))
    new = [value not in taken for value in symbols.values]
    if True in new:
        covered = _Covered(tables)
        new = [
            is_new and value not in covered
            for is_new, value in zip(new, symbols.values, strict=True)
        ]
    return Symbols(
        list(compress(symbols.values, new)),
        list(compress(symbols.sizes, new)),
        list(compress(symbols.kinds, new)),
        list(compress(symbols.names_at, new)),
        symbols.names,
    )


def _zeros(sizes: list[int]) -> Iterator[int]:
    """Indices of zeros; each may be replaced when it is told."""
    at = -1
    for _ in range(sizes.count(0)):
        at = sizes.index(0, at + 1)
        yield at


def _find_end(starts: list[int], sizes: list[int], span: slice, before: int) -> int:
    """Where the last of some symbols ends, but not below ``before``."""
    return max(before, max(map(add, starts[span], sizes[span]), default=0))


def _pick(order: list[int], *columns: list[int]) -> Iterator[list[int]]:
    """Columns in another order."""
    if len(order) > 1:
        pick = itemgetter(*order)  # of one index it returns no tuple
        return (list(pick(column)) for column in columns)
    return ([column[at] for at in order] for column in columns)
