"""The BPF program's unwinder as native code, for other processor architectures."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from otel_kprofiler.bpf import PAGE_BYTES, PROCESSORS, PROGRAMS, KernelOffsets, pack_unwind_config
from otel_kprofiler.bpf.unwind import RB_TREE
from otel_kprofiler.elf import ElfFile, FileSource, Source, read_elf
from otel_kprofiler.model import UserStack, parse_user_stack
from otel_kprofiler.unwinding.image import image_pages, write_image
from otel_kprofiler.unwinding.table import Tables, find_tables
from otel_kprofiler.unwinding.vdso_frames import make_vdso_tables

SOURCE = Path(__file__).with_name("native.c")
# The offsets in native.c: task[], mm[], struct vma, file[], struct inode, super.
KERNEL = KernelOffsets(
    RB_TREE, 0, (0, 8, 0, 8, 16, 24, 32, 0, 8, 16, 24, 32, 40, 48, 0, 0, 8, 16, 24, 32, 40, 0)
)
_ROW = struct.Struct("=qiii8B16x4x")  # excludes preserved registers and padding
_MAX_WORK = 1_000_000
_STACK_BYTES = 1536


def build(folder: Path, sources: Path = PROGRAMS) -> Path:
    target = folder / "native.so"
    command = [
        "gcc", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-O1", "-std=gnu11", "-w", f"-I{sources}",
        "-o", str(target), str(SOURCE),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return target


ANONYMOUS: Final = (1 << 64) - 1
"""The inode number for mappings without a file."""


class NativeRow(NamedTuple):
    """The fields of ``struct row``."""

    cfa_offset: int
    fp_offset: int
    ra_offset: int
    post: int
    cfa_kind: int
    cfa_column: int
    fp: int
    fp_column: int
    ra: int
    ra_column: int
    sp: int
    signal: int


class NativeUnwinder:
    """Unwinds one process. Only one instance may exist, since the program's state is global."""

    def __init__(self, built: Path, machine: str) -> None:
        self._code = ctypes.CDLL(str(built))
        self._code.unwind_process.restype = ctypes.c_uint64
        self._machine = machine
        self._kept: list[object] = []
        settings = pack_unwind_config(
            PROCESSORS[machine], KERNEL, page_bytes=PAGE_BYTES, max_work=_MAX_WORK
        )
        self._code.begin(settings)

    def add_memory(self, start: int, content: bytes) -> None:
        self._kept.append(content)
        self._code.add_memory(ctypes.c_uint64(start), ctypes.c_uint64(len(content)), content)

    def add_table(self, path: Path, inode: int) -> int:
        """Loads a file's unwind tables, if any, as the agent does, and returns the table slot."""
        with path.open("rb") as file:
            source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
            elf = read_elf(source, self._machine)
            tables = find_tables(source, elf) or (None if inode else make_vdso_tables(source, elf))
            return self.add_made(source, tables, elf, inode)

    def add_made(self, source: Source, tables: Tables | None, elf: ElfFile, inode: int) -> int:
        """Loads the given unwind tables for a file, if any, and returns the table slot."""
        pages = image_pages(tables) if tables else 0
        image = (ctypes.c_char * (pages * PAGE_BYTES))()
        if tables:
            with memoryview(image).cast("B") as view:
                write_image(view, source, tables, elf, inode + 1)
        self._kept.append(image)
        return self._code.add_table(ctypes.c_uint64(inode), image, ctypes.c_uint64(len(image)))

    def add_mapping(self, start: int, end: int, offset: int, inode: int) -> None:
        """Adds the next executable mapping. Inode 0 stands for the vDSO, ANONYMOUS for no file."""
        self._code.add_mapping(*map(ctypes.c_uint64, (start, end, offset, inode)))

    def unwind(self, registers: bytes, base: int, memory: bytes) -> UserStack:
        """Unwinds from an interrupt, given ``pt_regs`` and a copy of the memory at ``base``."""
        stack = ctypes.create_string_buffer(_STACK_BYTES)
        self.add_memory(base, memory)
        size = self._code.unwind_process(registers, 127, stack)
        self._code.drop_memory()
        return parse_user_stack(stack.raw[:size])

    def row(self, slot: int, address: int) -> NativeRow | None:
        """Returns the row for an address, or None if there is no row."""
        result = ctypes.create_string_buffer(_ROW.size)
        error = self._code.find_row(slot, ctypes.c_uint64(address), result)
        return NativeRow(*_ROW.unpack(result.raw)) if error == 0 else None
