"""Unwind tables in ELF files are located, and rejected if the BPF program cannot use them."""

import struct
from io import BytesIO

import pytest
from elftools.elf.elffile import ELFFile

from otel_kprofiler.elf import ImageSource, find_section, make_pairs, read_elf
from otel_kprofiler.unwinding.image import check_texts, image_pages, write_image
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.table import MAX_ENTRIES
from tests.unit.unwinding.files import PT_GNU_EH_FRAME, PT_LOAD, Elf, content, find

OUTSIDE = (-(1 << 31), -0x300, 0x7FFFFFFF, 0x4000)
"""Offsets from the search table to addresses outside of .eh_frame."""


def refusal(data):
    with pytest.raises(TableRefused) as caught:
        find(data)
    return caught.value.refusal


@pytest.mark.parametrize("name", ["plain.so", "personality.so"])
def test_unwind_tables_match_those_from_pyelftools(name):
    data = content(name)
    tables = find(data)
    elf = ELFFile(BytesIO(data))
    header, frames = (elf.get_section_by_name(n) for n in (".eh_frame_hdr", ".eh_frame"))
    assert tables.origin == header["sh_addr"]
    assert tables.search_offset == header["sh_offset"] + 12
    assert tables.entries == int.from_bytes(header.data()[8:12], "little")
    assert (tables.frames.offset, tables.frames.address) == (frames["sh_offset"], frames["sh_addr"])
    assert frames.data()[tables.frames.size :].strip(b"\0") == b""


def test_the_eh_frame_section_is_found_in_a_file_without_a_search_table():
    data = content("static")
    assert find(data) is None
    source = ImageSource(data)
    assert find_section(source, read_elf(source, "x86_64"), b".eh_frame") == tuple(
        ELFFile(BytesIO(data)).get_section_by_name(".eh_frame")[key]
        for key in ("sh_offset", "sh_size", "sh_addr")
    )


@pytest.mark.parametrize("name", ["plain.so", "personality.so"])
def test_a_built_search_table_matches_the_table_from_the_linker(name):
    data = content(name)
    source, tables = ImageSource(data), find(data)
    frames = find_section(source, read_elf(source, "x86_64"), b".eh_frame")
    made = make_pairs(source.read(frames.offset, frames.size), frames.address, tables.origin)
    assert made == data[tables.search_offset :][: tables.search_bytes]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"\x7fELG"),
        (4, b"\1"),  # 32 bits
        (5, b"\2"),  # big-endian
        (16, b"\1\0"),  # an object file
        (18, b"\xb7\0"),  # arm64
    ],
)
def test_elf_files_for_other_machines_are_rejected(at, value):
    elf = Elf()
    elf.data[at : at + len(value)] = value
    assert refusal(elf.data) is Refusal.NOT_ELF


def test_a_file_too_short_for_an_elf_header_is_rejected():
    assert refusal(content("plain.so")[:63]) is Refusal.NOT_ELF
    assert refusal(b"") is Refusal.NOT_ELF


@pytest.mark.parametrize(
    ("at", "form", "value", "reason"),
    [
        (0x36, "<H", 57, Refusal.DAMAGED_HEADERS),  # size of a program header
        (0x38, "<H", 0xFFFF, Refusal.DAMAGED_HEADERS),  # number of program headers
        (0x20, "<Q", 1 << 63, Refusal.OUT_OF_BOUNDS),  # offset of the program headers
    ],
)
def test_malformed_elf_headers_are_rejected(at, form, value, reason):
    assert refusal(Elf().put(form, at, value).data) is reason


@pytest.mark.parametrize(("field", "value"), [(8, 1 << 20), (32, 1 << 40), (16, (1 << 64) - 16)])
def test_a_segment_that_extends_beyond_the_file_is_rejected(field, value):
    elf = Elf()
    elf.put("<Q", elf.program_header(PT_LOAD, 1) + field, value)
    assert refusal(elf.data) is Refusal.DAMAGED_HEADERS


def test_overlapping_segments_are_rejected():
    elf = Elf()
    elf.put("<Q", elf.program_header(PT_LOAD, 2) + 16, 0x100)
    assert refusal(elf.data) is Refusal.DAMAGED_HEADERS


