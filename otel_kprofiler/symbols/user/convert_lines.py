"""Converts a file's DWARF data to a SymCache in a child process.

Reads the file from standard input, and writes the result to standard output and the cause of a
failure to standard error. The parent process limits memory and CPU time, because hostile DWARF can
cause the symbolic library to abort or to consume excessive resources.
"""

import errno
import mmap
import os
import resource
import struct
import sys
from contextlib import suppress
from typing import Final, Protocol, cast

from otel_kprofiler.elf import (
    FileSource,
    read_content,
    read_debug_elf,
    read_load_addresses,
    read_sections,
)
from otel_kprofiler.host import DONE, give_up_capabilities, limit_resources, write_all
from otel_kprofiler.symbols.user.symcache import VERSION

HEADER: Final = struct.Struct("<8sQQ")
"""Header before the SymCache: magic bytes, base address, and whether the SymCache is partial."""
MAGIC: Final = b"KPLINES1"
_SHOWN: Final = 200
_CHUNK_BYTES: Final = 1 << 20
_NICE: Final = 10
_DWO_NAMES: Final = (0x76, 0x2130)  # DW_AT_dwo_name, DW_AT_GNU_dwo_name
_FORM_IMPLICIT_CONST: Final = 0x21
_MAX_ABBREVIATIONS_BYTES: Final = 64 << 20


class _Stream(Protocol):
    def read(self, size: int) -> bytes:
        """Returns at most ``size`` bytes; empty at the end of the file."""


def main() -> None:
    """Convert the file; the only argument is the size limit for the output, in bytes."""
    sys.dont_write_bytecode = True  # the size limit might truncate a .pyc file
    limit_resources({resource.RLIMIT_FSIZE: int(sys.argv[1])})
    os.nice(_NICE)
    cause = os.dup(2)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)  # symbolic also writes to standard error
    try:
        _convert()
    except Exception as error:  # noqa: BLE001 - a third party's, reported to the parent
        os.write(cause, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:_SHOWN])
        # An OSError, such as ENOSPC, may be temporary, but EFBIG means that the output is too
        # large.
        may_pass = isinstance(error, OSError) and error.errno != errno.EFBIG
        os._exit(os.EX_TEMPFAIL if may_pass else 1)
    os.write(cause, DONE)
    os._exit(0)  # freeing memory would take time


def _convert() -> None:
    from cffi import FFI  # noqa: PLC0415 - within the limits
    from symbolic.debuginfo import Archive  # noqa: PLC0415
    from symbolic.symcache import SymCache  # noqa: PLC0415

    ffi = FFI()
    kind = ffi.typeof("uint8_t[]")  # imports pycparser; reading its files may require capabilities
    give_up_capabilities()
    data = ffi.from_buffer(kind, mmap.mmap(0, 0, prot=mmap.PROT_READ))
    made = SymCache.from_object(next(Archive.from_bytes(data).iter_objects()))
    if made.version != VERSION:
        raise ValueError(f"unsupported symcache version {made.version} (expected {VERSION})")
    source = FileSource(0, os.fstat(0).st_size)
    # symbolic takes the address of the first PT_LOAD as the base, even if it is not the lowest.
    base = next((start for start, _ in read_load_addresses(source)), 0)
    write_all(1, HEADER.pack(MAGIC, base, _is_partial(source)))
    stream = cast("_Stream", made.open_stream())
    while chunk := stream.read(_CHUNK_BYTES):
        write_all(1, chunk)


def _is_partial(source: FileSource) -> bool:
    """Returns whether parts of the DWARF are in other files (``-gsplit-dwarf``, ``dwz -m``)."""
    sections = read_sections(source, read_debug_elf(source))
    if any(section.name == b".gnu_debugaltlink" for section in sections):
        return True
    return any(
        has_split_units(read_content(source, section, _MAX_ABBREVIATIONS_BYTES))
        for section in sections
        if section.name == b".debug_abbrev"
    )


def has_split_units(content: bytes) -> bool:
    """Returns whether one of the abbreviations has a ``DW_AT_dwo_name`` (DWARF 5, 7.5.3)."""
    left = iter(content)

    def number() -> int:
        value = shift = 0
        while (byte := next(left)) >= 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    with suppress(StopIteration):
        while True:
            if not number():  # the end of a table
                continue
            number()
            next(left)
            while any(attribute := (number(), number())):
                name, form = attribute
                if name in _DWO_NAMES:
                    return True
                if form == _FORM_IMPLICIT_CONST:
                    number()
    return False
