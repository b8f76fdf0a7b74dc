"""Every parser of kernel symbols withstands hostile bytes and truncated files.

Each parser finishes in bounded time, counts what it skips, and never returns a wrong table. The
seeds are lines from real files. Earlier failures are kept as explicit examples.
"""

import lzma
import struct
import tarfile
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.elf.notes import find_build_id, parse_notes
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.symbols import ElfSymbols, captured, compressed
from otel_kprofiler.symbols.captured import CapturedFiles
from otel_kprofiler.symbols.kernel.builtin import (
    BuiltinRanges,
    parse_builtin_ranges,
    parse_kallmodsyms,
    place_ranges,
)
from otel_kprofiler.symbols.kernel.kallsyms import parse_kallsyms
from otel_kprofiler.symbols.kernel.modules import (
    parse_modules,
    ranges_from_sections,
    ranges_from_symbols,
)
from otel_kprofiler.tracking.module_uevents import parse_uevent
from tests.fuzz.bounds import REFUSED, read_within
from tests.fuzz.seeds import SEEDS

pytestmark = pytest.mark.fuzz
EXAMPLES = settings(max_examples=300, deadline=10_000)
TOP = 1 << 64


@st.composite
def damaged(draw, kind):
    """Draws a real file, truncated or with byte ranges removed, repeated or overwritten."""
    data = bytearray(draw(st.sampled_from(SEEDS[kind])))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 40)))
        what = draw(st.sampled_from(["cut", "double", "rubbish", "number", "end"]))
        if what == "cut":
            del data[at:to]
        elif what == "double":
            data[at:at] = data[at:to] * draw(st.integers(1, 50))
        elif what == "rubbish":
            data[at:to] = draw(st.binary(max_size=40))
        elif what == "number":
            data[at:to] = draw(
                st.sampled_from(
                    [b"f" * 16, b"f" * 17, b"0" * 16, b"-1", b"1_0", b"0x", b"\xd9\xa1"]
                )
            )
        else:
            del data[at:]
    return bytes(data)


FIELDS = st.lists(
    st.binary(max_size=20)
    | st.sampled_from([b"ffffffff81000000", b"T", b"t", b"name", b"[m]", b"\t", b"\n", b"0" * 16]),
    max_size=60,
).map(b" ".join)


