"""The functions read from compiled programs match the output of binutils."""

import lzma
import os
import shutil
import subprocess
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from otel_kprofiler.elf import ElfError, ElfProblem, FileSource, read_debug_elf, read_elf
from otel_kprofiler.symbols.user import static_symbols
from otel_kprofiler.symbols.user.build import read_functions
from otel_kprofiler.symbols.user.debug_files import DebugFile
from otel_kprofiler.symbols.user.functions import Function
from tests.unit.symbols.user.elf_programs import (
    ASSEMBLY,
    build,
    functions_of,
    stubs_of,
    symbols_of,
    tool,
)

pytestmark = pytest.mark.system
A64_COMPILER = "aarch64-linux-gnu-gcc-12"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def program(folder):
    return build(folder, "program")


@pytest.fixture(scope="module")
def assembly(folder):
    return build(
        folder, "assembly.so", "-shared", "-nostdlib", source=ASSEMBLY, language="assembler"
    )


def names(table, function, step=0):
    result = table.lookup(function[0] + step)
    return result and result.name


def test_a_symbol_is_found_at_every_address_in_its_range(program):
    table = functions_of(program)
    for name in ("main", "hidden", "_start"):
        start, size, *_ = symbols_of(program)[name]
        assert table.find(name) == (Function(start, start + size, name),)
        for address in (start, start + size - 1):
            assert table.lookup(address) == Function(start, start + size, name)
        behind = table.lookup(start + size)
        assert behind is None or behind.start >= start + size


def test_global_names_are_preferred_over_weak_names_and_short_names_over_long_names(program):
    table = functions_of(program)
    start, size, *_ = symbols_of(program)["shown"]
    assert table.names_at(start) == ("shown", "same_longer", "weak_one")
    assert table.lookup(start + 3) == Function(start, start + size, "shown")
    for name in ("same_longer", "weak_one"):
        assert table.find(name) == (Function(start, start + size, name),)


def test_a_symbol_in_both_symtab_and_dynsym_is_stored_only_once(folder):
    path = build(folder, "exported", "-rdynamic")
    entries = [line.split() for line in tool("readelf", "-sW", path).splitlines()]
    names = [row[7] for row in entries if len(row) == 8 and row[3] == "FUNC" and row[6].isdigit()]
    assert names.count("main") == 2
    assert len(functions_of(path)) - len(set(stubs_of(path))) == len(set(names))


def test_the_cold_part_of_a_function_has_its_own_name(program):
    assert names(functions_of(program), symbols_of(program)["shown.cold"]) == "shown.cold"


def test_assembler_labels_are_excluded(assembly):
    table, symbols = functions_of(assembly), symbols_of(assembly)
    sized = symbols["sized"][0]
    inner = symbols["inner_function"][0]
    assert [names(table, (at,)) for at in range(sized, sized + 4)] == [
        "sized", "sized", "inner_function", "sized",
    ]  # fmt: skip
    assert inner == sized + 2
    for name in ("with_frame", "label_with_frame"):  # the function ends where its unwind entry ends
        start = symbols[name][0]
        assert table.lookup(start + 1) == Function(start, start + 2, name)
        assert table.lookup(start + 2) is None
    start = symbols["without_frame"][0]  # the function ends at the next symbol
    assert table.lookup(start + 17) == Function(start, start + 18, "without_frame")
    start = symbols["sized_label"][0]
    assert table.lookup(start + 1) == Function(start, start + 2, "sized_label")
    assert table.lookup(start + 2) is None
    assert table.lookup(symbols["table"][0]) is None
    outer, nested = symbols["outer"][0], symbols["nested"][0]
    assert table.lookup(outer + 1) == Function(outer, outer + 6, "outer")
    assert table.lookup(nested + 1) == Function(nested, nested + 2, "nested")
    assert table.lookup(nested + 2) == Function(outer, outer + 6, "outer")
    last = symbols["last"][0]  # extends to the end of its section
    assert table.lookup(last + 1) == Function(last, last + 2, "last")
    assert table.lookup(last + 2) is None


def test_unsized_symbols_cover_more_than_one_byte_only_with_unwind_information(assembly, folder):
    stripped = os.path.join(folder, "assembly-stripped.so")
    tool("strip", "-o", stripped, assembly)
    table, symbols = functions_of(stripped), symbols_of(assembly)
    start = symbols["with_frame"][0]
    assert table.lookup(start + 1) == Function(start, start + 2, "with_frame")
    start = symbols["without_frame"][0]
    assert table.lookup(start) == Function(start, start + 1, "without_frame")
    assert table.lookup(start + 1) is None


