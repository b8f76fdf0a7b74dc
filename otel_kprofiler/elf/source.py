"""Provides random access to the bytes of an ELF file, through a descriptor or in memory."""

import os
from typing import Protocol

from otel_kprofiler.elf.problem import ElfError, ElfProblem

_IOV_MAX_BYTES = 0x7FFFF000  # maximum size of one preadv(2)


class Source(Protocol):
    """Random access to a file's bytes."""

    @property
    def size(self) -> int:
        """Returns the length of the file in bytes."""

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes. Raises :class:`ElfError` if the file is too short."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target``. Raises :class:`ElfError` if the file is too short."""


class FileSource:
    """Reads a file through its descriptor, which the caller closes. Caches nothing."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        _check_range(offset, size, self.size)
        try:
            data = os.pread(self.fd, size, offset)
        except OSError as error:
            raise ElfError(ElfProblem.UNREADABLE, error.strerror or str(error)) from error
        if len(data) != size:
            raise ElfError(
                ElfProblem.CHANGED, f"read only {len(data)} of {size} bytes at offset {offset}"
            )
        return data

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` without an intermediate copy."""
        _check_range(offset, len(target), self.size)
        done = 0
        while done < len(target):
            part = target[done : done + _IOV_MAX_BYTES]
            try:
                count = os.preadv(self.fd, [part], offset + done)
            except OSError as error:
                raise ElfError(ElfProblem.UNREADABLE, error.strerror or str(error)) from error
            finally:
                part.release()
            if not count:
                raise ElfError(
                    ElfProblem.CHANGED,
                    f"read only {done} of {len(target)} bytes at offset {offset}",
                )
            done += count


class ImageSource:
    """A file image in memory, such as the vDSO."""

    def __init__(self, image: bytes | bytearray) -> None:
        self._image = memoryview(image)
        self.size = len(image)

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        _check_range(offset, size, self.size)
        return bytes(self._image[offset : offset + size])

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target``."""
        _check_range(offset, len(target), self.size)
        target[:] = self._image[offset : offset + len(target)]


def _check_range(offset: int, size: int, end: int) -> None:
    if not 0 <= offset <= end or not 0 <= size <= end - offset:
        raise ElfError(
            ElfProblem.OUT_OF_BOUNDS,
            f"{size} bytes at offset {offset} extend past the end of the file ({end} bytes)",
        )
