"""Symbol tables agree with a linear search, for generated, hostile and captured kallsyms."""

import lzma
import os
import random
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.symbols.kernel import kallsyms
from otel_kprofiler.symbols.kernel.kallsyms import parse_kallsyms
from otel_kprofiler.symbols.kernel.names import alias_rank, is_marker
from otel_kprofiler.symbols.kernel.table import MAX_FUNCTION_BYTES

BASE = 0xFFFF_FFFF_8100_0000
PAD = 16


class Oracle:
    """Names an address by scanning a sorted list of (address, type, name)."""

    def __init__(self, symbols):
        self.symbols = symbols

    def lookup(self, address):
        below = [s for s in self.symbols if s[0] <= address]
        if not below:
            return None
        start = below[-1][0]
        here = [s for s in below if s[0] == start]
        functions = [s for s in here if is_function(s)]
        if any(map(is_pad, here)):
            start += PAD
            functions = [s for s in self.symbols if s[0] == start and is_function(s)]
        if not functions or address - start >= MAX_FUNCTION_BYTES:
            return None
        name = min((alias_rank(ord(k), n.encode()), n) for _, k, n in functions)[1]
        return None if is_marker(name.encode()) else (name.encode(), start)


def is_pad(symbol):
    return symbol[1] in "tTwW" and symbol[2].startswith("__pfx_")


def is_function(symbol):
    return symbol[1] in "tTwW" and not is_pad(symbol)


NAMES = st.one_of(
    st.text("abc_.0", min_size=1, max_size=6),
    st.sampled_from(["init_module", "_text", "__x_text_end", "n" * 300, "f.isra.0"]),
).filter(lambda name: not name.startswith("__pfx_"))
ITEMS = st.lists(
    st.tuples(
        st.integers(1, 400),
        st.sampled_from(["function", "padded", "data", "alias", "pair", "label", "marker"]),
        st.sampled_from("tTwW"),
        NAMES,
    ),
    max_size=120,
)


def make_symbols(items):
    """Returns symbols in ascending order, with padding as in the kernel."""
    symbols, address = [], BASE
    for gap, what, kind, name in items:
        if what == "alias" and symbols and is_function(symbols[-1]):
            symbols.append((symbols[-1][0], kind, name))
            continue
        address += gap
        if what == "data":
            symbols.append((address, "d", name))
        elif what in {"padded", "pair", "label", "marker"}:
            names = [name, name + "2"] if what == "pair" else [name]
            symbols += [(address, kind, f"__pfx_{n}") for n in names]
            if what in {"label", "marker"}:  # in padding, after the previous symbol
                symbols.append((address, "t", "__a_text_end" if what == "marker" else "end"))
            address += PAD
            symbols += [(address, kind, n) for n in names]
        else:
            symbols.append((address, kind, name))
    return symbols


def write(symbols):
    return "".join(f"{a:016x} {k} {n}\n" for a, k, n in symbols).encode()


