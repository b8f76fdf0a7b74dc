"""Locates goroutine labels in a process, at offsets that depend on its Go version.

A Go program contains a note with its build id and, in writable data, a block with its Go version
(debug/buildinfo). The thread-local variable ``g`` points to the current goroutine. In statically
linked programs, ``g`` is at offset -8 from the thread pointer. In other programs, ``g`` is in
``runtime.tlsg``, the program's only thread-local variable. The struct layouts (runtime/runtime2.go)
for 64-bit processors are taken from the DWARF in each version's first and last release.
"""

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from otel_kprofiler.bpf import ContextKind, ContextPlace, GoOffsets
from otel_kprofiler.elf import MACHINES, ElfError, LoadedElf, Read, read_loaded
from otel_kprofiler.processes.thread_pointer import LoadedObject

_MAP, _SLICE = ContextKind.GO_LABEL_MAP, ContextKind.GO_LABELS
LAYOUTS: Final = {
    "1.21": (_MAP, GoOffsets(48, 192, 344)),
    "1.22": (_MAP, GoOffsets(48, 192, 344)),
    "1.23": (_MAP, GoOffsets(48, 192, 352)),
    "1.24": (_SLICE, GoOffsets(48, 192, 352)),
    "1.25": (_SLICE, GoOffsets(48, 184, 344)),
    "1.26": (_SLICE, GoOffsets(48, 184, 352)),
}
"""The representation of labels and the struct field offsets, by Go minor version."""
_STATIC_G: Final = -8
_POINTER_BYTES: Final = 8
_NOTE: Final = b"\4\0\0\0Go\0\0"  # type and owner of the build id (cmd/internal/buildid)
_MAX_NOTE_BYTES: Final = 4096
_MAGIC: Final = b"\xff Go buildinf:"
_ALIGNMENT: Final = 16
_FLAGS_AT, _VERSION_AT, _INLINE = 15, 32, 2
_MAX_VERSION: Final = 127  # fits in a one-byte varint
_CHUNK_BYTES: Final = 1 << 18
_MAX_DATA_BYTES: Final = 64 << 20


class UnsupportedGoError(Exception):
    """Raised for a Go program whose labels cannot be located. The message states the reason."""


def find_goroutines(
    read: Read, headers_at: int, list_objects: Callable[[], list[LoadedObject]]
) -> ContextPlace | None:
    """Locates a thread's goroutine labels; None if the program is not a Go program.

    Only x86-64 is supported. ``headers_at`` is the address of the executable's program headers; 0
    if unknown. ``list_objects`` is called only if the program headers are not in the executable's
    first page. Raises :class:`UnsupportedGoError` if the Go version or the thread-local storage is
    not supported, and ``OSError`` if the memory cannot be read.
    """
    elf = _read_program(read, headers_at, list_objects) if headers_at else None
    return _locate(read, elf) if elf and _is_go(read, elf) else None


def _read_program(
    read: Read, headers_at: int, list_objects: Callable[[], list[LoadedObject]]
) -> LoadedElf | None:
    """Reads the executable's headers; None if they are damaged.

    Linkers place the program headers after the ELF header, but tools such as patchelf move them.
    """
    with suppress(ElfError, OSError):
        elf = read_loaded(read, headers_at - headers_at % mmap.PAGESIZE, MACHINES["x86_64"])
        if elf.headers_at == headers_at:
            return elf
    for loaded in list_objects():
        if loaded.start < headers_at < loaded.end:
            with suppress(ElfError):
                return read_loaded(read, loaded.start, MACHINES["x86_64"])
            return None
    return None


def _is_go(read: Read, elf: LoadedElf) -> bool:
    return any(_NOTE in read(at, min(size, _MAX_NOTE_BYTES)) for at, size in elf.notes)


def _locate(read: Read, elf: LoadedElf) -> ContextPlace:
    version = _read_version(read, elf)
    minor = next((name for name in LAYOUTS if _is_release(version, name)), None)
    if minor is None:
        raise UnsupportedGoError(f"{version or 'an unknown version of Go'} is not supported")
    if elf.storage and elf.storage.size != _POINTER_BYTES:
        raise UnsupportedGoError("the program has thread-local variables other than Go's")
    kind, offsets = LAYOUTS[minor]
    offset = -elf.storage.distance if elf.storage else _STATIC_G
    return ContextPlace(offset, kind=kind, go=offsets)


def _is_release(version: str, minor: str) -> bool:
    """Returns whether a version is a release of ``minor``, not a release candidate or a fork."""
    prefix = f"go{minor}"
    patch = version.removeprefix(prefix).partition(" ")[0]
    is_patch = not patch or (patch[0] == "." and patch[1:].isdigit())
    return version.startswith(prefix) and is_patch


def _read_version(read: Read, elf: LoadedElf) -> str:
    """Reads the Go version from writable data; returns an empty string if it is not found."""
    for start, size in elf.writable:
        end = start + min(size, _MAX_DATA_BYTES)
        for at in range(start, end, _CHUNK_BYTES):
            data = read(at, min(_CHUNK_BYTES + _VERSION_AT + 1 + _MAX_VERSION, end - at))
            offset = data.find(_MAGIC)
            while offset >= 0:
                if (at + offset) % _ALIGNMENT == 0:
                    return _parse_version(data[offset:])
                offset = data.find(_MAGIC, offset + 1)
    return ""


def _parse_version(block: bytes) -> str:
    size = block[_VERSION_AT] if len(block) > _VERSION_AT else 0
    text = block[_VERSION_AT + 1 : _VERSION_AT + 1 + size]
    is_inline = len(block) > _FLAGS_AT and block[_FLAGS_AT] & _INLINE
    if not is_inline or size > _MAX_VERSION or len(text) != size or not text.isascii():
        return ""
    return text.decode()
