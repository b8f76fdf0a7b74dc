"""Headers, identity and bytes of ELF files match those read by pyelftools."""

import hashlib
import os
import struct
from io import BytesIO

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.enums import ENUM_SH_TYPE_AMD64

from otel_kprofiler.elf import (
    ElfError,
    ElfProblem,
    FileSource,
    ImageSource,
    find_section,
    hash_file,
    read_dynamic_linker,
    read_elf,
    read_load_addresses,
    read_sections,
)
from tests.unit.unwinding.files import NAMES, PT_NOTE, Elf, content


@pytest.mark.parametrize("name", NAMES)
def test_the_build_id_and_code_match_those_reported_by_pyelftools(name):
    data = content(name)
    elf = read_elf(ImageSource(data), "x86_64")
    reference = ELFFile(BytesIO(data))
    note = reference.get_section_by_name(".note.gnu.build-id")
    assert elf.build_id == (next(note.iter_notes())["n_desc"] if note else None)
    assert elf.entry == reference["e_entry"]
    assert elf.texts == tuple(
        (s["p_offset"], s["p_filesz"], s["p_vaddr"])
        for s in reference.iter_segments("PT_LOAD")
        if s["p_flags"] & 1
    )


def test_a_go_programs_build_id_is_found_outside_the_note_segment():
    """Go's linker writes both notes, but its PT_NOTE covers only the first."""
    plain = Elf()
    build_id = read_elf(ImageSource(bytes(plain.data)), "x86_64").build_id
    note = struct.pack("<III4s", 4, 8, 4, b"Go\0\0") + b"build id"
    at = plain.program_header(PT_NOTE)
    plain.put("<QQQQ", at + 8, len(plain.data), 0, 0, len(note))
    plain.data += note
    elf = read_elf(ImageSource(bytes(plain.data)), "x86_64")
    assert (elf.build_id, elf.is_go) == (build_id, True)
    assert build_id is not None

    plain.put("<Q", 0x28, len(plain.data))  # the offset of the section headers
    assert read_elf(ImageSource(bytes(plain.data)), "x86_64").build_id is None


def test_a_programs_dynamic_linker_is_found():
    with open("/bin/sh", "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        (segment,) = ELFFile(file).iter_segments("PT_INTERP")
        assert read_dynamic_linker(source) == segment.get_interp_name().encode()


@pytest.mark.parametrize("name", NAMES)
def test_no_dynamic_linker_is_returned_for_a_shared_library(name):
    assert read_dynamic_linker(ImageSource(content(name))) == b""


@pytest.mark.parametrize("name", NAMES)
def test_sections_match_those_reported_by_pyelftools(name):
    data = content(name)
    source = ImageSource(data)
    reference = ELFFile(BytesIO(data))
    keys = ["type", "flags", "addr", "offset", "size", "link", "info", "addralign", "entsize"]
    assert [section[1:] for section in read_sections(source, read_elf(source, "x86_64"))] == [
        tuple(
            ENUM_SH_TYPE_AMD64.get(s["sh_type"], s["sh_type"]) if key == "type" else s[f"sh_{key}"]
            for key in keys
        )
        for s in reference.iter_sections()
    ]
    names = [section.name.decode() for section in read_sections(source, read_elf(source, "x86_64"))]
    assert names == [s.name for s in reference.iter_sections()]


@pytest.mark.parametrize("name", NAMES)
def test_load_addresses_follow_the_order_of_the_program_headers(name):
    data = bytearray(content(name))
    table = ELFFile(BytesIO(data)).header.e_phoff
    loads = [
        index for index, segment in enumerate(ELFFile(BytesIO(data)).iter_segments())
        if segment.header.p_type == "PT_LOAD"
    ]  # fmt: skip
    first, last = (slice(table + 56 * at, table + 56 * (at + 1)) for at in (loads[0], loads[-1]))
    data[first], data[last] = data[last], data[first]
    expected = [s.header for s in ELFFile(BytesIO(data)).iter_segments("PT_LOAD")]
    assert read_load_addresses(ImageSource(bytes(data))) == [
        (load.p_vaddr, load.p_vaddr + load.p_memsz) for load in expected
    ]


def test_headers_for_other_machines_are_read_on_request():
    elf = Elf()
    assert read_elf(ImageSource(bytes(elf.data)), None).machine == 62
    elf.put("<H", 18, 183)
    assert read_elf(ImageSource(bytes(elf.data)), None).machine == 183
    elf.put("<H", 18, 3)
    with pytest.raises(ElfError, match="machine 3"):
        read_elf(ImageSource(bytes(elf.data)), None)


def test_a_compressed_eh_frame_section_is_rejected():
    elf = Elf("static")
    source = ImageSource(bytes(elf.data))
    sections, count, _ = read_elf(source, "x86_64").section_headers
    index = next(
        i for i in range(count) if ELFFile(BytesIO(elf.data)).get_section(i).name == ".eh_frame"
    )
    elf.put("<Q", sections + 64 * index + 8, 0x800 | 2)
    source = ImageSource(bytes(elf.data))
    with pytest.raises(ElfError) as caught:
        find_section(source, read_elf(source, "x86_64"), b".eh_frame")
    assert caught.value.problem is ElfProblem.NOT_IN_FILE


@pytest.mark.parametrize("size", [0, 9, 4095, 4096, 4097, 8191, 8192, 20_000])
def test_the_file_hash_conforms_to_the_profiles_data_model(size):
    data = os.urandom(size)
    text = data[:4096] + data[max(0, size - 4096) :] + struct.pack(">Q", size)
    assert hash_file(ImageSource(data)) == hashlib.sha256(text).hexdigest()[:32]


def test_the_file_hash_matches_the_published_test_vector():
    data = bytes.fromhex("7f454c460001020304")
    assert hash_file(ImageSource(data)) == "caf6e5907166ac76eef618e5f7f59cd9"


def test_a_truncated_file_counts_as_changed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content("plain.so")[:1000])
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), 5000)
        for read in (
            lambda: source.read(900, 200),
            lambda: source.read_into(memoryview(bytearray(200)), 900),
        ):
            with pytest.raises(ElfError) as caught:
                read()
            assert caught.value.problem is ElfProblem.CHANGED
        with pytest.raises(ElfError) as caught:
            source.read(4900, 200)
        assert caught.value.problem is ElfProblem.OUT_OF_BOUNDS
