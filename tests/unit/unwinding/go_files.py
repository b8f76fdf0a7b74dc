"""Generates test files with tables in the format of Go's linker."""

import struct
from typing import NamedTuple

from otel_kprofiler.unwinding.frame_writing import Segment
from tests.wire import pack_varint

TEXT, TEXT_SIZE = 0x401000, 0x4000
TABLE_ADDRESS = 0x500000
PUSH = b"\x55\x48\x89\xe5"


class Made(NamedTuple):
    """A synthetic function: its name, code, frame sizes by end offset, and flags."""

    name: bytes
    code: bytes
    sizes: tuple[tuple[int, int], ...]
    flags: int = 0


def pack_sizes(sizes, quantum):
    out, size, end = b"", -1, 0
    for until, now in sizes:
        change = now - size
        out += pack_varint(((change << 1) ^ (change >> 63)) & 0xFFFFFFFF)
        out += pack_varint((until - end) // quantum)
        size, end = now, until
    return out + b"\0"


def go_file(functions, *, magic=0xFFFFFFF1, text=TEXT, quantum=1):
    """Returns a file, the location of its table, and its segments.

    ``text`` is the code's address according to the table.
    """
    shared = {}
    code, names, sizes, rows, table = bytearray(), b"\0", b"\0", [], b""
    for made in functions:
        start = len(code)
        code += made.code + b"\xcc" * (-len(made.code) % 32)
        at = 0
        if made.sizes:
            # Functions with equal sizes share an entry, as with Go's linker.
            if made.sizes not in shared:
                shared[made.sizes] = len(sizes)
                sizes += pack_sizes(made.sizes, quantum)
            at = shared[made.sizes]
        rows.append((start, len(names), at, made.flags))
        names += made.name + b"\0"
    code += bytes(TEXT_SIZE - len(code))
    names_at = 72
    sizes_at = names_at + len(names)
    rows_at = sizes_at + len(sizes)
    places, bodies = [], b""
    for start, name, at, flags in rows:
        places.append((start, 8 * (len(rows) + 1) + len(bodies)))
        bodies += struct.pack("<Ii8xI21xB2x", start, name, at, flags)
    places.append((len(code), 0))
    table = struct.pack(
        "<IHBB8Q", magic, 0, quantum, 8, len(rows), 0, text, names_at, 0, 0, sizes_at, rows_at
    )
    table += names + sizes + b"".join(struct.pack("<II", *place) for place in places) + bodies
    table_at = Segment(len(code), len(table), TABLE_ADDRESS)
    return bytes(code) + table, table_at, [Segment(0, len(code), TEXT), table_at]


ORDINARY = Made(b"main.work", PUSH + bytes(60), ((1, 0), (5, 8), (60, 40), (61, 8), (64, 0)))


def pack_words(*words):
    return struct.pack(f"<{len(words)}I", *words)


NOP, RETURN, CALL = 0xD503201F, 0xD65F03C0, 0x94000010
STORE_FP, SET_FP = 0xF81F83FD, 0xD10023FD  # stur x29, [sp, #-8]; sub x29, sp, #8
LOAD_FP = 0xF85F83FD  # ldur x29, [sp, #-8]
ARM64_PROLOGUE = (0xF81D0FFE, STORE_FP, SET_FP)  # str x30, [sp, #-48]!
ARM64_EPILOGUE = (LOAD_FP, 0xF84307FE, RETURN)  # ldr x30, [sp], #48
ARM64_SIZES = ((4, 0), (60, 48), (64, 0))
ARM64_ORDINARY = Made(
    b"main.work", pack_words(*ARM64_PROLOGUE, *[CALL] * 10, *ARM64_EPILOGUE), ARM64_SIZES
)
