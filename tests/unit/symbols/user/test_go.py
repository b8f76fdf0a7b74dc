"""The functions and lines of Go programs match those that Go's tools and runtime report."""

import os
import random
import re
import shutil
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.elf import ElfError, ElfProblem, FileSource, read_elf, read_sections
from otel_kprofiler.model import FileDetails, FileId, Line
from otel_kprofiler.symbols.cache import KeptValues
from otel_kprofiler.symbols.user import go
from otel_kprofiler.symbols.user.build import read_functions
from otel_kprofiler.symbols.user.go import GoLines, find_go_section
from otel_kprofiler.symbols.user.go_pc_table import PcTable
from otel_kprofiler.symbols.user.line_tables import LineTables
from otel_kprofiler.symbols.user.lines import SymbolicLines
from otel_kprofiler.symbols.user.sources import SymbolSources
from tests.unit.symbols.user.elf_programs import tool
from tests.unit.symbols.user.go_tables import (
    MAGIC,
    TEXT,
    GoFunction,
    build_go,
    make_table,
    open_table,
    pc_table,
)

pytestmark = pytest.mark.system

FUNCTIONS = [
    GoFunction("main.first", 32, ((10, 0, 7), (300, 1, 9))),
    GoFunction("main.(*T[...]).ünl", 16, ((16, 1, 4000),)),
    GoFunction("_rt0_amd64_linux", 200, ((1, 0, 1), (199, 0, 2))),
]


@pytest.mark.parametrize("version", MAGIC)
def test_function_tables_of_all_go_versions_are_read(version):
    table = open_table(make_table(version, FUNCTIONS), version)
    symbols = table.symbols()
    names = [symbols.names[at:].partition(b"\0")[0].decode() for at in symbols.names_at]
    assert names == [function.name for function in FUNCTIONS]
    assert list(symbols.values) == [TEXT, TEXT + 32, TEXT + 48]
    assert list(symbols.sizes) == [32, 16, 200]
    assert table.lookup(TEXT - 1) == table.lookup(TEXT + 248) == ()
    assert table.lookup(TEXT + 9) == (Line("main.first", "", "a.go", 7),)
    assert table.lookup(TEXT + 10) == (Line("main.first", "", "b.go", 9),)
    assert table.lookup(TEXT + 47) == (Line("main.(*T[...]).ünl", "", "b.go", 4000),)
    assert table.lookup(TEXT + 247) == (Line("_rt0_amd64_linux", "", "a.go", 2),)


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, 1 << 30)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_every_value_encoded_in_a_pc_table_is_found_by_address(steps, random):
    data = pc_table(steps)
    table, place = PcTable(data), 0
    wanted = []
    for size, value in steps:
        wanted += [(place, value), (place + size - 1, value)]
        place += size
    wanted.append((place, -1))
    random.shuffle(wanted)
    assert [table.find(at) for at, _ in wanted] == [value for _, value in wanted]
    with pytest.raises(StopIteration):
        PcTable(data[:-1]).find(place)


@settings(max_examples=600, deadline=10_000)
@given(st.sampled_from(list(MAGIC)), st.data())
def test_a_corrupt_go_function_table_is_rejected_or_satisfies_the_table_invariants(version, data):
    table = bytearray(make_table(version, FUNCTIONS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(table) - 8))
        table[at : at + 8] = data.draw(
            st.sampled_from([bytes(8), b"\xff" * 8, b"\x80" * 8, b"\0\0\0\1\0\0\0\0"])
            | st.binary(min_size=1, max_size=8)
        )
    try:
        opened = open_table(bytes(table), version)
        symbols = opened.symbols()
        assert all(0 <= at < len(symbols.names) for at in symbols.names_at)
        assert min(symbols.sizes) >= 0
        for svma in (TEXT, TEXT + 10, TEXT + 40, TEXT + 200):
            assert len(opened.lookup(svma)) <= 65
    except ElfError:
        pass


@pytest.mark.parametrize("change", [b"\xf2\xff\xff\xff", b"\xfb\xff\xff\xff", b"\xff\xff\xff\xf1"])
def test_a_go_function_table_with_an_unsupported_version_is_rejected(change):
    with pytest.raises(ElfError) as caught:
        open_table(change + make_table(20, FUNCTIONS)[4:], 20)
    assert caught.value.problem is ElfProblem.NO_SECTION


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("go")


@pytest.fixture(scope="module")
def program(folder):
    return build_go(folder / "program", "-trimpath")


@pytest.fixture(scope="module")
def variants(folder, program):
    """Returns each program without symbols, paired with the same program with symbols."""
    stripped = folder / "stripped"
    tool("strip", "-o", stripped, program)
    external = build_go(folder / "external", "-buildmode=pie", "-ldflags=-linkmode=external")
    small = folder / "small"
    tool("strip", "-o", small, external)
    return [(program, program), (stripped, program), (small, external)]


