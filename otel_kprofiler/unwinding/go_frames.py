"""Converts Go's ``.gopclntab`` to ``.eh_frame`` with a search table, for x86-64 and arm64.

Go's compiler writes no ``.eh_frame``. Unwinding by frame pointers skips the caller of a function
that has no frame or was interrupted in its prologue. The Go runtime unwinds with ``.gopclntab``,
which has the frame size at every instruction.

:func:`main` runs in a child process that imports only a few modules of this package:

MACHINE ADDRESS ORIGIN PAIRS TABLE TEXT SEGMENT… < file > number of pairs, pairs, frames

MACHINE is the file's ``e_machine``, ADDRESS the address of the new ``.eh_frame``, and ORIGIN the
base of the search table's pairs. The other arguments are parts of the file, as offset:size:address:
the existing pairs, ``.gopclntab``, ``.text``, and the loaded segments.
"""

import itertools
import mmap
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from otel_kprofiler.unwinding.frame_writing import (
    Segment,
    make_program,
    pack_cie,
    pack_entry,
    pack_tables,
    write_tables,
)
from otel_kprofiler.unwinding.go_arm64 import Arm64
from otel_kprofiler.unwinding.go_table import Code, File, Function, Shape, Table
from otel_kprofiler.unwinding.go_x86 import X86

_INJECTED: Final = (b"runtime.asyncPreempt", b"runtime.sigpanic", b"runtime.cgocallback")
"""Functions whose return address is that of an interrupted instruction, or of a call into C."""
_SPARE_BYTES: Final = 4096
"""Bytes by which entries may exceed ``.gopclntab``. Usually, they take a fifth of that size."""
_CHECKED, _FIT = 200, 0.9
"""Number of functions whose register-saving instructions are checked; share that must match."""
_MACHINES: Final[Mapping[int, type[X86 | Arm64]]] = {62: X86, 183: Arm64}
"""The makers of rows, by ``e_machine``: EM_X86_64 and EM_AARCH64 (elf.h)."""


class FrameMaker:
    """Makes ``.eh_frame`` entries for functions. The first entry is at SVMA ``address``.

    ``text`` is the SVMA that function offsets are relative to, from :func:`find_text`.
    """

    def __init__(
        self, table: Table, code: Code, text: int, address: int, machine: X86 | Arm64
    ) -> None:
        self._table, self._code, self._text, self._address = table, code, text, address
        self._machine = machine
        self._shapes: dict[int, Shape] = {}  # by the location of their frame sizes
        self._injected = {table.number(name) for name in _INJECTED} - {-1}
        self._special = {table.number(name) for name in machine.SPECIAL_NAMES} - {-1}
        cies = [pack_cie(letters, machine.CIE_REST) for letters in (b"zR", b"zRS")]
        self._signal_cie_at = len(cies[0])
        self.frames = bytearray(b"".join(cies))
        self.pairs: list[tuple[int, int]] = []

    def add(self, function: Function) -> None:
        """Add an entry. Raises the same exceptions as :class:`Table`."""
        start, name, place, flags = function
        start += self._text
        if not place:
            return  # not Go code
        machine = self._machine
        size, saving_at, saving, program = self._shapes.get(place) or self._add_shape(place)
        special = not program or flags & machine.SPECIAL or name in self._special
        if saving:
            special = special or self._code.read(start + saving_at, len(saving)) != saving
        elif self._code.read(start, len(machine.SIGRETURN)) == machine.SIGRETURN:
            return  # handled by the BPF program
        if special:
            code = self._code.read(start, size)
            rows = machine.make_rows(function, self._table.sizes(place), code)
            if rows is None:
                return
            program = make_program(rows, machine.QUANTUM)
        at = len(self.frames)
        address = self._address + at
        back = at + 4 - self._signal_cie_at * (name in self._injected)
        self.frames += pack_entry(back, start, address, size, program)
        self.pairs.append((start, address))

    def _add_shape(self, place: int) -> Shape:
        return self._shapes.setdefault(place, self._machine.make_shape(self._table.sizes(place)))


def find_text(table: Table, address: int, code: Code, start: int, machine: X86 | Arm64) -> int:
    """Finds the address that the table's function offsets are relative to (``runtime.text``).

    Go stores this address in ``moduledata`` and, before 1.26, in the table. A file that is
    relocated on load may have neither, and C code may precede the Go code, so candidates are
    checked against the code. Raises ``ValueError`` if no candidate fits. ``address`` is the SVMA of
    ``.gopclntab``, and ``start`` that of ``.text``.
    """
    step = max(1, table.count // (2 * _CHECKED))
    savings = _find_savings(table, step, machine) or _find_savings(table, 1, machine)
    for text in itertools.chain((table.text, start), code.find_texts(address)):
        fits = sum(code.read(text + at, len(saving)) == saving for at, saving in savings)
        if fits > _FIT * len(savings):
            return text
    raise ValueError("the code does not match .gopclntab")


def _find_savings(table: Table, step: int, machine: X86 | Arm64) -> list[tuple[int, bytes]]:
    savings = []
    for function in table.functions(step):
        shape = machine.make_shape(table.sizes(function.sizes)) if function.sizes else None
        if shape and shape.saving:
            savings.append((function.start + shape.saving_at, shape.saving))
    return savings


def make_tables(
    file: File,
    table_at: Segment,
    start: int,
    segments: Sequence[Segment],
    address: int,
    *,
    machine: int,
) -> FrameMaker:
    """Makes entries for all functions.

    ``start`` is the SVMA of ``.text``, ``address`` the SVMA of the new ``.eh_frame``, and
    ``machine`` the file's ``e_machine``. Raises ``ValueError`` if the table is damaged or of an
    unknown version, or if the machine is not supported.
    """
    if machine not in _MACHINES:
        raise ValueError(f".gopclntab is not supported on ELF machine {machine}")
    kind = _MACHINES[machine]
    table = Table(file[table_at.offset : table_at.offset + table_at.size], kind.QUANTUM)
    code, rows = Code(file, segments), kind(table)
    try:
        text = find_text(table, table_at.address, code, start, rows)
        maker = FrameMaker(table, code, text, address, rows)
        for function in table.functions():
            maker.add(function)
            if len(maker.frames) > table_at.size + _SPARE_BYTES:
                raise ValueError("the unwind entries are larger than .gopclntab")
    except (IndexError, struct.error) as error:
        raise ValueError(f"the row of a function is damaged: {error}") from error
    return maker


def main() -> None:
    """Make the tables of a file; see :func:`write_tables`."""
    machine, address, origin = map(int, sys.argv[1:4])
    parts = [Segment(*map(int, word.split(":"))) for word in sys.argv[4:]]
    pairs, table, text, *segments = parts

    def make(file: mmap.mmap) -> bytes:
        maker = make_tables(file, table, text.address, segments, address, machine=machine)
        others = file[pairs.offset : pairs.offset + pairs.size]
        return pack_tables(maker.pairs, bytes(maker.frames), others, origin)

    write_tables(make)
