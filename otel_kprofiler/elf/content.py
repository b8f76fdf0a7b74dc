"""Reads the content of sections, decompressing sections with SHF_COMPRESSED (elf(5))."""

import struct
import zlib
from typing import Final

from otel_kprofiler.elf.headers import SHF_COMPRESSED, SHT_NOBITS, Section
from otel_kprofiler.elf.problem import ElfError, ElfProblem
from otel_kprofiler.elf.source import Source

_HEADER: Final = struct.Struct("<I4xQ8x")  # type, decompressed size (Elf64_Chdr)
_MAX_WINDOW_BYTES: Final = 128 << 20
_LEAST_WINDOW_BYTES: Final = 8 << 20
_ELFCOMPRESS_ZLIB, _ELFCOMPRESS_ZSTD = 1, 2


def read_content(source: Source, section: Section, limit: int) -> bytes:
    """Returns the content of a section; empty for SHT_NOBITS.

    Raises ``ElfError`` if the section is malformed, or its (de)compressed size exceeds ``limit``.
    """
    if section.kind == SHT_NOBITS:
        return b""
    if section.size > limit:
        detail = f"{_shown(section)} has {section.size} bytes, more than {limit}"
        raise ElfError(ElfProblem.TOO_LARGE, detail)
    content = source.read(section.offset, section.size)
    return _unpack(section, content, limit) if section.flags & SHF_COMPRESSED else content


def unpacked_size(source: Source, section: Section) -> int:
    """Returns the decompressed size of a section.

    Raises ``ElfError`` if the section is too small for a compression header.
    """
    if not section.flags & SHF_COMPRESSED:
        return section.size
    if section.size < _HEADER.size:
        raise ElfError(ElfProblem.DAMAGED_SECTION, _shown(section))
    _, size = _HEADER.unpack(source.read(section.offset, _HEADER.size))
    return int(size)


def _unpack(section: Section, content: bytes, limit: int) -> bytes:
    if len(content) < _HEADER.size:
        raise ElfError(ElfProblem.DAMAGED_SECTION, _shown(section))
    form, size = _HEADER.unpack_from(content)
    if size > limit:
        detail = f"{_shown(section)} decompresses to {size} bytes, more than {limit}"
        raise ElfError(ElfProblem.TOO_LARGE, detail)
    packed = content[_HEADER.size :]
    if form == _ELFCOMPRESS_ZLIB:
        unpacked = _unpack_zlib(section, packed, size)
    elif form == _ELFCOMPRESS_ZSTD:
        unpacked = _unpack_zstd(section, packed, size)
    else:
        detail = f"{_shown(section)} has the unsupported compression type {form}"
        raise ElfError(ElfProblem.DAMAGED_SECTION, detail)
    if len(unpacked) != size:
        raise ElfError(ElfProblem.DAMAGED_SECTION, f"{_shown(section)} is truncated")
    return unpacked


def _unpack_zlib(section: Section, packed: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(packed, size or 1)
    except zlib.error as error:
        raise ElfError(ElfProblem.DAMAGED_SECTION, f"{_shown(section)}: {error}") from error


def _unpack_zstd(section: Section, packed: bytes, size: int) -> bytes:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ElfError(
            ElfProblem.DAMAGED_SECTION,
            f"decompressing {_shown(section)} requires the zstandard package",
        ) from error
    # Some writers declare a window larger than the content.
    window = min(_MAX_WINDOW_BYTES, max(_LEAST_WINDOW_BYTES, 2 * size))
    try:
        with zstandard.ZstdDecompressor(max_window_size=window).stream_reader(packed) as reader:
            unpacked: bytes = reader.read(size)
    except zstandard.ZstdError as error:
        raise ElfError(ElfProblem.DAMAGED_SECTION, f"{_shown(section)}: {error}") from error
    return unpacked


def _shown(section: Section) -> str:
    return section.name.decode("ascii", "backslashreplace")