@pytest.mark.parametrize("encodings", ["011b033a", "0103033b", "011b0b3b", "021b033b", "00000000"])
def test_unsupported_eh_frame_header_encodings_are_rejected(encodings):
    elf = Elf()
    at = elf.search_at()
    elf.data[at : at + 4] = bytes.fromhex(encodings)
    assert refusal(elf.data) is Refusal.ENCODING


@pytest.mark.parametrize("encodings", ["011bffff", "011b03ff"])
def test_an_eh_frame_header_may_lack_a_search_table(encodings):
    elf = Elf()
    at = elf.search_at()
    elf.data[at : at + 4] = bytes.fromhex(encodings)
    assert find(elf.data) is None


def test_a_four_byte_header_has_no_search_table():
    elf = Elf()
    at = elf.search_at()
    elf.data[at : at + 4] = bytes.fromhex("011bffff")
    elf.put("<Q", elf.program_header(PT_GNU_EH_FRAME) + 32, 4)
    assert find(elf.data) is None


@pytest.mark.parametrize(
    ("field", "form", "value", "reason"),
    [
        (8, "<I", 1000, Refusal.OUT_OF_BOUNDS),  # more pairs than the section contains
        (8, "<I", MAX_ENTRIES + 1, Refusal.TOO_LARGE),
        *((16, "<i", entry, Refusal.OUT_OF_BOUNDS) for entry in OUTSIDE),
    ],
)
def test_search_tables_that_the_bpf_program_cannot_search_are_rejected(field, form, value, reason):
    elf = Elf()
    assert refusal(elf.put(form, elf.search_at() + field, value).data) is reason


def test_an_unsorted_search_table_is_rejected():
    elf = Elf()
    at = elf.search_at() + 12
    first, second = elf.data[at : at + 8], elf.data[at + 8 : at + 16]
    elf.data[at : at + 16] = second + first
    assert refusal(elf.data) is Refusal.NOT_SORTED


def test_an_unwind_entry_beyond_the_end_of_its_segment_is_rejected():
    elf = Elf()
    tables = find(elf.data)
    last = max(
        pair[1]
        for pair in struct.iter_unpack(
            "<ii", elf.data[tables.search_offset :][: tables.search_bytes]
        )
    )
    elf.put("<I", tables.origin + last, 0x10000)
    assert refusal(elf.data) is Refusal.OUT_OF_BOUNDS
    elf.put("<I", tables.origin + last, 0xFFFFFFFF)
    assert refusal(elf.data) is Refusal.ENCODING


def test_a_file_with_too_many_text_segments_is_rejected():
    elf = read_elf(ImageSource(content("plain.so")), "x86_64")
    check_texts(elf.texts * 4)
    with pytest.raises(TableRefused) as caught:
        check_texts(elf.texts * 5)
    assert caught.value.refusal is Refusal.MANY_TEXTS
    with pytest.raises(TableRefused) as caught:
        check_texts(())
    assert caught.value.refusal is Refusal.NO_TEXT


def test_unwind_tables_have_the_layout_that_the_bpf_program_expects():
    data = content("personality.so")
    source, tables = ImageSource(data), find(data)
    elf = read_elf(source, "x86_64")
    image = bytearray(image_pages(tables) * 4096)
    write_image(memoryview(image), source, tables, elf, 7)
    serial, version, origin, frames_address, entries, frames_at, size, count = struct.unpack_from(
        "<IIQQIIII", image
    )
    assert (serial, version, origin, entries, count) == (7, 1, tables.origin, tables.entries, 1)
    assert frames_address == tables.frames.address
    assert frames_at % 16 == 0
    assert frames_at >= 256 + 8 * entries
    assert frames_at + size + 512 <= len(image)
    assert image[256 : 256 + 8 * entries] == data[tables.search_offset :][: 8 * entries]
    assert image[frames_at : frames_at + size] == data[tables.frames.offset :][:size]
    (text,) = elf.texts
    assert struct.unpack_from("<Q", image, 136) == (elf.entry,)
    results = struct.unpack_from("<QQQ", image, 40)
    assert results == (text.offset, text.size, text.address - text.offset)