def pieces(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


@given(damaged("kallsyms") | FIELDS, st.integers(1, 300))
@EXAMPLES
@example(b"ffffffff81000000 T a\tb\n\t[m]\n", 7)
@example(b"ffffffffffffffff T last\n", 64)
def test_arbitrary_kallsyms_is_parsed_safely(data, size):
    kallsyms = parse_kallsyms(pieces(data, size))
    named = {word for line in data.splitlines() for word in line.split()}
    for table in (kallsyms.core, *kallsyms.blocks.values()):
        addresses = [table.address(index) for index in range(len(table))]
        assert addresses == sorted(addresses)
        assert all(0 <= address < TOP for address in addresses)
        for address in addresses:
            result = table.lookup(address)
            assert result is None or (result[0] in named and result[1] <= address + 64)
            assert set(table.names_at(address)) <= named
    assert kallsyms.bad_lines <= kallsyms.lines + len(kallsyms.core)


@given(damaged("modules"))
@EXAMPLES
def test_arbitrary_module_lists_are_parsed_safely(data):
    result, bad = parse_modules(data)
    assert len(result) + bad <= len(data.decode("utf-8", "backslashreplace").splitlines())
    assert all(module.name for module in result)


@given(
    st.dictionaries(
        st.one_of(st.sampled_from([".text", ".init.text", ".exit.text", ".data"]), st.text()),
        st.one_of(st.integers(0, TOP - 1), st.sampled_from([0, 4096, 8192, TOP - 1])),
    ),
    damaged("kallsyms"),
    st.integers(0, TOP),
)
@EXAMPLES
@example({}, b"ffffffffffffffff T _text\nfffffff81000000 t short\n", 0)
@example({}, b"ffffffffffffffff T _text\nffffffffffffffff", 0)
def test_arbitrary_section_addresses_are_parsed_safely(sections, data, limit):
    for table in (None, parse_kallsyms([data]).core):
        ranges = ranges_from_sections(sections, table, limit)
        assert list(ranges) == sorted(ranges)
        assert all(part.start < part.end <= limit for part in ranges)
        assert not [part for part in ranges if part.name.startswith(".init.")]
        for part in ranges_from_symbols(table, sections.get(".text", 0), limit):
            assert part.start < part.end


@given(damaged("notes"))
@EXAMPLES
def test_arbitrary_elf_notes_are_parsed_safely(data):
    assert sum(12 + len(note.description) for note in parse_notes(data)) <= len(data)
    build_id = find_build_id(data)
    assert build_id is None or bytes.fromhex(build_id) in data


@given(damaged("ranges"), damaged("kallsyms"))
@EXAMPLES
@example(b".text 00000000-00000000 = _text\n.text ffffffff-00000000 m\n", SEEDS["kallsyms"][0])
def test_arbitrary_ranges_of_builtin_modules_are_parsed_safely(data, kallsyms):
    sections, bad = parse_builtin_ranges(data)
    assert bad <= len(data.decode("utf-8", "backslashreplace").splitlines())
    check_ranges(place_ranges(sections, parse_kallsyms([kallsyms]).core)[0])


@given(damaged("kallmodsyms"), st.integers(1, 300))
@EXAMPLES
def test_arbitrary_kallmodsyms_is_parsed_safely(data, size):
    start, end = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8200_0000
    ranges, sizes, bad = parse_kallmodsyms(pieces(data, size), start, end)
    assert all(length > 0 for length in sizes[1::2])
    assert bad <= data.count(b"\n") + 1
    assert all(start <= part.start < part.end <= end for part in ranges)
    check_ranges(ranges)


def check_ranges(ranges):
    built = BuiltinRanges(ranges)
    for part in ranges:
        for address in (part.start - 1, part.start, part.end - 1, part.end):
            owners = [other.modules for other in ranges if other.start <= address < other.end]
            assert built.find(address) in [(), *owners]


@given(damaged("uevent"))
@EXAMPLES
def test_arbitrary_uevents_are_parsed_safely(data):
    event = parse_uevent(data)
    assert event is None or event.name


@given(damaged("elf"))
@EXAMPLES
@example(SEEDS["elf"][0].replace(b"\x03\0\0\0", b"\x03\xff\xff\xff"))
@example(SEEDS["elf"][0][:-8] + b"\xff" * 8)
@example(SEEDS["elf"][0][:-40] + b"\xff" * 40)
def test_arbitrary_elf_files_are_parsed_safely(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.ko"
    path.write_bytes(data)
    try:
        symbols = ElfSymbols(str(path))
    except KProfilerError:
        return
    for rva in range(0, 0x200, 7):
        match = symbols.find(rva)
        assert match is None or match.names


def place_all(_):
    """Places many sections whose common anchor is a name that many symbols share."""
    data = b"".join(b".s%d 0-0 = a\n.s%d 1-2 m\n" % (at, at) for at in range(10_000))
    core = b"".join(b"%016x t a\n" % (0xFFFF_FFFF_8100_0000 + 16 * at) for at in range(10_000))
    place_ranges(parse_builtin_ranges(data)[0], parse_kallsyms([core]).core)


@pytest.mark.parametrize(
    ("parse", "line"),
    [
        (lambda data: parse_kallsyms([data]), b"ffffffff81000000 t same\n"),
        (lambda data: parse_kallsyms([data]), b"ffffffff81000000 t same\t[m]\n"),
        (lambda data: parse_kallsyms(pieces(data, 4096)), b"\t \n"),
        (lambda data: parse_kallsyms(pieces(data, 65536)), b"f" * 4096),
        (parse_modules, b"m 1 0 - Live 0x0\n"),
        (parse_builtin_ranges, b".text 00000000-00000010 m\n"),
        (place_all, b""),
        (lambda data: parse_kallmodsyms(pieces(data, 4096), 0, TOP), b"[ "),
        (parse_notes, bytes(12)),
    ],
)
def test_a_megabyte_of_repeated_lines_is_parsed_in_linear_time(parse, line):
    data = line * ((1 << 20) // max(1, len(line)))
    started = time.process_time()
    parse(data)
    assert time.process_time() - started < 10


def make_elf(sections, *, names=b"\0.text\0", count=None, entry=64):
    """Returns a module with section headers given as (type, flags, offset, size, link)."""
    head = b"\x7fELF\2\1\1" + bytes(9)
    start = 64 + len(names)
    rows = [(0, 3, 0, 64, len(names), 0), *((1, *section) for section in sections)]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, flags, 0, at, size, link, 0, 1, 0)
        for name, kind, flags, at, size, link in rows
    )
    count = len(rows) if count is None else count
    head += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, start, 0, 64, 0, 0, entry, count, 0)
    return head + names + table


ENDLESS = struct.pack("<QQ", 64, 8), struct.pack("<QQ", 64, 1 << 60)
ELF_BOMBS = {
    "notes": make_elf([(7, 0, 0, 1 << 40, 0)] * 60_000),
    "names": make_elf([(1, 0, 0, 0, 0)] * 60_000, names=b"x" * 1_000_000),
    "link to itself": make_elf([(2, 0, 0, 24, 1)]),
    "sections without end": make_elf([], count=0).replace(*ENDLESS),
    "headers without size": make_elf([], count=0, entry=0).replace(*ENDLESS),
    "dictionary": lzma.compress(
        b"", filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    ),
}


@pytest.mark.parametrize("bomb", ELF_BOMBS)
def test_reading_a_small_elf_file_takes_little_memory_and_time(bomb, tmp_path):
    path = tmp_path / "m.ko"
    path.write_bytes(ELF_BOMBS[bomb])
    assert read_within(lambda: ElfSymbols(str(path))) == REFUSED


def sparse_archive():
    """Returns a tar archive that claims to contain a 64 GiB file but has no data."""
    member = tarfile.TarInfo("top/kallsyms")
    member.size = 1 << 36
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


UNPACKED = 64 << 20  # the limit in these tests, since a GiB takes seconds to compress
COPIES = {
    "xz of zeros": ("k.xz", lambda: lzma.compress(bytes(UNPACKED + 1), preset=0)),
    "no xz": ("k.xz", lambda: b"no xz"),
    "sparse tar": ("k.tar", sparse_archive),
}


@pytest.mark.parametrize("copy", COPIES)
def test_corrupt_kernel_captures_and_decompression_bombs_are_rejected(copy, tmp_path, monkeypatch):
    for module in (captured, compressed):
        monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", UNPACKED)
    name, make = COPIES[copy]
    path = tmp_path / name
    path.write_bytes(make())
    assert read_within(lambda: read_copy(path), mebibytes=256) == REFUSED


def read_copy(path):
    CapturedFiles({"/proc/kallsyms": path}).read_bytes("/proc/kallsyms")
