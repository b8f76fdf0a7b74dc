"""Small real ELF files for tests, and functions that change them."""

import lzma
import struct
from pathlib import Path

from otel_kprofiler.elf import ImageSource, read_elf
from otel_kprofiler.unwinding.refusal import refusing
from otel_kprofiler.unwinding.table import find_tables

DATA = Path(__file__).parents[2] / "data" / "unwinding"
NAMES = ("plain.so", "personality.so", "static")
PT_LOAD, PT_NOTE, PT_GNU_EH_FRAME = 1, 4, 0x6474E550


def content(name):
    return lzma.decompress((DATA / f"{name}.xz").read_bytes())


def find(data):
    """Returns a file's tables, or None if the file has no search table."""
    source = ImageSource(bytes(data))
    with refusing():
        return find_tables(source, read_elf(source, "x86_64"))


class Elf:
    """An ELF file with headers that tests modify."""

    def __init__(self, name="plain.so"):
        self.data = bytearray(content(name))

    def program_header(self, kind, flags=0):
        """Returns the offset of the first program header with the given type and flags."""
        start, count = struct.unpack_from("<Q", self.data, 0x20)[0], self.data[0x38]
        for at in range(start, start + 56 * count, 56):
            result, has = struct.unpack_from("<II", self.data, at)
            if result == kind and has & flags == flags:
                return at
        raise LookupError(kind)

    def search_at(self):
        """Returns the offset of .eh_frame_hdr; in these files, address and offset are equal."""
        return struct.unpack_from("<Q", self.data, self.program_header(PT_GNU_EH_FRAME) + 8)[0]

    def put(self, form, at, *values):
        struct.pack_into(form, self.data, at, *values)
        return self