@given(ITEMS, st.integers(1, 500), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_lookups_in_the_core_table_match_brute_force(items, size, rng):
    symbols = make_symbols(items)
    data = write(symbols)
    result = parse_kallsyms(data[at : at + size] for at in range(0, len(data), size))
    oracle = Oracle(symbols)
    assert result.bad_lines == 0
    edges = [s[0] + d for s in symbols for d in (-PAD - 1, -PAD, -1, 0, 1)]
    for address in rng.sample(edges, min(len(edges), 60)):
        assert result.core.lookup(address) == oracle.lookup(address), hex(address)
    for address, kind, name in symbols:
        if is_function((address, kind, name)):
            assert name.encode() in result.core.names_at(address)
            indices = result.core.find(name.encode())
            assert address in {result.core.address(index) for index in indices}


@given(ITEMS, st.randoms(use_true_random=False), st.sampled_from([1, 3, 1024]))
@settings(max_examples=100, deadline=None)
def test_lookups_in_a_module_table_in_any_order_match_brute_force(items, rng, at_once):
    symbols = make_symbols(items)
    lines = [f"{a:016x} {k} {n}\t[m]\n" for a, k, n in symbols]
    rng.shuffle(lines)
    lines.append(f"{BASE - (1 << 20):016x} t other\t[n]\n")
    with mock.patch.object(kallsyms, "_SORTED_LINES", at_once):
        result = parse_kallsyms(["".join(lines).encode()])
    if not any(s[1] in "tTwW" for s in symbols):
        return
    oracle, table = Oracle(symbols), result.blocks["m"]
    for address in [s[0] + d for s in symbols for d in (-PAD, -1, 0, 1)][:200]:
        assert table.lookup(address) == oracle.lookup(address), hex(address)


DAMAGE = st.lists(
    st.tuples(st.integers(0, 150), st.sampled_from(["kind", "short", "digit", "empty", "swap"])),
    min_size=1,
    max_size=5,
)


def damage(lines, harm):
    lines = list(lines)
    for at, what in harm:
        if at + 1 >= len(lines) or lines[at].count(" ") < 2:
            continue
        address, kind, rest = lines[at].split(" ", 2)
        if what == "kind":
            lines[at] = f"{address} {kind}{kind} {rest}"
        elif what == "short":
            lines[at] = f"{address} {kind}\n"
        elif what == "digit":
            lines[at] = f"{address[:-1]}g {kind} {rest}"
        elif what == "empty":
            lines[at] = "?\n"
        else:
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
    return "".join(lines).encode()


def check_is_right(table, symbols):
    """Checks that addresses outside of padding have no name, or a name from the intact file."""
    oracle = Oracle(symbols)
    pads = {s[0] + at for s in symbols if is_pad(s) for at in range(PAD)}
    for address in {s[0] + d for s in symbols for d in (-PAD - 1, -PAD, -1, 0, 1)} - pads:
        result = table.lookup(address)
        if result is not None:
            expected = oracle.lookup(address)
            assert expected is not None, hex(address)
            assert expected[1] == result[1], hex(address)
            assert result[0] in {n.encode() for a, _, n in symbols if a == result[1]}


@given(ITEMS, DAMAGE, st.integers(1, 500))
@example(
    items=[(1, "label", "t", "a"), (1, "label", "t", "b"), (16, "function", "t", "c")],
    harm=[(5, "swap")],  # the function after the second padding is skipped
    size=1,
)
@settings(max_examples=300, deadline=None)
def test_corrupt_kallsyms_content_never_yields_a_wrong_name(items, harm, size):
    symbols = make_symbols(items)
    data = damage([f"{a:016x} {k} {n}\n" for a, k, n in symbols], harm)
    result = parse_kallsyms(data[at : at + size] for at in range(0, len(data), size))
    check_is_right(result.core, symbols)
    assert result.lines == data.count(b"\n")


@given(ITEMS, DAMAGE)
@settings(max_examples=200, deadline=None)
def test_corrupt_module_lines_in_kallsyms_never_yield_a_wrong_name(items, harm):
    """Module lines need not be sorted.

    Corruption that invalidates a line's address is not tested.
    """
    symbols = make_symbols(items)
    harm = [(at, what) for at, what in harm if what not in {"digit", "empty"}]
    data = damage([f"{a:016x} {k} {n}\t[m]\n" for a, k, n in symbols], harm)
    table = parse_kallsyms([data]).blocks.get("m")
    if table is not None:
        check_is_right(table, symbols)


@given(ITEMS, st.integers(1, 4000))
@settings(max_examples=300, deadline=None)
def test_truncated_kallsyms_content_never_yields_a_wrong_name(items, cut):
    symbols = make_symbols(items)
    data = write(symbols)
    data = data[: max(0, len(data) - cut)]
    result = parse_kallsyms([data])
    assert result.cut == (data[-1:] not in {b"", b"\n"})
    if result.cut:
        check_is_right(result.core, symbols)


def full_fixtures():
    folder = os.environ.get("KPROFILER_FIXTURES", "")
    return sorted(Path(folder).rglob("kallsyms*.xz")) if folder else []


@pytest.mark.parametrize("path", full_fixtures(), ids=str)
def test_lookups_in_a_full_kernel_match_brute_force(path):
    """All symbols and 100,000 addresses of a captured kernel (KPROFILER_FIXTURES) are looked up."""
    data = lzma.decompress(path.read_bytes())
    result = parse_kallsyms([data])
    blocks = {}
    for line in data.decode().splitlines():
        address, kind, name, *module = line.split()
        blocks.setdefault(module[0][1:-1] if module else "", []).append(
            (int(address, 16), kind, name)
        )
    assert result.bad_lines == 0
    assert result.lines == data.count(b"\n")
    rng = random.Random(7)
    core = blocks.pop("")
    text = [s[0] for s in core if s[1] in "tT"]
    addresses = [rng.randrange(text[0] - 99, text[-1] + 99) for _ in range(100_000)]
    check_linear(result.core, core, sorted(addresses + text))
    for name, table in result.blocks.items():
        freed = {(clone.address, clone.name) for clone in result.freed if clone.module == name}
        live = sorted(s for s in blocks[name] if (s[0], s[2]) not in freed)
        addresses = [s[0] + d for s in live if s[1] in "tT" for d in (-17, -16, -1, 0, 7)]
        check_linear(table, live, sorted(addresses), name.startswith("__builtin__"))


def check_linear(table, symbols, addresses, pages=False):
    """Checks lookups against the oracle on a sliding window, in linear time."""
    position = 0
    for address in addresses:
        while position < len(symbols) and symbols[position][0] <= address:
            position += 1
        start = symbols[position - 1][0] if position else 0
        low = position
        while low and symbols[low - 1][0] == start:
            low -= 1
        expected = Oracle(symbols[low : position + 16]).lookup(address)
        if pages and expected and address - expected[1] >= 4096:
            expected = None
        assert table.lookup(address) == expected, hex(address)
