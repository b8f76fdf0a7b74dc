"""Hostile user-space binaries are rejected with a reason, or yield a consistent table."""

import functools
import lzma
import os
import struct
import tempfile
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.elf import ElfError, ImageSource, read_debug_elf, read_elf, read_sections
from otel_kprofiler.symbols.user.bounds import make_bounds
from otel_kprofiler.symbols.user.build import read_functions
from otel_kprofiler.symbols.user.debug_files import DebugFile, parse_debug_link
from otel_kprofiler.symbols.user.symbol_tables import SymbolTable, parse_symbols
from tests.further import further_of
from tests.fuzz.bounds import READ, REFUSED, read_within
from tests.fuzz.damage import NUMBERS, damage
from tests.unit.symbols.user.elf_programs import ASSEMBLY, build, tool
from tests.unit.unwinding.files import content

pytestmark = pytest.mark.fuzz
EXAMPLES = settings(max_examples=600, deadline=10_000)
TABLES = (b".symtab", b".dynsym", b".strtab", b".rela.plt", b".rela.dyn", b".plt", b".plt.sec",
          b".eh_frame", b".eh_frame_hdr", b".gnu_debugdata", b".dynamic")  # fmt: skip


@functools.cache
def seeds():
    """Returns small programs, with the offsets of the bytes that affect parsing."""
    with tempfile.TemporaryDirectory() as folder:
        whole = build(folder, "whole", "-fcf-protection", "-Wl,-z,lazy,-z,ibtplt")
        assembly = build(
            folder, "asm.so", "-shared", "-nostdlib", source=ASSEMBLY, language="assembler"
        )
        packed, small = os.path.join(folder, "packed"), os.path.join(folder, "small")
        with open(whole, "rb") as file, open(packed, "wb") as target:
            target.write(lzma.compress(file.read()))
        tool("objcopy", "-S", "--add-section", f".gnu_debugdata={packed}", whole, small)
        results = [content("plain.so"), content("static")]
        for path in (whole, assembly, small):
            with open(path, "rb") as file:
                results.append(file.read())
    return [(data, places(data)) for data in results]


def places(data):
    source = ImageSource(data)
    elf = read_elf(source, "x86_64")
    start, count, _ = elf.section_headers
    result = list(range(64 + 56 * 8)) + list(range(start, start + 64 * count))
    for section in read_sections(source, elf):
        if section.name in TABLES:
            result += range(section.offset, section.offset + min(section.size, 600))
    return [at for at in result if at < len(data)]


def damaged():
    return st.sampled_from(range(5)).flatmap(lambda which: damage(*seeds()[which]))


def check(table, addresses):
    for address in addresses:
        result = table.lookup(address)
        assert result is None or result.start <= address < result.end
    for name in ("main", "hidden", "strlen@plt"):
        assert all(result.name == name for result in table.find(name))


@EXAMPLES
@given(damaged(), st.booleans())
def test_corrupt_files_are_rejected_or_yield_a_consistent_function_table(data, as_debug_file):
    source = ImageSource(data)
    whole = ImageSource(seeds()[4][0])
    with suppress(ElfError):
        if as_debug_file:
            debug = DebugFile("", -1, source, read_debug_elf(source))
            table = read_functions(whole, read_elf(whole, "x86_64"), lambda: debug)
        else:
            table = read_functions(source, read_elf(source, "x86_64"))
        check(table, [*range(0, 0x3000, 7), *range(0x400000, 0x402000, 7), *NUMBERS])


@EXAMPLES
@given(st.binary(max_size=240).map(lambda data: data[: len(data) // 24 * 24]), st.binary())
def test_arbitrary_bytes_parse_as_symbols_without_an_error(data, names):
    parse_symbols(SymbolTable(data, names, frozenset({0, 1, 0xFFFF})))


@EXAMPLES
@given(st.binary(max_size=160).map(lambda data: data[: len(data) // 8 * 8]), st.binary())
def test_arbitrary_bytes_yield_consistent_function_bounds_or_none(pairs, frames):
    bounds = make_bounds(pairs, 0x1000, frames, 0x2000)
    for address in range(0, 0x4000, 99) if bounds else ():
        around = bounds.around(address)
        assert around is None or around[0] <= address < around[1]


@given(st.binary(max_size=40))
def test_arbitrary_bytes_yield_no_debug_link_or_one_without_a_slash(data):
    link = parse_debug_link(data)
    assert link is None or "/" not in link.name


def image(symbols, names, *, extra=b""):
    sections = [
        struct.pack("<IIQQQQIIQQ", *row)
        for row in (
            (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            (0, 1, 6, 0, 0, 1 << 40, 0, 0, 1, 0),
            (0, 2, 0, 0, 64, len(symbols), 3, 0, 8, 24),
            (0, 3, 0, 0, 64 + len(symbols), len(names), 0, 0, 1, 0),
        )
    ]
    at = 64 + len(symbols) + len(names)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 62, 1, 0, 0, at, 0, 64, 56, 0, 64, 4, 3
    )
    return header + symbols + names + b"".join(sections) + extra


def entry(name, kind, value, size):
    return struct.pack("<IBBHQQ", name, kind, 0, 1, value, size)


COUNT = 400_000
LONG = b"x" * 1_000_000 + b"\0"
HOSTILE = {
    "one address": (entry(0, 0x12, 0x1000, 8) * COUNT, LONG),
    "one address without a size": (entry(0, 0x12, 0x1000, 0) * COUNT, LONG),
    "labels behind": (
        entry(0, 0x12, 0x1000, 0) * (COUNT // 2) + entry(1, 0, 0x2000, 0) * (COUNT // 2),
        b"\0.L\0",
    ),
    "nested": (b"".join(entry(0, 2, at, 2 * (COUNT - at)) for at in range(COUNT)), b"\0"),
    "labels": (b"".join(entry(0, 0, at, 0) for at in range(COUNT)), LONG),
    "without sizes": (b"".join(entry(0, 2, at, 0) for at in range(COUNT)), LONG),
    "far apart": (b"".join(entry(0, 2, at << 40, 1 << 63) for at in range(COUNT)), LONG),
}


@pytest.mark.parametrize(
    "kind", further_of(HOSTILE, ("one address", "labels behind", "nested", "labels", "far apart"))
)
def test_adversarial_symbol_tables_are_read_in_bounded_time(kind):
    def read():
        source = ImageSource(image(*HOSTILE[kind]))
        check(read_functions(source, read_elf(source, "x86_64")), range(0, COUNT, 997))

    assert read_within(read, mebibytes=512, seconds=20) == READ


def test_a_symbol_table_above_the_size_limit_is_rejected_before_it_is_read():
    def read():
        head = image(b"", b"")
        at = head.index(struct.pack("<QQ", 64, 0))
        size = 1 << 37
        source = Sparse(head[:at] + struct.pack("<QQ", 64, size) + head[at + 16 :], size * 2)
        read_functions(source, read_elf(source, "x86_64"))

    assert read_within(read) == REFUSED


class Sparse(ImageSource):
    """A source that claims to be longer than its data."""

    def __init__(self, data, size):
        super().__init__(data)
        self.size = size
