"""Parses the ELF notes in files, ``/sys/kernel/notes`` and ``/sys/module/*/notes``."""

import struct
from typing import Final, NamedTuple

from otel_kprofiler.model import BuildId

NT_GNU_BUILD_ID: Final = 3
_HEADER = struct.Struct("=III")  # namesz, descsz, type (elf(5), Elf64_Nhdr)


class Note(NamedTuple):
    """An ELF note; ``name`` excludes the terminating zero."""

    name: bytes
    type: int
    description: bytes


def parse_notes(data: bytes) -> list[Note]:
    """Parse the notes in a section, skipping a truncated last note."""
    notes = []
    position = 0
    while position + _HEADER.size <= len(data):
        name_size, description_size, note_type = _HEADER.unpack_from(data, position)
        name_start = position + _HEADER.size
        start = name_start + _aligned(name_size)
        end = start + description_size
        if end > len(data):
            break
        name = data[name_start : name_start + name_size].rstrip(b"\0")
        notes.append(Note(name, note_type, data[start:end]))
        position = start + _aligned(description_size)
    return notes


def find_build_id(data: bytes) -> BuildId | None:
    """Returns the GNU build id in a note section; None if the section has no build id."""
    for note in parse_notes(data):
        if note.name == b"GNU" and note.type == NT_GNU_BUILD_ID and note.description:
            return BuildId(note.description.hex())
    return None


def _aligned(size: int) -> int:
    return (size + 3) & ~3
