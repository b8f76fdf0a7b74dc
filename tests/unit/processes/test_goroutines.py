"""Goroutine labels are located in synthetic memory images of Go programs."""

import os
import struct

import pytest

from otel_kprofiler.bpf import ContextKind, ContextPlace, GoOffsets
from otel_kprofiler.processes.goroutines import LAYOUTS, UnsupportedGoError, find_goroutines
from otel_kprofiler.processes.thread_pointer import LoadedObject

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64")
BASE, DATA = 0x400000, 0x500000
NOTE = struct.pack("<III4s", 4, 8, 4, b"Go\0\0") + b"build id"
OTHER_OWNER = NOTE.replace(b"Go", b"GN")
OTHER_KIND = NOTE.replace(b"\4\0\0\0Go", b"\3\0\0\0Go")
_PT_LOAD, _PT_NOTE, _PT_TLS = 1, 4, 7


class Program:
    """A program's memory: headers, a note, and data that contains the compiler's version."""

    def __init__(self, version="go1.26.1", *, note=NOTE, storage=None, gap=0, flags=2, at=64):
        segments = [
            (_PT_LOAD, 5, 0, BASE, BASE, 0x1000, 0x1000, 0x1000),
            (_PT_NOTE, 4, 0x800, BASE + 0x800, BASE + 0x800, len(note), len(note), 4),
            (_PT_LOAD, 6, 0x1000, DATA, DATA, gap + 256, 0x100000, 0x1000),
        ]
        if storage is not None:
            segments.append((_PT_TLS, 4, 0, DATA, DATA, 0, storage, 8))
        headers = b"".join(struct.pack("<IIQQQQQQ", *segment) for segment in segments)
        ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
        head = struct.pack(
            "<16sHHIQQQIHHHHHH", ident, 2, 62, 1, 0, at, 0, 0, 64, 56, len(segments), 0, 0, 0
        )
        code = (head + headers).ljust(0x800, b"\0") + note
        block = b"\xff Go buildinf:" + bytes((8, flags)) + bytes(16)
        block += bytes((len(version),)) + version.encode()
        code = code.ljust(0x1000, b"\0") + headers.ljust(0x1000, b"\0")
        self.parts = {BASE: code, DATA: bytes(gap) + block.ljust(256, b"\0")}
        self.headers_at = BASE + at
        self.listed = 0

    def read(self, address, size):
        for start, data in self.parts.items():
            if start <= address and address + size <= start + len(data):
                return data[address - start : address - start + size]
        raise OSError(f"no {size} bytes at {address:#x}")

    def list_objects(self):
        self.listed += 1
        library = LoadedObject(0x10000, 0x20000, "/library")
        return [library, LoadedObject(BASE, DATA + 0x1000, "/program")]

    def find(self):
        return find_goroutines(self.read, self.headers_at, self.list_objects)


@pytest.mark.parametrize(
    ("version", "kind", "offsets"),
    [
        ("go1.21", ContextKind.GO_LABEL_MAP, (48, 192, 344)),
        ("go1.23.12", ContextKind.GO_LABEL_MAP, (48, 192, 352)),
        ("go1.24.0", ContextKind.GO_LABELS, (48, 192, 352)),
        ("go1.25.7 X:nodwarf5", ContextKind.GO_LABELS, (48, 184, 344)),
        ("go1.26.8", ContextKind.GO_LABELS, (48, 184, 352)),
    ],
)
def test_goroutine_label_offsets_match_the_go_version(version, kind, offsets):
    assert Program(version).find() == ContextPlace(-8, kind=kind, go=GoOffsets(*offsets))


def test_the_goroutine_pointer_of_pie_programs_is_below_the_thread_pointer():
    assert Program(storage=8).find().offset == -8


@pytest.mark.parametrize("gap", [16, 0x3FFF0, 0x40000, 0x200000])
def test_the_go_version_is_found_anywhere_in_writable_data(gap):
    assert Program(gap=gap).find().go == LAYOUTS["1.26"][1]


@pytest.mark.parametrize(
    "version",
    ["go1.20.14", "go1.99", "go1.260.1", "go1.26rc1", "go1.26-fork", "devel go1.26-0a1b", "x", ""],
)
def test_the_error_for_an_unsupported_go_version_names_the_version(version):
    with pytest.raises(
        UnsupportedGoError, match=f"^{version or 'an unknown version of Go'} is not"
    ):
        Program(version).find()


@pytest.mark.parametrize(("gap", "flags"), [(8, 2), (0, 0)])
def test_a_go_version_in_an_unexpected_location_or_format_is_unknown(gap, flags):
    with pytest.raises(UnsupportedGoError, match="unknown version"):
        Program(gap=gap, flags=flags).find()


def test_programs_with_additional_thread_local_variables_are_rejected():
    with pytest.raises(UnsupportedGoError, match="thread-local variables other than Go's"):
        Program(storage=16).find()


@pytest.mark.parametrize("note", [b"", OTHER_OWNER, OTHER_KIND])
def test_programs_without_a_go_note_are_not_treated_as_go_programs(note):
    assert Program(note=note).find() is None


def test_only_programs_with_moved_headers_are_looked_up_among_the_mapped_files():
    program, moved = Program(), Program(at=0x1000)
    assert (program.find(), program.listed) == (moved.find(), 0)
    assert (moved.find().go, moved.listed) == (LAYOUTS["1.26"][1], 2)


def test_an_elf_header_that_does_not_belong_to_the_program_headers_is_ignored():
    program = Program()
    program.headers_at += 56
    assert (program.find().go, program.listed) == (LAYOUTS["1.26"][1], 1)


@pytest.mark.parametrize("headers_at", [0, 0x30040])
def test_a_program_that_only_loads_go_libraries_is_not_a_go_program(headers_at):
    program = Program()
    program.headers_at = headers_at
    assert program.find() is None
    program.headers_at, program.parts[BASE] = BASE + 64, bytes(0x1000)
    assert program.find() is None