def test_functions_in_stripped_files_have_bounds_but_never_a_neighbours_name(program, folder):
    stripped = os.path.join(folder, "stripped")
    tool("strip", "-o", stripped, program)
    table, symbols = functions_of(stripped), symbols_of(program)
    for name in ("main", "hidden", "shown", "shown.cold"):
        start, size, *_ = symbols[name]
        assert table.lookup(start) == table.lookup(start + size - 1)
        assert table.lookup(start) == Function(start, start + size, "")
        assert not table.find(name)


@pytest.mark.parametrize(
    "options",
    [
        ("-Wl,-z,lazy",),
        ("-Wl,-z,now",),
        ("-Wl,-z,lazy,-z,ibtplt", "-fcf-protection"),
        ("-Wl,-z,now,-z,ibtplt", "-fcf-protection"),
        ("-no-pie",),
        ("-fuse-ld=gold",),
    ],
)
def test_stubs_are_named_after_their_targets(folder, options):
    path = build(folder, "stubs", *options)
    table, expected = functions_of(path), sorted(stubs_of(path))
    assert {"abort", "getenv", "strlen", "atoi", "strtol"} & {name for _, name in expected}
    for address, name in expected:
        result = table.lookup(address)
        assert result.name == f"{name}@plt"
        assert (result.start, result.end - result.start) in ((address, 16), (address, 8))
        assert table.lookup(address + 5) == result
        assert table.find(f"{name}@plt")
    for (address, _), (following, _) in pairwise(expected):
        assert table.lookup(address).end == following or following - address > 16
    first = min(address for address, _ in expected) - 16
    assert (table.lookup(first) or Function(0, 0, "")).name.removesuffix("@plt") in (
        "", *(name for _, name in expected),
    )  # fmt: skip


@pytest.mark.skipif(shutil.which(A64_COMPILER) is None, reason=f"needs {A64_COMPILER}")
@pytest.mark.parametrize(
    "options",
    [
        ("-Wl,-z,lazy",),
        ("-Wl,-z,now",),
        ("-no-pie",),
        ("-no-pie", "-mbranch-protection=standard", "-Wl,-z,force-bti"),
        ("-Wl,-z,pac-plt",),
        ("-no-pie", "-Wl,-z,force-bti,-z,pac-plt"),
    ],
)
def test_arm64_stubs_are_named_after_their_targets(folder, options):
    path = build(folder, "a64", *options, compiler=A64_COMPILER)
    table, expected = functions_of(path), stubs_of(path, "aarch64-linux-gnu-objdump")
    assert {"abort", "getenv"} <= {name for _, name in expected}
    for address, name in expected:
        stub = table.lookup(address)
        assert (stub.name, stub.start) == (f"{name}@plt", address)
        assert 16 <= stub.end - stub.start <= 24
        assert table.lookup(address + 12) == stub


def test_plt_stubs_are_named_in_programs_with_branch_tracking(folder):
    table = functions_of(build(folder, "lazy", "-Wl,-z,lazy,-z,ibtplt", "-fcf-protection"))
    assert len(table.find("abort@plt")) == 2, "in .plt and in .plt.sec"


def test_ifunc_stubs_are_named_after_their_targets(folder):
    path = build(folder, "static", "-static")
    table, symbols = functions_of(path), symbols_of(path)
    (stub,) = table.find("strlen@plt")
    assert stub.end - stub.start == 16
    assert symbols["strlen"][2] == "IFUNC"


def test_symbol_versions_are_removed_from_names(folder):
    script = folder / "versions"
    script.write_text("V1 {};\nV2 { global: two; };\n")
    source = """
    __asm__(".symver old, two@V1");
    __asm__(".symver new, two@@V2");
    int old(void) { return 1; }
    int new(void) { return 2; }
    """
    path = build(
        folder, "versions.so", "-shared", "-fPIC", f"-Wl,--version-script={script}", source=source
    )
    table = functions_of(path)
    assert "@" not in "".join(table.names_at(table.find("new")[0].start))
    assert {one.start for one in table.find("two")} == {
        symbols_of(path)[name][0] for name in ("old", "new")
    }


@contextmanager
def opened(path):
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        yield DebugFile(path, file.fileno(), source, read_debug_elf(source))


