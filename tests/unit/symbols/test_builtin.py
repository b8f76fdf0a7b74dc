"""Built-in modules from modules.builtin.ranges and kallmodsyms match the linker maps."""

import json
import lzma
import os
import random
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

import pytest

from otel_kprofiler.cli.symbolize import command
from otel_kprofiler.model import Unresolved
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.symbols.kernel.builtin import (
    BuiltinRange,
    BuiltinRanges,
    parse_builtin_ranges,
    parse_kallmodsyms,
)
from tests.commands import invoke

DATA = Path(__file__).parents[2] / "data" / "kernel" / "6.12-builtin"
FIXTURES = Path(os.environ.get("KPROFILER_FIXTURES", ""), "6.12-builtin-ranges")
SLIDE = 0x3B40_0000
LINKED_AT = 0xFFFF_FFFF_8100_0000


def unpack(name):
    return lzma.decompress((DATA / name).read_bytes()).decode()


@pytest.fixture(scope="module")
def owner():
    """Finds the modules of the object file at an address, using the linker map and Kbuild files."""
    rows = [line.split() for line in unpack("objects.xz").splitlines()]
    rows = [(int(start, 16), int(end, 16), modules) for start, end, *modules in rows]
    starts = [row[0] for row in rows]

    def find(address):
        index = bisect_right(starts, address) - 1
        return rows[index][2] if index >= 0 and address < rows[index][1] else []

    return find


def core_symbols(text):
    lines = [line.split() for line in text.splitlines() if "\t" not in line]
    return [(int(address, 16), kind, name) for address, kind, name in lines]


def kallmodsyms(symbols, owner, slide, sized):
    """Returns the symbols in the format of a kernel with kallmodsyms."""
    ends = sorted({address for address, _, _ in symbols})
    for address, kind, name in symbols:
        following = bisect_right(ends, address)
        size = ends[following] - address if following < len(ends) else 0
        modules = "".join(f" [{module}]" for module in owner(address))
        yield f"{address + slide:016x} {f'{size:x} ' if sized else ''}{kind} {name}{modules}\n"


@pytest.mark.parametrize("slide", [0, SLIDE])
@pytest.mark.parametrize("source", ["ranges", "sized", "plain"])
def test_every_builtin_symbol_is_assigned_to_the_modules_that_contain_its_object_file(
    tmp_path, owner, source, slide
):
    symbols = [s for s in core_symbols(unpack("kallsyms.xz")) if s[1] in "tTwW"]
    copy = tmp_path / "kallsyms"
    copy.write_text("".join(f"{a + slide:016x} {k} {n}\n" for a, k, n in symbols))
    if source == "ranges":
        given = {"builtin_ranges": DATA / "modules.builtin.ranges.xz"}
    else:
        given = {"kallmodsyms": tmp_path / "kallmodsyms"}
        lines = kallmodsyms(symbols, owner, slide, source == "sized")
        given["kallmodsyms"].write_text("".join(lines))
    symbolizer = KernelSymbolizer.from_files(kallsyms=copy, **given)
    assert not [text for text in symbolizer.problems if "modules" in text or "kallmod" in text]
    results = {}
    for address, _, _ in symbols:
        frame = symbolizer.resolve_addresses([address + slide])[0]
        if frame.module:  # exit text does not belong to a module
            results[address] = list(frame.builtin)
    assert results == {address: owner(address) for address in results}
    assert len(results) > 500
    assert sum(map(bool, results.values())) > 200


def test_builtin_ranges_use_little_memory():
    symbolizer = KernelSymbolizer.from_files(
        kallsyms=DATA / "kallsyms.xz", builtin_ranges=DATA / "modules.builtin.ranges.xz"
    )
    builtin = symbolizer.snapshot.builtin
    assert len(builtin) == 354  # in .text, .init.text and .exit.text
    assert builtin.size_bytes() / len(builtin) < 64, "names of 147 modules included"


def test_freed_init_code_is_still_attributed_to_its_module():
    symbolizer = KernelSymbolizer.from_files(
        kallsyms=DATA / "kallsyms.xz", builtin_ranges=DATA / "modules.builtin.ranges.xz"
    )
    (match,) = symbolizer.find("ext4_fc_init_dentry_cache")
    assert match.builtin == ("ext4",)
    frame = symbolizer.resolve_addresses([match.address])[0]
    assert (frame.unresolved, frame.builtin) == (Unresolved.FREED_INIT, ("ext4",))


def test_ranges_from_a_different_kernel_build_are_rejected(tmp_path):
    moved = tmp_path / "kallsyms"
    moved.write_text(
        "".join(
            f"{address + 8 * number:016x} {kind} {name}\n"
            for number, (address, kind, name) in enumerate(core_symbols(unpack("kallsyms.xz")))
        )
    )
    symbolizer = KernelSymbolizer.from_files(
        kallsyms=moved, builtin_ranges=DATA / "modules.builtin.ranges.xz"
    )
    assert not len(symbolizer.snapshot.builtin)
    assert any(".text does not match the running kernel" in text for text in symbolizer.problems)


def test_malformed_and_unanchored_ranges_are_skipped():
    sections, bad = parse_builtin_ranges(
        b".text 00000000-00000000 = _text\n"
        b".text 00000010-00000020 a b\n"
        b".text 00000030-00000028 inverted\n"
        b".exit.text 00000100-00000100 = late\n"
        b".exit.text 00000000-00000058 below\n"
        b".altinstr_aux 00000000-00000004 unanchored\n"
        b".text 00000000-00000000 = again\n.text zz-10 bad\n.text 1_0-20 bad\n.text\n\n\xff\xfe\n"
    )
    assert bad == 6
    assert sections[".text"].anchor == "_text"
    assert sections[".text"].ranges[0] == (0x10, 0x20, ("a", "b"))
    assert sections[".text"].ranges[1] == (0x30, 0x30, ("inverted",))
    assert sections[".exit.text"].anchor_offset == 0x100
    assert sections[".altinstr_aux"].anchor == ""


