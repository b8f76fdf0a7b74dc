"""Lookups in function tables return the same results as a linear search."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.symbols.user.bounds import make_bounds
from otel_kprofiler.symbols.user.functions import Function
from otel_kprofiler.symbols.user.symbol_tables import SymbolTable, parse_symbols
from tests.unit.symbols.user.function_tables import make_table
from tests.unit.symbols.user.hostile_files import CIE

NAMES = st.sampled_from(["", "f", "fo", "foo", "é"])
BASES = st.sampled_from([0, 0x1000, 0x400000, 0xFFFF_F000, (1 << 47) - 0x1000])


ROWS = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40), NAMES), max_size=14)


@st.composite
def functions(draw):
    base = draw(BASES)
    return [Function(base + start, base + start + size, name) for start, size, name in draw(ROWS)]


def innermost(rows, address):
    """Returns the function with the highest start at an address; shorter names break ties."""
    around = [row for row in rows if row.start <= address < row.end]
    return min(around, key=lambda row: (-row.start, len(row.name.encode()), row.name), default=None)


def expected(rows, address):
    ordered = sorted(rows, key=lambda row: (row.start, -row.end))
    named = [row for row in ordered if row.name]
    if result := innermost(named, address):
        return result
    bounds = [row for row in ordered if not row.name and row.start <= address]
    if not bounds or bounds[-1].end <= address:
        return None
    start, end, _ = bounds[-1]
    return Function(
        max([start, *(row.end for row in named if row.end <= address)]),
        min([end, *(row.start for row in ordered if row.start > address)]),
        "",
    )


@given(functions())
def test_function_lookups_by_address_match_brute_force(rows):
    table = make_table(rows)
    for address in {row.start + step for row in rows for step in range(-2, 45)} | {0, 1 << 63}:
        assert table.lookup(address) == expected(rows, address), hex(address)


@given(functions(), st.sampled_from(["f", "fo", "foo", "é", "o", "oo", "foo\0", "\0", ""]))
def test_searches_for_functions_by_name_match_brute_force(rows, name):
    table = make_table(rows)
    assert len(table) == sum(bool(row.name) for row in rows)
    assert sorted(table.find(name)) == sorted({row for row in rows if row.name == name != ""})
    for row in rows:
        assert set(table.names_at(row.start)) == {
            other.name for other in rows if other.start == row.start and other.name
        }


@given(
    st.lists(
        st.tuples(
            st.integers(0, 255),
            st.integers(0, 255),
            st.sampled_from([0, 1, 5, 255, 256, 261, 0xFFF1]),
            st.integers(0, (1 << 64) - 1),
            st.integers(0, (1 << 64) - 1),
        ),
        max_size=8,
    ),
    st.sets(st.sampled_from([1, 5, 256, 261, 0x1FF])),
)
def test_parsed_symbol_columns_match_the_table(entries, code):
    rows = [(at, *entry) for at, entry in enumerate(entries)]
    content = b"".join(struct.pack("<IBBHQQ", *row) for row in rows)
    symbols = parse_symbols(SymbolTable(content, b"\0", frozenset(code)))
    picked = [row for row in rows if row[1] & 15 in (0, 2, 10) and row[3] in code]
    columns = symbols.values, symbols.sizes, symbols.kinds, symbols.names_at
    assert list(zip(*columns, strict=True)) == [
        (value, size, kind, at) for at, kind, _, _, value, size in picked
    ]


@given(
    st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=9),
    st.integers(-0x40, 0x40).map(lambda step: step * 4),
    st.randoms(use_true_random=False),
)
def test_function_sizes_from_search_tables_match_brute_force(sizes, distance, rng):
    entries, frames = [], bytearray(CIE)
    for size in sizes:
        frames += bytes(4 * rng.randrange(3))
        entries.append(len(frames))
        frames += struct.pack("<IIiI", 12, len(frames) + 4, 0, size)
    address, origin = 0x1000, 0x1000 + distance
    rows = list(zip(range(len(sizes)), entries, sizes, strict=True))
    pairs = b"".join(struct.pack("<ii", start, at + address - origin) for start, at, _ in rows)
    bounds = make_bounds(pairs, origin, bytes(frames), address)
    assert (bounds.base, [*bounds.starts], [*bounds.sizes]) == (origin, [*range(len(sizes))], sizes)
