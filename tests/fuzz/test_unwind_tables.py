"""Hostile ELF files: refused with a reason, or copied into an image that the program can trust."""

import struct
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.unwinding import TableRefused
from otel_kprofiler.unwinding.elf import find_section, read_elf
from otel_kprofiler.unwinding.image import check_texts, image_pages, write_image
from otel_kprofiler.unwinding.index import make_pairs
from otel_kprofiler.unwinding.opening import find_mappings
from otel_kprofiler.unwinding.source import ImageSource
from otel_kprofiler.unwinding.table import find_tables
from tests.unit.unwinding.files import NAMES, content

pytestmark = pytest.mark.fuzz
EXAMPLES = settings(max_examples=1000, deadline=10_000)
SEEDS = [content(name) for name in NAMES]
NUMBERS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def places(data):
    """Offsets at which the headers and tables are, where a change has an effect."""
    elf = read_elf(ImageSource(data), "x86_64")
    sections, count, _ = elf.section_headers
    found = list(range(64 + 56 * 8)) + list(range(sections, min(len(data), sections + 64 * count)))
    if elf.search:
        found += range(elf.search[0], elf.search[0] + elf.search[1])
    with suppress(TableRefused):
        frames = find_section(ImageSource(data), elf, b".eh_frame")
        found += range(frames.offset, frames.offset + frames.size)
    return [at for at in found if at < len(data)]


PLACES = [places(data) for data in SEEDS]


@st.composite
def damaged(draw):
    """A small real file with some numbers of its headers or tables changed, or its end cut off."""
    which = draw(st.integers(0, len(SEEDS) - 1))
    data = bytearray(SEEDS[which])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.sampled_from(PLACES[which]))
        size = draw(st.sampled_from([1, 2, 4, 8]))
        number = draw(st.sampled_from(NUMBERS) | st.integers(0, len(data)) | st.integers(0, 255))
        data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
    if draw(st.integers(0, 9)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


@EXAMPLES
@given(damaged())
@example(SEEDS[0])
@example(SEEDS[1])
def test_tables_are_refused_or_hold_what_the_program_trusts(data):
    source = ImageSource(data)
    try:
        elf = read_elf(source, "x86_64")
        check_texts(elf.texts)
        tables = find_tables(source, elf)
        if tables is None:
            return
        pages = image_pages(tables)
        image = bytearray(4096 * pages)
        write_image(memoryview(image), source, tables, elf, 1)
    except TableRefused:
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
def test_frames_are_indexed_or_refused(data):
    source = ImageSource(data)
    try:
        frames = find_section(source, read_elf(source, "x86_64"), b".eh_frame")
        content = source.read(frames.offset, frames.size)
        made = make_pairs(content, frames.address, frames.address)
    except (TableRefused, ValueError):
        return
    for _, entry in struct.iter_unpack("<ii", made):
        assert 0 <= entry <= frames.size - 4


@settings(max_examples=500, deadline=10_000)
@given(st.binary(max_size=400))
def test_any_bytes_are_indexed_or_refused(data):
    with suppress(ValueError):
        make_pairs(data, 0x1000, 0x1000)


@given(st.binary(max_size=300) | st.text("0123456789abcdef-rxp:/ \n", max_size=200).map(str.encode))
def test_any_maps_give_mappings(data):
    for name, path in find_mappings(data, 7):
        assert "-" in name
        assert path