def test_symbol_types_that_look_like_sizes_are_not_mistaken_for_sizes():
    ranges, sizes, bad = parse_kallmodsyms(
        [b"1000 t a [x]\n1010 b b [y]\n1020 10 t", b" c [x] [y]\n1030 t d\n1040 a [x]\n"],
        0x1000, 0x2000,
    )  # fmt: skip
    assert ranges == [(0x1000, 0x1010, ("x",)), (0x1020, 0x1030, ("x", "y"))]
    assert list(sizes) == [0x1020, 0x10]
    assert bad == 1


def test_functions_have_the_sizes_listed_in_kallmodsyms(tmp_path):
    """The oracle scans all symbols for the last one whose range contains an address."""
    symbols = [s for s in core_symbols(unpack("kallsyms.xz")) if s[1] in "tTwW"]
    rng = random.Random(5)
    starts = sorted({address for address, _, _ in symbols})
    sizes = {}
    for start, following in pairwise([*starts, starts[-1] + 64]):
        gap = following - start
        sizes[start] = rng.choice([0, gap, max(1, gap - 7), max(1, gap // 2), gap + 40])
    (tmp_path / "kallsyms").write_text("".join(f"{a:016x} {k} {n}\n" for a, k, n in symbols))
    (tmp_path / "kallmodsyms").write_text(
        "".join(f"{a:016x} {sizes[a]:x} {k} {n}\n" for a, k, n in symbols)
    )
    plain = KernelSymbolizer.from_files(kallsyms=tmp_path / "kallsyms")
    sized = KernelSymbolizer.from_files(
        kallsyms=tmp_path / "kallsyms", kallmodsyms=tmp_path / "kallmodsyms"
    )
    (text,) = sized.module("vmlinux").ranges
    ended = 0
    for start, following in pairwise(a for a in starts if text.start <= a < text.end):
        known = [a + sizes[a] for a in starts if a <= start]
        for address in {start, following - 1, start + (following - start) // 2}:
            before = plain.snapshot.frame(address)
            if before.offset < 0:
                continue  # padding
            covered = address < max(known) or max(known) <= start  # or the size is unknown
            lines = before.lines if covered else ()
            assert sized.snapshot.frame(address).lines == lines, hex(address)
            ended += not covered
    assert ended > 100


def test_function_sizes_from_a_different_kernel_are_rejected(tmp_path):
    symbols = [s for s in core_symbols(unpack("kallsyms.xz")) if s[1] in "tTwW"]
    lines = [f"{a + 8 * at:016x} 4 {k} {n}\n" for at, (a, k, n) in enumerate(symbols)]
    (tmp_path / "kallmodsyms").write_text("".join(lines))
    symbolizer = KernelSymbolizer.from_files(
        kallsyms=DATA / "kallsyms.xz", kallmodsyms=tmp_path / "kallmodsyms"
    )
    assert any("kallmodsyms: does not match" in text for text in symbolizer.problems)
    plain = KernelSymbolizer.from_files(kallsyms=DATA / "kallsyms.xz")
    for address, _, _ in symbols:
        assert symbolizer.snapshot.frame(address + 4) == plain.snapshot.frame(address + 4)


def test_the_range_with_the_later_start_is_used_if_ranges_overlap():
    ranges = BuiltinRanges([BuiltinRange(0x10, 0x30, ("a",)), BuiltinRange(0x20, 0x28, ("b",))])
    assert [ranges.find(address) for address in (0xF, 0x10, 0x20, 0x28)] == [
        (), ("a",), ("b",), ()
    ]  # fmt: skip


def symbolize_all(folder, symbols, *more):
    words = ("--json", "--kallsyms", folder / "kallsyms.xz", *more, "-")
    addresses = "\n".join(f"{address:x}" for address, _, _ in symbols)
    output = invoke(command, *words, input=addresses).output
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="KPROFILER_FIXTURES does not name the fixtures")
@pytest.mark.parametrize("source", ["ranges", "sized", "plain"])
@pytest.mark.parametrize("boot", ["boot-nokaslr", "boot-kaslr"])
def test_symbolize_resolves_every_function_in_a_kernel(tmp_path, owner, boot, source):
    """``symbolize`` resolves every function in both captured boots (KPROFILER_FIXTURES)."""
    every = core_symbols(lzma.decompress((FIXTURES / boot / "kallsyms.xz").read_bytes()).decode())
    slide = next(a for a, _, n in every if n == "_text") - LINKED_AT
    if source == "ranges":
        more = "--builtin-ranges", str(FIXTURES / "modules.builtin.ranges")
    else:
        linked = [(address - slide, kind, name) for address, kind, name in every]
        text = "".join(kallmodsyms(linked, owner, slide, source == "sized"))
        (tmp_path / "kallmodsyms").write_text(text)
        more = "--kallmodsyms", str(tmp_path / "kallmodsyms")
    symbols = [symbol for symbol in every if symbol[1] in "tTwW"]
    answers = symbolize_all(FIXTURES / boot, symbols, *more)
    expected = [owner(address - slide) for address, _, _ in symbols]
    compared = [
        (answer["address"], answer["builtin"], modules)
        for answer, modules in zip(answers, expected, strict=True)
        if answer["module"]
    ]
    assert [row for row in compared if row[1] != row[2]] == []
    assert len(compared) > 23_000
    assert len({str(row[1]) for row in compared}) > 140
