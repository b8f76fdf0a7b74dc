"""Hostile ELF files are rejected, or copied into an image that the BPF program can trust."""

import struct
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.elf import ElfError, ImageSource, find_section, make_pairs, read_elf
from otel_kprofiler.unwinding.frame_writing import pack_tables
from otel_kprofiler.unwinding.go_frames import make_tables
from otel_kprofiler.unwinding.image import check_texts, image_pages, write_image
from otel_kprofiler.unwinding.refusal import TableRefused
from otel_kprofiler.unwinding.table import find_tables
from tests.fuzz.damage import NUMBERS, damage
from tests.unit.unwinding.files import NAMES, content
from tests.unit.unwinding.go_files import ARM64_ORDINARY, ORDINARY, go_file

pytestmark = pytest.mark.fuzz
EXAMPLES = settings(max_examples=1000, deadline=10_000)
SEEDS = [content(name) for name in NAMES]


def places(data):
    """Returns the offsets within headers and tables at which a change has an effect."""
    elf = read_elf(ImageSource(data), "x86_64")
    sections, count, _ = elf.section_headers
    result = list(range(64 + 56 * 8)) + list(range(sections, min(len(data), sections + 64 * count)))
    if elf.search:
        result += range(elf.search[0], elf.search[0] + elf.search[1])
    with suppress(ElfError):
        frames = find_section(ImageSource(data), elf, b".eh_frame")
        result += range(frames.offset, frames.offset + frames.size)
    return [at for at in result if at < len(data)]


PLACES = [places(data) for data in SEEDS]


def damaged():
    return st.sampled_from(range(len(SEEDS))).flatmap(lambda at: damage(SEEDS[at], PLACES[at]))


@pytest.mark.long
@EXAMPLES
@given(damaged())
@example(SEEDS[0])
@example(SEEDS[1])
def test_unwind_tables_are_rejected_or_satisfy_the_bpf_programs_assumptions(data):
    source = ImageSource(data)
    try:
        elf = read_elf(source, "x86_64")
        check_texts(elf.texts)
        tables = find_tables(source, elf)
        if tables is None:
            return
        image = bytearray(4096 * image_pages(tables))
        write_image(memoryview(image), source, tables, elf, 1)
    except (ElfError, TableRefused):
        return
    _, _, origin, address, entries, at, size, texts = struct.unpack_from("<IIQQIIII", image)
    assert 256 + 8 * entries <= at
    assert at + size + 512 <= len(image)
    assert 1 <= texts <= 4
    pairs = list(struct.iter_unpack("<ii", image[256 : 256 + 8 * entries]))
    assert pairs == sorted(pairs, key=lambda pair: pair[0])
    for _, entry in pairs:
        assert 0 <= origin + entry - address <= size - 4


@EXAMPLES
@given(damaged())
@example(SEEDS[2])
def test_corrupt_eh_frame_sections_are_indexed_or_rejected(data):
    source = ImageSource(data)
    try:
        frames = find_section(source, read_elf(source, "x86_64"), b".eh_frame")
        made = make_pairs(source.read(frames.offset, frames.size), frames.address, frames.address)
    except (ElfError, ValueError):
        return
    for _, entry in struct.iter_unpack("<ii", made):
        assert 0 <= entry <= frames.size - 4


@settings(max_examples=500, deadline=10_000)
@given(st.binary(max_size=400))
def test_eh_frame_sections_with_arbitrary_bytes_are_indexed_or_rejected(data):
    with suppress(ValueError):
        make_pairs(data, 0x1000, 0x1000)


GO_FILES = {62: go_file([ORDINARY] * 12), 183: go_file([ARM64_ORDINARY] * 12, quantum=4)}
"""Go files, keyed by ELF machine number."""


@st.composite
def damaged_go_tables(draw):
    """Draws a machine and a small Go file for it in which some table values are corrupted."""
    machine = draw(st.sampled_from(list(GO_FILES)))
    file, table, _ = GO_FILES[machine]
    data = bytearray(file)
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 2, 4, 8]))
        at = table.offset + draw(st.integers(0, table.size - size))
        number = draw(st.sampled_from(NUMBERS) | st.integers(0, 1000))
        data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
    return machine, bytes(data)


@EXAMPLES
@given(damaged_go_tables())
@example((62, GO_FILES[62][0]))
@example((183, GO_FILES[183][0]))
def test_go_tables_are_rejected_or_satisfy_the_bpf_programs_assumptions(damaged):
    machine, data = damaged
    _, table, segments = GO_FILES[machine]
    address = 0x700000
    try:
        maker = make_tables(data, table, segments[0].address, segments, address, machine=machine)
        packed = pack_tables(maker.pairs, bytes(maker.frames), b"", address)
    except ValueError:
        return
    count = int.from_bytes(packed[:4], "little")
    pairs = list(struct.iter_unpack("<ii", packed[4 : 4 + 8 * count]))
    frames = packed[4 + 8 * count :]
    assert pairs == sorted(pairs)
    for _, entry in pairs:
        assert 0 <= entry <= len(frames) - 4
        assert entry + 4 + int.from_bytes(frames[entry : entry + 4], "little") <= len(frames)
