"""Converts Go's ``.gopclntab`` to ``.eh_frame`` with a search table, for x86-64.

Go's compiler writes no ``.eh_frame``, and frame pointers skip the caller of a function that has no
frame, or was interrupted in its prologue. The Go runtime unwinds with ``.gopclntab``, which has the
frame size at every instruction. Format: ``runtime/symtab.go`` and ``_func`` in
``runtime/runtime2.go`` of Go 1.21 to 1.26.

:func:`main` runs in a child process that imports only a few modules of this package:

    ADDRESS ORIGIN PAIRS TABLE TEXT SEGMENT… < file > number of pairs, pairs, frames

ADDRESS is the address of the new ``.eh_frame``, and ORIGIN the base of the search table's pairs.
The other arguments are parts of the file, as offset:size:address: PAIRS has the existing pairs,
TABLE ``.gopclntab``, TEXT ``.text``, and each SEGMENT is a loaded segment.
"""

from __future__ import annotations

import itertools
import mmap
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.unwinding.frame_writing import (
    BY_RSP,
    CIE_REST,
    NO_CALLER,
    NO_RULE,
    RBP_KEPT,
    RBP_LOST,
    SIGRETURN,
    Rows,
    Segment,
    make_program,
    pack_entry,
    pack_number,
    pack_tables,
    write_tables,
)

_HEADER: Final = struct.Struct("<IHBB8Q")
_MAGIC: Final = 0xFFFFFFF1
_ROW: Final = struct.Struct("<II")
_FUNCTION: Final = struct.Struct("<Ii8xI21xB")
_TEXT: Final = struct.Struct("<Q")
_TEXT_AT: Final = 22 * _TEXT.size
"""Offset of ``text`` in ``moduledata``, whose first word points to the table."""
_TOP_FRAME, _WRITES_SP = 1, 2
_LONG: Final = 0x80  # set in all bytes of a varint except the last

_CIE: Final = struct.pack("<II24s", 28, 0, b"\1zR\0" + CIE_REST)
_SIGNAL_CIE: Final = struct.pack("<II28s", 32, 0, b"\1zRS\0" + CIE_REST)
_CFA_OFFSET: Final = b"\x0e"  # def_cfa_offset
_CODES: Final[dict[int, bytes]] = {}  # by frame size
_SAVED: Final = b"\x86\2"  # offset rbp 2: at CFA - 16
_ON_OTHER_STACK: Final = b"\x0f\2\x76\x10"  # def_cfa_expression: breg6 16

_BY_R12: Final = b"\x0f\2\x7c"  # def_cfa_expression: breg12 with a one-byte offset
_MAX_BYTE: Final = 0x3F

