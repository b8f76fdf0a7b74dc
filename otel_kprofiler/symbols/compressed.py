"""Decompresses xz, gzip and zstd files, which are recognized by their content."""

from __future__ import annotations

import gzip
import lzma
import zlib
from io import BytesIO
from typing import TYPE_CHECKING, Final

from otel_kprofiler.errors import DependencyError, KProfilerError
from otel_kprofiler.reading import read_up_to

if TYPE_CHECKING:
    import mmap

COMPRESSED_SUFFIXES: Final = (".xz", ".gz", ".zst")

MAX_UNPACKED_BYTES: Final = 1 << 30
"""Maximum decompressed size of a file, or of all files in an archive."""
_MAX_DICTIONARY_BYTES: Final = 256 * 1024 * 1024


def is_compressed(path: str, beginning: bytes) -> bool:
    """Returns whether a file's first bytes or its name indicate compression."""
    return beginning.startswith(tuple(_UNPACKERS)) or path.endswith(COMPRESSED_SUFFIXES)


def unpack(path: str, data: bytes | mmap.mmap) -> bytes | mmap.mmap:
    """Returns a file's decompressed content, which is ``data`` itself if it is not compressed.

    Raises:
        KProfilerError: the data is corrupt, or decompresses to more than 1 GiB.
        DependencyError: the data requires ``zstandard``, which is not installed.
    """
    for magic, decompress in _UNPACKERS.items():
        if data[: len(magic)] == magic:
            try:
                unpacked = decompress(BytesIO(data))
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                raise KProfilerError(
                    f"{path} cannot be decompressed: {error}",
                    hint="copy the file again; it is corrupt or incomplete",
                ) from error
            check_size(path, len(unpacked))
            return unpacked
    if path.endswith(COMPRESSED_SUFFIXES):
        raise KProfilerError(
            f"{path} is not compressed, despite its name",
            hint="copy the file again, or rename it",
        )
    return data


def check_size(path: str, size: int) -> None:
    """Raises ``KProfilerError`` if a file decompresses to more than the limit."""
    if size > MAX_UNPACKED_BYTES:
        raise KProfilerError(f"{path} decompresses to more than {MAX_UNPACKED_BYTES >> 30} GiB")


def _unpack_xz(packed: BytesIO) -> bytes:
    content, left = b"", packed.getvalue()
    while left and len(content) <= MAX_UNPACKED_BYTES:  # streams may be concatenated
        decompressor = lzma.LZMADecompressor(memlimit=_MAX_DICTIONARY_BYTES)
        content += decompressor.decompress(left, MAX_UNPACKED_BYTES + 1 - len(content))
        if not decompressor.eof and len(content) <= MAX_UNPACKED_BYTES:
            raise EOFError("it is truncated")
        left = decompressor.unused_data.lstrip(b"\0")  # padding between streams
    return content


def _unpack_gzip(packed: BytesIO) -> bytes:
    with gzip.open(packed) as file:
        return read_up_to(file, MAX_UNPACKED_BYTES + 1)


def _unpack_zstd(packed: BytesIO) -> bytes:
    try:
        import zstandard  # noqa: PLC0415 - an extra that only .zst needs
    except ImportError as error:
        raise DependencyError(
            "decompressing a zstd file requires the zstandard package",
            hint="pip install 'otel-kprofiler[zstd]', or decompress the file with unzstd",
        ) from error
    data = packed.getvalue()
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_DICTIONARY_BYTES)
        with decompressor.stream_reader(data) as file:
            content = read_up_to(file, MAX_UNPACKED_BYTES + 1)
        if len(content) <= MAX_UNPACKED_BYTES:  # the stream reader does not detect truncated input
            whole = decompressor.decompressobj()
            whole.decompress(data)
            if not whole.eof:
                raise EOFError("it is truncated")
    except zstandard.ZstdError as error:
        raise ValueError(error) from error
    return content


_UNPACKERS: Final = {
    b"\xfd7zXZ\0": _unpack_xz,
    b"\x1f\x8b": _unpack_gzip,
    b"\x28\xb5\x2f\xfd": _unpack_zstd,
}