def with_minidebuginfo(program, folder, content, *options):
    """Creates a stripped copy of the program with ``content`` in ``.gnu_debugdata``."""
    packed, path = os.path.join(folder, "packed"), os.path.join(folder, "stripped-with-packed")
    with open(packed, "wb") as file:
        file.write(content)
    tool("objcopy", "-S", *options, "--add-section", f".gnu_debugdata={packed}", program, path)
    return path


def partial(program, folder, kept, packed):
    """Copies a program, keeping the symbols ``kept``; stores ``packed`` in ``.gnu_debugdata``."""
    small = os.path.join(folder, "small")
    tool("objcopy", "-S", *(f"--keep-symbol={name}" for name in packed), program, small)
    tool("objcopy", "--only-keep-debug", small)
    keep = [f"--keep-symbol={name}" for name in kept]
    return with_minidebuginfo(program, folder, lzma.compress(Path(small).read_bytes()), *keep)


def test_symbols_are_read_from_minidebuginfo(program, folder):
    """As in Fedora's packages, ``.gnu_debugdata`` contains the names that ``.dynsym`` lacks."""
    table = functions_of(partial(program, folder, [], ["hidden", "main"]))
    for name in ("hidden", "main"):
        start, size, *_ = symbols_of(program)[name]
        assert table.lookup(start) == Function(start, start + size, name)
    assert table.lookup(symbols_of(program)["shown"][0]).name == ""


def test_each_symbol_source_supplies_the_symbols_that_earlier_sources_lack(program, folder):
    path = partial(program, folder, ["main"], ["hidden"])
    starts = {name: symbols_of(program)[name][0] for name in ("main", "hidden", "shown")}
    alone = functions_of(path)
    assert {name: alone.lookup(at).name for name, at in starts.items()} == {
        "main": "main", "hidden": "hidden", "shown": "",
    }  # fmt: skip
    with opened(program) as debug:
        whole = functions_of(path, debug)
    assert {name: whole.lookup(at).name for name, at in starts.items()} == {
        name: name for name in starts
    }


def test_no_debug_file_is_searched_for_a_program_whose_functions_all_have_names(program):
    with open(program, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        read_functions(source, read_elf(source, None), lambda: pytest.fail("unneeded search"))


def test_a_corrupt_symbol_source_does_not_affect_names_from_earlier_sources(program, folder):
    path = with_minidebuginfo(program, folder, b"no xz", "--keep-symbol=main")
    assert functions_of(path).lookup(symbols_of(program)["main"][0]).name == "main"


@pytest.mark.parametrize("damage", [b"no xz", lzma.compress(b"no ELF file"), b""])
def test_corrupt_minidebuginfo_is_rejected(program, folder, damage):
    content = damage or lzma.compress(os.urandom(4096))[:-50]
    with pytest.raises(ElfError):
        functions_of(with_minidebuginfo(program, folder, content))


def test_minidebuginfo_is_decompressed_only_up_to_its_limit(program, folder, monkeypatch):
    path = with_minidebuginfo(program, folder, lzma.compress(bytes(2 << 20)))
    monkeypatch.setattr(static_symbols, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(ElfError, match=r"gnu_debugdata"):
        functions_of(path)


def test_a_symbol_file_above_the_size_limit_is_rejected(program):
    assert len(functions_of(program, max_bytes=1 << 16))
    with pytest.raises(ElfError) as caught:
        functions_of(program, max_bytes=200)
    assert caught.value.problem is ElfProblem.TOO_LARGE


def test_addresses_that_differ_from_file_offsets_are_resolved(folder):
    path = build(folder, "moved", "-no-pie", "-Wl,-Ttext=0x10000000")
    start, size, *_ = symbols_of(path)["shown"]
    assert start >= 0x10000000
    assert functions_of(path).lookup(start + size - 1) == Function(start, start + size, "shown")


def test_a_static_file_without_a_search_table_has_function_bounds(folder):
    path = build(folder, "no-search", "-static", "-Wl,--no-eh-frame-hdr")
    bare = os.path.join(folder, "no-search-stripped")
    tool("strip", "-o", bare, path)
    start, size, *_ = symbols_of(path)["shown"]
    assert functions_of(bare).lookup(start + 1) == Function(start, start + size, "")


def test_object_files_are_rejected(folder):
    path = os.path.join(folder, "object.o")
    subprocess.run(["gcc", "-c", "-x", "c", "-o", path, "-"], input=b"int a;", check=True)
    with pytest.raises(ElfError) as caught:
        functions_of(path)
    assert caught.value.problem is ElfProblem.NOT_ELF