_PUSH: Final = b"\x55"  # push %rbp
_PROLOGUE: Final = b"\x55\x48\x89\xe5"  # push %rbp; mov %rsp, %rbp
_KEEP_SP: Final = b"\x49\x89\xe4"  # mov %rsp, %r12
_RESTORE_SP: Final = b"\x4c\x89\xe4"  # mov %r12, %rsp
_LOAD_BYTES: Final = 4
_LOADS: Final = tuple(
    bytes([0x48 | high, 0x8B, 0x60 | base, 0x38])  # mov 56(base), %rsp: g.sched.sp
    for high in (0, 1)
    for base in (0, 1, 2, 3, 5, 6, 7)
)
_INJECTED: Final = (b"runtime.asyncPreempt", b"runtime.sigpanic", b"runtime.cgocallback")
"""Functions whose caller is at an instruction that is not a call: the instruction that a signal
interrupted, or, for Go functions called by C, the instruction at which the goroutine called C.
"""
_CALL_OF_C: Final = re.compile(
    rb"\x55\x48\x89\xe5"  # push %rbp; mov %rsp, %rbp
    rb"(?>.*?\x48\x89\xe2)"  # mov %rsp, %rdx
    rb"(?>.*?\x48\x8b\x66\x38)(?P<switched>)"  # mov 56(%rsi), %rsp: g.sched.sp of g0
    rb"(?>.*?\x48\x89\x7c\x24(?P<goroutine>[\x08-\x3f])"  # mov %rdi, GOROUTINE(%rsp)
    rb"\x48\x8b\x7f\x08\x48\x29\xd7"  # mov 8(%rdi), %rdi: end of its stack; sub %rdx, %rdi
    rb"\x48\x89(?P<store>\x3c\x24|\x7c\x24.))(?P<kept>)"  # mov %rdi, DEPTH(%rsp)
    rb"(?>.*?\x48\x89\xf4)(?P<back>)"  # mov %rsi, %rsp
    rb"(?>.*?\x48\x83\xec.)(?P<left>)"  # sub $N, %rsp: path for calls from another stack
    rb"(?>.*?\x48\x89\xf4)(?P<left_back>)",
    re.DOTALL,
)
"""Code of asmcgocall."""
_BY_GOROUTINE: Final = b"\x0f\x0c\x77%c\x06\x23\x08\x06\x77%c\x06\x1c\x23\x10"
"""def_cfa_expression: breg7 GOROUTINE; deref; plus_uconst 8; deref; breg7 DEPTH; deref; minus;
plus_uconst 16."""
_PARTS: Final = ("switched", "kept", "back", "left", "left_back")
_BY_RBP: Final = b"\x0c\6\x10"  # def_cfa rbp 16
_SPARE_BYTES: Final = 4096
"""Bytes by which the result may exceed the table; it usually has a fifth of the table's size."""
_CHECKED, _FIT = 200, 0.9
"""Number of functions to check for an initial push of rbp, and the required fraction."""

File = bytes | mmap.mmap
Sizes = Sequence[tuple[int, int]]
"""The frame sizes in a function, each with the code offset at which it ends."""
_Shape = tuple[int, int, bool, bytes]
"""Properties of all functions with equal frame sizes: size of the code, offset of the required push
of rbp (-1 for none), whether rbp is saved in each frame, and CFA program (empty for a function that
pops its return address).
"""


class Function(NamedTuple):
    """A row of the table: start of a function, number of its name, location of its frame sizes."""

    start: int
    name: int
    sizes: int
    flags: int


class Table:
    """Parses ``.gopclntab``. Raises ``ValueError`` if the table is damaged or unsupported."""

    def __init__(self, data: bytes) -> None:
        if len(data) < _HEADER.size:
            raise ValueError("no table")
        magic, _, quantum, word, count, _, text, names, *_, sizes, rows = _HEADER.unpack_from(data)
        if (magic, quantum, word) != (_MAGIC, 1, 8):
            raise ValueError(f"an unsupported table version: {magic:#x}")
        if max(names, sizes, rows + (count + 1) * _ROW.size) > len(data):
            raise ValueError("the table is cut off")
        self._data, self._sizes_at, self._rows_at = data, sizes, rows
        self.count: int = count
        self.names_at: int = names
        self.text: int = text

    def functions(self, step: int = 1) -> Iterator[Function]:
        """Yields every ``step``-th function. Raises ``struct.error`` for a damaged row."""
        data = self._data
        for at in range(self._rows_at, self._rows_at + self.count * _ROW.size, step * _ROW.size):
            row = self._rows_at + _ROW.unpack_from(data, at)[1]
            yield Function._make(_FUNCTION.unpack_from(data, row))

    def number(self, name: bytes) -> int:
        """Returns the number of a function name; -1 if the table does not contain it."""
        at = self._data.find(b"\0" + name + b"\0", self.names_at)
        return at + 1 - self.names_at if at >= 0 else -1

    def sizes(self, at: int) -> Sizes:
        """Returns a function's frame sizes. Raises ``IndexError`` or ``ValueError`` for damage."""
        data = self._data
        sizes: list[tuple[int, int]] = []
        at, size, end = at + self._sizes_at, -1, 0
        while True:
            # Most varints have one byte; calling parse_number would double the total time.
            change, at = (data[at], at + 1) if data[at] < _LONG else parse_number(data, at)
            if not change and sizes:
                return sizes
            size += change >> 1 ^ -(change & 1)
            length, at = (data[at], at + 1) if data[at] < _LONG else parse_number(data, at)
            end += length
            sizes.append((end, size))


