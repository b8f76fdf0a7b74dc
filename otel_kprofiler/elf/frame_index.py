"""Builds the search table for a file without ``.eh_frame_hdr``, such as a static executable.

:mod:`otel_kprofiler.unwinding.indexing` runs this file as a script. The script needs no privileges,
and imports nothing from the package, so that it starts in milliseconds. The arguments are the file
offset, the size and the address of ``.eh_frame``. For each function, the table contains two 32-bit
offsets from the address of ``.eh_frame``: that of the function, and that of its FDE.

    frame_index.py OFFSET SIZE ADDRESS < FILE > TABLE
"""

from __future__ import annotations

import os
import resource
import struct
import sys
from array import array
from heapq import merge
from typing import Final, NamedTuple

MEMORY_BYTES: Final = 160 << 20
"""Limit on the memory mapped after startup: the section, and 36 bytes per entry."""
_ENTRY: Final = struct.Struct("<II")  # length, CIE pointer (0 in a CIE)
_RUN: Final = 1 << 16  # entries per sorted run, at about 90 bytes each
_LENGTH_IS_64_BITS: Final = 0xFFFFFFF0

# struct formats, by DW_EH_PE_*
_FORMATS: Final = {0x00: "<Q", 0x03: "<I", 0x04: "<Q", 0x0B: "<i", 0x0C: "<q"}
_PC_RELATIVE: Final = 0x10
_LEB_SIGN: Final = 0x80
_ADDRESS_MASK: Final = (1 << 64) - 1


class Cie(NamedTuple):
    """The encoding of function start addresses in a CIE's FDEs."""

    struct: struct.Struct
    relative: bool


def make_pairs(frames: bytes, address: int, origin: int) -> bytes:
    """Builds the search table: the distances of each function and its FDE from ``origin``.

    ``address`` is the address of ``.eh_frame``. Raises ``ValueError`` if an entry is malformed, or
    has an encoding that compilers do not emit.
    """
    cies: dict[int, Cie] = {}
    starts, entries = array("Q"), array("Q")
    at, end = 0, len(frames)
    while at + _ENTRY.size <= end:
        length, back = _ENTRY.unpack_from(frames, at)
        if not length:
            at += 4  # terminator from crtend.o; a relinked file may have entries after it
            continue
        if length >= _LENGTH_IS_64_BITS or length < 4 or at + 4 + length > end:
            raise ValueError(f"an entry has an invalid length of {length} bytes")
        if back:
            cie_at = at + 4 - back
            cie = cies.get(cie_at)
            if cie is None:
                cie = cies[cie_at] = parse_cie(frames, cie_at)
            field = at + _ENTRY.size
            if field + cie.struct.size > at + 4 + length:
                raise ValueError("an FDE has no start address")
            (start,) = cie.struct.unpack_from(frames, field)
            if cie.relative:
                start += address + field
            starts.append(start & _ADDRESS_MASK)
            entries.append(address + at)
        at += 4 + length
    order = _sort(starts)  # ascending by start; entries with equal starts keep their order
    pairs = array("i", [0]) * (2 * len(order))
    try:
        pairs[::2] = array("i", (starts[index] - origin for index in order))
        pairs[1::2] = array("i", (entries[index] - origin for index in order))
    except OverflowError as error:
        raise ValueError("a function is too far from .eh_frame") from error
    return pairs.tobytes()


def _sort(values: array[int]) -> array[int]:
    get, count = values.__getitem__, len(values)
    runs = [
        array("I", sorted(range(at, min(at + _RUN, count)), key=get))
        for at in range(0, count, _RUN)
    ]
    return runs[0] if len(runs) == 1 else array("I", merge(*runs, key=get))


def parse_cie(frames: bytes, at: int) -> Cie:
    """Returns the address encoding that the CIE at offset ``at`` declares.

    Raises ``ValueError`` if the CIE is missing or malformed, or its format is unknown.
    """
    if not 0 <= at <= len(frames) - _ENTRY.size:
        raise ValueError("an FDE does not refer to a CIE")
    length, zero = _ENTRY.unpack_from(frames, at)
    body = frames[at + _ENTRY.size : at + 4 + length]
    if zero or length < 4 or len(body) != length - 4:
        raise ValueError("an FDE does not refer to a CIE")
    try:
        encoding = _find_encoding(body)
        return Cie(struct.Struct(_FORMATS[encoding & 0x0F]), bool(encoding & _PC_RELATIVE))
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(f"a CIE is malformed or unsupported ({error})") from error


def _find_encoding(body: bytes) -> int:
    """Returns the pointer encoding of FDEs: the argument of ``R`` in their CIE's augmentation.

    Raises ``ValueError`` if the augmentation is malformed.
    """
    end = body.index(0, 1)
    augmentation = body[1:end]
    if not augmentation:
        return 0  # DW_EH_PE_absptr: absolute, 8 bytes
    if augmentation[0] != ord("z"):
        raise ValueError(augmentation)
    at = end + 1
    for _ in range(4):  # skips alignment factors, return address register, augmentation length
        while body[at] & _LEB_SIGN:
            at += 1
        at += 1
    for letter in augmentation[1:]:
        if letter == ord("R"):
            encoding = body[at]
            if encoding & 0xE0:  # indirect, aligned, or relative to another base
                raise ValueError(encoding)
            return encoding
        if letter == ord("P"):
            at += 1 + struct.calcsize(_FORMATS[body[at] & 0x0F])
        elif letter == ord("L"):
            at += 1
        elif letter not in b"SB":
            raise ValueError(augmentation)
    return 0


def main() -> None:
    """Read ``.eh_frame`` from the file on standard input, and write its search table.

    On failure, write the reason to standard error, and exit.
    """
    with open("/proc/self/statm", "rb") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    memory = mapped + MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    offset, size, address = map(int, sys.argv[1:])
    try:
        frames = os.pread(0, size, offset)
        if len(frames) != size:
            raise ValueError("the file shrank while it was being read")  # noqa: TRY301 - one way out
        result = make_pairs(frames, address, address)
    except (ValueError, OSError, MemoryError) as error:
        raise SystemExit(str(error) or type(error).__name__) from error
    while result:
        result = result[os.write(1, result) :]
    os.write(2, b"\x04")  # the value of ``DONE`` in host/limited_children.py


if __name__ == "__main__":
    main()
