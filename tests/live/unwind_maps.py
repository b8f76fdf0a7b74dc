"""Creates the unwinder's maps without its BPF program, and requests to load mapped files."""

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from samplers import spawned

from otel_kprofiler.bpf import PAGE_BYTES, bpf_call, create_inner_map
from otel_kprofiler.host import FileRequest, modification_time
from otel_kprofiler.model import FileKey
from otel_kprofiler.unwinding import MapSizes, TableMaps

_HASH, _ARRAY, _ARRAY_OF_MAPS, _RINGBUF = 1, 2, 12, 27
_MMAPABLE = 1 << 10
_FS_IOC_GETVERSION = 0x80087601


class _Create(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint32 * 7), ("name", ctypes.c_char * 16))


class _Element(ctypes.Structure):
    _fields_ = (
        ("map_fd", ctypes.c_uint32),
        ("key", ctypes.c_char_p),
        ("value", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _ById(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("next", ctypes.c_uint32), ("flags", ctypes.c_uint32))


def _create(kind, key, value, entries, *, flags=0, inner=0):
    words = (ctypes.c_uint32 * 7)(kind, key, value, entries, flags, inner, 0)
    return bpf_call(0, _Create(words, b"test"))


class FileValue(NamedTuple):
    state: int
    slot: int
    serial: int


class Header(NamedTuple):
    serial: int
    version: int
    origin: int
    frames_address: int
    entries: int
    frames_at: int
    frames_bytes: int
    texts: int


class KernelMaps:
    """The maps that the BPF program uses, with the same lookups as in the program."""

    def __init__(self, files=256, slots=64, ring_bytes=4096):
        template = create_inner_map(1, "template")
        self.fds = {
            "files": _create(_HASH, 16, 16, files),
            "tables": _create(_ARRAY_OF_MAPS, 4, 4, slots, inner=template),
            "table_used": _create(_ARRAY, 4, 8, slots, flags=_MMAPABLE),
            "table_epoch": _create(_ARRAY, 4, 8, 1, flags=_MMAPABLE),
            "file_requests": _create(_RINGBUF, 0, 0, ring_bytes),
        }
        os.close(template)
        self.sizes = MapSizes(files, slots, ring_bytes)

    def open(self):
        return TableMaps(self.fds.__getitem__, self.sizes)

    def lookup(self, name, key, size):
        """Returns the value of a map element, or None if there is no element."""
        value = ctypes.create_string_buffer(size)
        try:
            bpf_call(1, _Element(self.fds[name], key, ctypes.addressof(value), 0))
        except FileNotFoundError:
            return None
        return value.raw

    def file(self, key):
        raw = self.lookup("files", key.pack(), 16)
        return raw and FileValue(*struct.unpack("=III4x", raw))

    def table(self, slot):
        """Returns all bytes of a table, or None if the slot is empty."""
        raw = self.lookup("tables", slot.to_bytes(4, "little"), 4)
        if raw is None:
            return None
        fd = bpf_call(14, _ById(int.from_bytes(raw, "little"), 0, 0))  # BPF_MAP_GET_FD_BY_ID
        try:
            entries = next(
                int(line.split()[1])
                for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                if line.startswith("max_entries")
            )
            with mmap.mmap(fd, entries * PAGE_BYTES, prot=mmap.PROT_READ) as mapped:
                return mapped[:]
        finally:
            os.close(fd)

    def loaded(self, key):
        """Returns a loaded table's header and bytes; locates the table as the BPF program does."""
        value = self.file(key)
        assert value is not None
        assert value.state == 1
        data = self.table(value.slot)
        header = Header(*struct.unpack_from("=IIQQIIII", data))
        assert header.serial == value.serial
        return header, data

    def use(self, slot, at_ns):
        """Records that a sample used a table."""
        with mmap.mmap(self.fds["table_used"], mmap.PAGESIZE) as mapped:
            struct.pack_into("=Q", mapped, 8 * slot, at_ns)

    def epoch(self):
        return int.from_bytes(self.lookup("table_epoch", bytes(4), 8), "little")

    def close(self):
        for fd in self.fds.values():
            os.close(fd)


def device_number(st_dev):
    return os.major(st_dev) << 20 | os.minor(st_dev)


def request_of(path, tgid=0, start=0, end=0, size=None):
    """Returns a request for the file at a path, as if a process had mapped it."""
    status = os.stat(path)
    key = FileKey(status.st_ino, device_number(status.st_dev), 0)
    size = status.st_size if size is None else size
    return FileRequest(key, start, end, 0, tgid, tgid, size, modification_time(status.st_mtime_ns))


def mapped_request(pid, inode, device, size=0, generation=0):
    """Returns the BPF program's request for an inode that a process has mapped as code."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if "x" in fields[1] and int(fields[4]) == inode:
            start, end = (int(number, 16) for number in fields[0].split("-"))
            key = FileKey(inode, device, generation)
            modified = modification_time(
                os.stat(f"/proc/{pid}/map_files/{start:x}-{end:x}").st_mtime_ns
            )
            return FileRequest(key, start, end, int(fields[2], 16), pid, pid, size, modified)
    raise LookupError(f"process {pid} does not execute inode {inode}")


def compile_c(path, source, *options):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    subprocess.run(
        ["gcc", "-x", "c", "-o", path, *options, "-"], input=source, text=True, check=True
    )
    return path


WAITS = '#include <unistd.h>\nint main(void) { write(1, "\\n", 1); return pause(); }\n'
"""A program that writes a newline when it starts, then waits forever."""


@contextmanager
def running(*command, **options):
    """Runs a program such as :data:`WAITS`, and yields the process when the program waits."""
    with spawned(*command, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout.read(1) == b"\n"
        yield process