def opened(path):
    fd = os.open(path, os.O_RDONLY)
    source = FileSource(fd, os.fstat(fd).st_size)
    elf = read_elf(source)
    sections = read_sections(source, elf)
    lines = GoLines(source, elf, sections, find_go_section(sections))
    functions = read_functions(source, elf)
    os.close(fd)
    return lines, functions


def random_addresses(table, count):
    made = random.Random(count)
    symbols = table.symbols()
    return [made.randrange(symbols.values[0], symbols.values[-1]) for _ in range(count)]


def test_functions_match_the_output_of_go_tool_nm(variants):
    for path, truth in variants:
        lines, functions = opened(path)
        expected = {}
        for row in tool("go", "tool", "nm", truth).splitlines():
            if symbol := re.fullmatch(r" *([0-9a-f]+) [Tt] (.+?)(\.abi0)?", row):
                expected.setdefault(int(symbol[1], 16), set()).add(generic(symbol[2]))
        symbols = lines.symbols()
        assert len(symbols.values) > 1000
        for start in symbols.values:
            result = functions.lookup(start)
            assert result.start == start
            assert generic(result.name) in expected[start]
        assert functions.find("main.outer")
        lines.close()


def generic(name):
    """Returns a name without type arguments, which the Go runtime and tools abbreviate."""
    return name.removesuffix(".abi0").partition("[")[0].replace("·", ".")


def test_lines_match_the_output_of_go_tool_addr2line(variants):
    for path, truth in variants:
        lines, _ = opened(path)
        addresses = random_addresses(lines, 1000)
        asked = "\n".join(map(hex, addresses))
        rows = tool("go", "tool", "addr2line", truth, input=asked).splitlines()
        compared = 0
        for address, name, place in zip(addresses, rows[::2], rows[1::2], strict=True):
            innermost, *_, function = (*(result := lines.lookup(address)), *result)
            assert result[-1] is function
            assert generic(function.function) == generic(name.removesuffix(".abi0"))
            file, _, line = place.rpartition(":")
            if int(line) > 0:  # otherwise, the address is past the code
                compared += 1
                assert (innermost.file, innermost.line) == (file, int(line))
        assert compared > 900
        lines.close()


def test_inlined_calls_match_dwarf(variants):
    if not shutil.which("llvm-symbolizer"):
        pytest.skip("llvm-symbolizer is not installed")
    for path, truth in variants:
        lines, functions = opened(path)
        addresses = random_addresses(lines, 1000)
        (outer,) = functions.find("main.outer")
        addresses += range(outer.start, outer.end)
        asked = "\n".join(map(hex, addresses))
        answers = tool("llvm-symbolizer", "--inlines", "-e", truth, input=asked).splitlines()
        deepest = 0
        for address, answer in zip(addresses, split(answers), strict=True):
            expected = [
                (generic(name), int(place.rsplit(":", 2)[1]))
                for name, place in zip(answer[0::2], answer[1::2], strict=True)
            ]
            results = [(generic(line.function), line.line) for line in lines.lookup(address)]
            if results[0][1] and expected[0][1]:  # otherwise, the address is past the code
                assert results == expected
                deepest = max(deepest, len(results))
        assert deepest >= 3
        stacks = [lines.lookup(address) for address in range(outer.start, outer.end)]
        names = [line.function for line in max(stacks, key=len)]
        assert names == ["main.inner", "main.part", "main.outer"]
        lines.close()


def test_inlined_functions_in_dwarf_keep_their_names(program):
    """In C, the suffix of ``main.part`` would denote a part of the function ``main``."""
    pytest.importorskip("symbolic")
    fd = os.open(program, os.O_RDONLY)
    source = FileSource(fd, os.fstat(fd).st_size)
    elf = read_elf(source)
    sources = SymbolSources(lines=LineTables(SymbolicLines(None), use_drgn=False))
    symbols = sources.read(source, elf, FileDetails(str(program), elf.build_id, FileId("0" * 32)))
    os.close(fd)
    (outer,) = symbols.functions.find("main.outer")
    stacks = [symbols.name(address).lines for address in range(outer.start, outer.end)]
    deepest = max(stacks, key=len)
    assert [line.function for line in deepest] == ["main.inner", "main.part", "main.outer"]
    assert not any(line.system_name for line in deepest)


def split(rows):
    """Splits rows into groups at empty rows."""
    return [list(part) for is_part, part in groupby(rows, key=bool) if is_part]


def test_a_closed_go_table_resolves_no_addresses(program):
    lines, functions = opened(program)
    (outer,) = functions.find("main.outer")
    assert lines.lookup(outer.start)
    lines.close()
    lines.close()
    assert lines.lookup(outer.start) == ()


def test_the_lookup_cache_has_a_single_limit_for_all_files(monkeypatch):
    kept = KeptValues(100_000)
    monkeypatch.setattr(go, "_KEPT", kept)
    most = 0
    for _ in range(200):
        table = open_table(make_table(20, FUNCTIONS), 20)
        assert table.lookup(TEXT)
        assert table.lookup(TEXT) == table.lookup(TEXT)
        most = max(most, len(kept._values))
    assert 20 < most < 100_000 / 600
