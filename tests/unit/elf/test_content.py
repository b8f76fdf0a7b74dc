"""Section content is read, whether compressed or not."""

import struct
import zlib

import pytest
import zstandard

from otel_kprofiler.elf import ElfError, ElfProblem, ImageSource, Section, read_content

TEXT = b"content of a section " * 50  # 1,050 bytes
SHT_NOBITS, SHF_COMPRESSED = 8, 0x800
PACKED = {1: zlib.compress(TEXT), 2: zstandard.compress(TEXT)}


def read(data, *, kind=1, flags=0, size=None, limit=1 << 20):
    section = Section(b".x", kind, flags, 0, 3, len(data) if size is None else size, 0, 0, 1, 0)
    return read_content(ImageSource(b"..." + data), section, limit)


def packed(form, content, size=1050):
    return struct.pack("<IIQQ", form, 0, size, 1) + content


def problem(*args, **options):
    with pytest.raises(ElfError) as caught:
        read(*args, **options)
    return caught.value.problem


def test_uncompressed_sections_are_read():
    assert read(TEXT) == TEXT
    assert read(TEXT, kind=SHT_NOBITS) == b""
    assert problem(TEXT, limit=len(TEXT) - 1) is ElfProblem.TOO_LARGE
    assert problem(TEXT, size=len(TEXT) + 1) is ElfProblem.OUT_OF_BOUNDS


@pytest.mark.parametrize("form", PACKED)
def test_compressed_sections_are_decompressed(form):
    assert read(packed(form, PACKED[form]), flags=SHF_COMPRESSED) == TEXT
    large = packed(form, PACKED[form])
    assert problem(large, flags=SHF_COMPRESSED, limit=len(TEXT) - 1) is ElfProblem.TOO_LARGE


@pytest.mark.parametrize("form", PACKED)
def test_corrupt_sections_are_rejected(form):
    for content in (PACKED[form][:-9], b"", b"\xff" * 40):
        assert problem(packed(form, content), flags=SHF_COMPRESSED) is ElfProblem.DAMAGED_SECTION
    longer = packed(form, PACKED[form], len(TEXT) + 1)
    assert problem(longer, flags=SHF_COMPRESSED) is ElfProblem.DAMAGED_SECTION
    assert problem(b"short", flags=SHF_COMPRESSED) is ElfProblem.DAMAGED_SECTION
    assert problem(packed(3, b""), flags=SHF_COMPRESSED) is ElfProblem.DAMAGED_SECTION


@pytest.mark.parametrize("form", PACKED)
def test_decompression_stops_at_the_declared_size(form):
    assert read(packed(form, PACKED[form], 5), flags=SHF_COMPRESSED) == TEXT[:5]
