"""Recognizes vmlinux, kernel modules and their debug files, in which addresses are RVAs."""

import os
from typing import Final

from otel_kprofiler.elf import ElfError, FileSource, read_elf, read_sections

_EXPORTS: Final = b"__ksymtab"
_ELF: Final = b"\x7fELF"
_TYPE_AT: Final = 16
_ET_REL: Final = 1
_BEGINNING_BYTES: Final = 18


def is_kernel_file(path: str) -> bool:
    """Returns whether a file is vmlinux, a module (compressed or not), or a debug file of either.

    Also returns True for non-ELF files, so that the kernel file reader rejects them.
    Raises ``OSError`` if the file cannot be opened.
    """
    if os.path.basename(path).startswith("vmlinux"):
        return True
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        source = FileSource(fd, os.fstat(fd).st_size)
        if source.size < _BEGINNING_BYTES:
            return True
        beginning = source.read(0, _BEGINNING_BYTES)
        kind = int.from_bytes(beginning[_TYPE_AT:], "little")
        if not beginning.startswith(_ELF) or kind == _ET_REL:
            return True
        sections = read_sections(source, read_elf(source, None))
        return any(section.name == _EXPORTS for section in sections)
    except ElfError:
        return False
    finally:
        os.close(fd)