def parse_number(data: bytes, at: int) -> tuple[int, int]:
    """Parses a varint of up to 32 bits, and returns the number and its end."""
    value = 0
    for shift in range(0, 29, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _LONG:
            return value, at
    raise ValueError("a number has more than 32 bits")


def make_rows(sizes: Sizes, saves: bool) -> Rows:
    """Makes the unwind rows of a function.

    Args:
        sizes: frame sizes.
        saves: whether the caller's rbp is saved at the top of each frame; otherwise its location is
            unknown.
    """
    rows, at, now = [(0, b"" if saves else RBP_LOST)], 0, 0
    for end, size in sizes:
        if size != now:
            code = _CODES.get(size) or _CODES.setdefault(size, _CFA_OFFSET + pack_number(size + 8))
            if saves and not (size and now):
                code += _SAVED if size else RBP_KEPT
            rows.append((at, code))
            now = size
        at = end
    return rows


def make_switch(code: bytes, rows: Rows, behind: bytes) -> Rows:
    """Makes the rows of a function that switches to the stack of ``m.g0``.

    Args:
        code: the function's code.
        rows: unwind rows from the frame sizes alone, ascending by code offset.
        behind: unwind rule after the switch.
    """
    at = _find_load(code, 0)
    if at < 0:
        return [(0, NO_RULE)]
    rows = [row for row in rows if row[0] < at] + [(at, behind)]
    if behind == _ON_OTHER_STACK:
        back = _find_load(code, at)
        if back < 0 or not code.startswith(_PROLOGUE):
            return [(0, NO_RULE)]
        rows.append((back, NO_RULE))
    return rows


def _find_load(code: bytes, start: int) -> int:
    """Returns the end of the next instruction that loads rsp; -1 if there is none."""
    loads = [at for load in _LOADS if (at := code.find(load, start)) >= 0]
    return min(loads) + _LOAD_BYTES if loads else -1


def make_detour(sizes: Sizes, rows: Rows, left: int, back: int) -> Rows:
    """Makes the rows of a function that calls the vDSO on another stack, and keeps its rsp in r12.

    Args:
        sizes: the function's frame sizes.
        rows: unwind rows from the frame sizes alone, ascending by code offset.
        left: end of the instruction that saves rsp.
        back: end of the instruction that restores rsp.
    """
    size = next((size for end, size in sizes if left < end), 0) + 8
    if size > _MAX_BYTE:
        return [(0, NO_RULE)]
    returned = next((end for end, size in sizes if not size and end > back), back)
    return [
        *(row for row in rows if row[0] < left),
        (left, _BY_R12 + bytes([size])),
        (back, BY_RSP + pack_number(size)),
        *(row for row in rows if back < row[0] < returned),
        (returned, NO_RULE),  # the function's fallback without a vDSO
    ]


def make_call_of_c(code: bytes, rows: Rows) -> Rows:
    """Makes the rows of asmcgocall, which calls C on the stack of ``m.g0``.

    It saves the goroutine and the distance of its frame from the end of the goroutine's stack,
    because C may call Go functions, for which the runtime may move that stack.

    Args:
        code: the function's code.
        rows: unwind rows from the frame sizes alone, ascending by code offset.
    """
    parts = _CALL_OF_C.match(code)
    if not parts:
        return [(0, NO_RULE)]
    depth = parts["goroutine"][0] - 8
    if parts["store"] != (b"\x7c\x24%c" % depth if depth else b"\x3c\x24"):
        return [(0, NO_RULE)]
    switched, kept, back, left, left_back = map(parts.end, _PARTS)
    by_rsp = BY_RSP + pack_number(16)
    return [
        *(row for row in rows if row[0] < switched),
        (switched, _ON_OTHER_STACK),
        (kept, _BY_GOROUTINE % (depth + 8, depth)),
        (back, by_rsp),
        *(row for row in rows if back < row[0] < left),
        (left, _BY_RBP),
        (left_back, by_rsp),
        *(row for row in rows if left_back < row[0]),
    ]


class Code:
    """Reads the file's bytes by address."""

    def __init__(self, file: File, segments: Iterable[Segment]) -> None:
        self._file, self._segments = file, list(segments)

    def read(self, address: int, size: int) -> bytes:
        """Reads up to ``size`` bytes; bytes outside the segments are omitted."""
        for segment in self._segments:
            at = address - segment.address
            if 0 <= at < segment.size:
                at += segment.offset
                return self._file[at : at + size]
        return b""

    def find_texts(self, table: int) -> Iterator[int]:
        """Yields the word ``text`` of each possible ``moduledata`` that points to the table."""
        wanted = _TEXT.pack(table)
        for segment in self._segments:
            at, end = segment.offset, segment.offset + segment.size
            while (at := self._file.find(wanted, at, end)) >= 0:
                word = self.read(segment.address + at - segment.offset + _TEXT_AT, _TEXT.size)
                if len(word) == _TEXT.size:
                    yield from _TEXT.unpack(word)
                at += len(wanted)


class FrameMaker:
    """Makes entries of ``.eh_frame`` for functions.

    Args:
        table: the file's ``.gopclntab``.
        code: reads the file's machine code by SVMA.
        text: SVMA to which function offsets are relative, from :func:`find_text`.
        address: SVMA of the first byte of the new ``.eh_frame``.
    """

    def __init__(self, table: Table, code: Code, text: int, address: int) -> None:
        self._table, self._code, self._text, self._address = table, code, text, address
        self._shapes: dict[int, _Shape] = {}  # by location of the frame sizes, often shared
        self._injected = {table.number(name) for name in _INJECTED} - {-1}
        self._handler = table.number(b"runtime.sigtramp")  # the stack continues above this function
        self._switches = {
            table.number(b"runtime.mcall"): NO_CALLER,  # its callee never returns
            table.number(b"runtime.systemstack"): _ON_OTHER_STACK,
        }
        self._call_of_c = table.number(b"runtime.asmcgocall")
        self._called_by_c = table.number(b"runtime.cgocallback")  # same frames on both stacks
        self.frames = bytearray(_CIE + _SIGNAL_CIE)
        self.pairs: list[tuple[int, int]] = []

    def add(self, function: Function) -> None:
        """Add an entry; raises like :class:`Table`."""
        start, name, place, flags = function
        start += self._text
        if not place:
            return  # not Go code
        size, push, saves, program = self._shapes.get(place) or self._add_shape(place)
        if not program:
            return  # the function pops its return address
        if push < 0 and self._code.read(start, len(SIGRETURN)) == SIGRETURN:
            return  # handled by the BPF program
        if push >= 0 and self._code.read(start + push, 1) != _PUSH:
            saves = False
            program = make_program(make_rows(self._table.sizes(place), saves))
        if flags & (_TOP_FRAME | _WRITES_SP) and name != self._handler:
            program = make_program(self._special_rows(function, saves))
        at = len(self.frames)
        address = self._address + at
        back = at + 4 - len(_CIE) * (name in self._injected)
        self.frames += pack_entry(back, start, address, size, program)
        self.pairs.append((start, address))

    def _add_shape(self, place: int) -> _Shape:
        sizes = self._table.sizes(place)
        depths = [depth for _, depth in sizes]
        push = sizes[0][0] - 1 if any(depths) and not depths[0] else -1
        saves = push >= 0 or not any(depths)
        program = make_program(make_rows(sizes, saves)) if min(depths) >= 0 else b""
        return self._shapes.setdefault(place, (sizes[-1][0], push, saves, program))

    def _special_rows(self, function: Function, saves: bool) -> Rows:
        if function.flags & _TOP_FRAME:
            return [(0, NO_CALLER)]
        sizes = self._table.sizes(function.sizes)
        code = self._code.read(self._text + function.start, sizes[-1][0])
        rows = make_rows(sizes, saves)
        if function.name == self._called_by_c:
            return rows
        if function.name == self._call_of_c:
            return make_call_of_c(code, rows)
        left, back = code.find(_KEEP_SP), code.find(_RESTORE_SP)
        if 0 <= left < back:
            return make_detour(sizes, rows, left + len(_KEEP_SP), back + len(_RESTORE_SP))
        return make_switch(code, rows, self._switches.get(function.name, NO_RULE))


def find_text(table: Table, address: int, code: Code, start: int) -> int:
    """Finds the address that the table's function offsets are relative to (``runtime.text``).

    Go stores this address in ``moduledata`` and, before 1.26, in the table. A file that is
    relocated on load may have neither, and C code may precede the Go code, so candidates are
    checked against the code.

    Args:
        table: the file's ``.gopclntab``.
        address: SVMA of ``.gopclntab``.
        code: reads the file's machine code by SVMA.
        start: SVMA of ``.text``.

    Raises:
        ValueError: no candidate has code that fits the table.
    """
    # Most functions push rbp.
    pushes = _find_pushes(table, max(1, table.count // (2 * _CHECKED))) or _find_pushes(table, 1)
    for text in itertools.chain((table.text, start), code.find_texts(address)):
        if sum(code.read(text + at, 1) == _PUSH for at in pushes) > _FIT * len(pushes):
            return text
    raise ValueError("the code does not match the table")


def _find_pushes(table: Table, step: int) -> list[int]:
    """Finds the code offset at which every ``step``-th function first pushes rbp."""
    pushes = []
    for function in table.functions(step):
        sizes = table.sizes(function.sizes) if function.sizes else ()
        if [size for _, size in sizes[:2]] == [0, 8]:
            pushes.append(function.start + sizes[0][0] - 1)
    return pushes


def make_tables(
    file: File, table_at: Segment, start: int, segments: Sequence[Segment], address: int
) -> FrameMaker:
    """Makes entries for all functions.

    Args:
        file: content of the file.
        table_at: location of ``.gopclntab`` in file and memory.
        start: SVMA of ``.text``.
        segments: the segments that the file loads.
        address: SVMA of the first byte of the new ``.eh_frame``.

    Raises:
        ValueError: the table is damaged or of an unknown version.
    """
    table = Table(file[table_at.offset : table_at.offset + table_at.size])
    code = Code(file, segments)
    try:
        maker = FrameMaker(table, code, find_text(table, table_at.address, code, start), address)
        for function in table.functions():
            maker.add(function)
            if len(maker.frames) > table_at.size + _SPARE_BYTES:
                raise ValueError("the unwind entries are larger than the table")
    except (IndexError, struct.error) as error:
        raise ValueError(f"a function: {error}") from error
    return maker


def main() -> None:
    """Make the tables of a file; see :func:`write_tables`."""
    address, origin = map(int, sys.argv[1:3])
    parts = [Segment(*map(int, word.split(":"))) for word in sys.argv[3:]]
    pairs, table, text, *segments = parts

    def make(file: mmap.mmap) -> bytes:
        maker = make_tables(file, table, text.address, segments, address)
        others = file[pairs.offset : pairs.offset + pairs.size]
        return pack_tables(maker.pairs, bytes(maker.frames), others, origin)

    write_tables(make)
