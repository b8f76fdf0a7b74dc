"""Converts Go's ``.gopclntab`` to ``.eh_frame`` with a search table, for x86-64 and arm64.

Go's compiler writes no ``.eh_frame``. Unwinding by frame pointers skips the caller if a function
has no frame or was interrupted in its prologue. The Go runtime unwinds with ``.gopclntab``, which
records the frame size at every instruction.

:func:`make` runs in a child process that imports only a few modules of this package. The child
receives files, and replies with the number of pairs, the pairs and the frames. Each file is sent
with these arguments:

MACHINE ADDRESS ORIGIN PAIRS TABLE TEXT SEGMENT…

MACHINE is the file's ``e_machine``, ADDRESS the address of the new ``.eh_frame``, and ORIGIN the
base of the pairs in the search table. The remaining arguments are parts of the file, as
offset:size:address: the existing pairs, ``.gopclntab``, ``.text``, and the loaded segments.
"""

import itertools
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from otel_kprofiler.speedups import MAX_SEGMENTS, add_go_functions, pack_pairs
from otel_kprofiler.unwinding.frame_writing import (
    Segment,
    join_tables,
    make_program,
    pack_cie,
    pack_entry,
    pack_tables,
)
from otel_kprofiler.unwinding.go_arm64 import Arm64
from otel_kprofiler.unwinding.go_table import Code, File, Function, Shape, Table
from otel_kprofiler.unwinding.go_x86 import X86

_INJECTED: Final = (b"runtime.asyncPreempt", b"runtime.sigpanic", b"runtime.cgocallback")
"""Functions whose return address is that of an interrupted instruction, or of a call into C."""
_SPARE_BYTES: Final = 4096
"""Number of bytes by which the entries may exceed the size of ``.gopclntab``."""
_CHECKED, _FIT = 200, 0.9
"""Number of functions whose register-saving instructions are checked; fraction that must match."""
_MAX_KEPT: Final = 1 << 15
_MAX_KEPT_BYTES: Final = 256
"""Maximum number of shapes cached across files, and maximum length of their keys, in bytes."""
_PAIR: Final = struct.Struct("<QQ")
_MAX_ADDRESS: Final = 1 << 62
"""Upper bound on addresses in the compiled loop, which computes with 64 bits."""
_MACHINES: Final[Mapping[int, type[X86 | Arm64]]] = {62: X86, 183: Arm64}
"""The classes that generate rows, by ``e_machine``: EM_X86_64 and EM_AARCH64 (elf.h)."""
_kept: Final[dict[type[X86 | Arm64], dict[bytes, Shape]]] = {}


class Shapes(dict[int, Shape]):
    """Maps the location of a function's frame sizes in a table to the function's frame shape.

    Shapes are also cached across files, keyed by packed frame sizes, because many programs contain
    the same functions.
    """

    def __init__(self, table: Table, machine: X86 | Arm64) -> None:
        super().__init__()
        self._table, self.machine = table, machine
        self._kept = _kept.setdefault(type(machine), {})

    def __missing__(self, place: int) -> Shape:
        packed = self._table.packed_sizes(place)
        shape = self._kept.get(packed)
        if shape is None:
            shape = self.machine.make_packed_shape(packed)
            if shape is None:
                shape = self.machine.make_shape(self._table.sizes(place))
            elif len(packed) <= _MAX_KEPT_BYTES:
                if len(self._kept) >= _MAX_KEPT:
                    self._kept.clear()
                self._kept[packed] = shape
        self[place] = shape
        return shape


class FrameMaker:
    """Generates ``.eh_frame`` entries for functions. The first entry is at SVMA ``address``.

    ``text`` is the SVMA that function offsets are relative to, from :func:`find_text`.
    """

    def __init__(self, table: Table, code: Code, text: int, address: int, shapes: Shapes) -> None:
        self._table, self._code, self._text, self._address = table, code, text, address
        self._shapes, self._machine = shapes, shapes.machine
        machine = shapes.machine
        self._injected = {table.number(name) for name in _INJECTED} - {-1}
        self._special = {table.number(name) for name in machine.SPECIAL_NAMES} - {-1}
        self._special_flags, self._sigreturn = machine.SPECIAL, machine.SIGRETURN
        cies = [pack_cie(letters, machine.CIE_REST) for letters in (b"zR", b"zRS")]
        self._signal_cie_at = len(cies[0])
        self.frames = bytearray(b"".join(cies))
        self.packed_pairs = bytearray()

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Returns each function's start and the address of its entry."""
        return list(_PAIR.iter_unpack(self.packed_pairs))

    def add_all(self, most_bytes: int) -> None:
        """Add entries for all functions of the table. For errors, see :meth:`add`."""
        table, code = self._table, self._code
        if (
            add_go_functions is None
            or not isinstance(self._machine, X86)
            or not code.is_plain(MAX_SEGMENTS)
            or max(self._text, self._address) >= _MAX_ADDRESS
        ):
            self.add(table.functions(), most_bytes)
            return
        apart = tuple(self._injected | self._special)
        layout = (*table.layout, self._text, self._address, most_bytes, self._special_flags)
        index = 0
        while True:
            index = add_go_functions(
                table.data, code.file, self._sigreturn, layout, index, code.segments, apart,
                self.frames, self.packed_pairs,
            )  # fmt: skip
            if index >= table.count:
                break
            self.add([table.function(index)], most_bytes)
            index += 1
        self._check_size(most_bytes)

    def add(self, functions: Iterable[tuple[int, int, int, int]], most_bytes: int) -> None:
        """Add entries for functions, each given as the fields of a :class:`Function`.

        Raises the same exceptions as :class:`Table`, and ``ValueError`` if the entries exceed
        ``most_bytes``.
        """
        shapes, read, frames, pairs = self._shapes, self._code.read, self.frames, self.packed_pairs
        for offset, name, place, flags in functions:
            if not place:
                continue  # not Go code
            start = self._text + offset
            size, saving_at, saving, program = shapes[place]
            special = not program or flags & self._special_flags or name in self._special
            if saving:
                special = special or read(start + saving_at, len(saving)) != saving
            elif read(start, len(self._sigreturn)) == self._sigreturn:
                continue  # handled by the BPF program
            if special:
                function = Function(offset, name, place, flags)
                made = self._make_program(function, read(start, size))
                if made is None:
                    continue
                program = made
            at = len(frames)
            address = self._address + at
            back = at + 4 - self._signal_cie_at * (name in self._injected)
            frames += pack_entry(back, start, address, size, program)
            pairs += _PAIR.pack(start, address)
            if at > most_bytes:
                break
        self._check_size(most_bytes)

    def _check_size(self, most_bytes: int) -> None:
        if len(self.frames) > most_bytes:
            raise ValueError("the unwind entries are larger than .gopclntab")

    def _make_program(self, function: Function, code: bytes) -> bytes | None:
        rows = self._machine.make_rows(function, self._table.sizes(function.sizes), code)
        return None if rows is None else make_program(rows, self._machine.QUANTUM)


def find_text(table: Table, address: int, code: Code, start: int, shapes: Shapes) -> int:
    """Finds the address that the table's function offsets are relative to (``runtime.text``).

    Go stores ``runtime.text`` in ``moduledata`` and, before 1.26, in the table. In a
    position-independent file, both copies may be missing, and C code may precede the Go code, so
    candidates are checked against the code. Raises ``ValueError`` if no candidate matches.
    ``address`` and ``start`` are the SVMAs of ``.gopclntab`` and ``.text``.
    """
    step = max(1, table.count // (2 * _CHECKED))
    savings = _find_savings(table, step, shapes) or _find_savings(table, 1, shapes)
    for text in itertools.chain((table.text, start), code.find_texts(address)):
        fits = sum(code.read(text + at, len(saving)) == saving for at, saving in savings)
        if fits > _FIT * len(savings):
            return text
    raise ValueError("the code does not match .gopclntab")


def _find_savings(table: Table, step: int, shapes: Shapes) -> list[tuple[int, bytes]]:
    savings = []
    for start, _, place, _ in table.functions(step):
        shape = shapes[place] if place else None
        if shape and shape.saving:
            savings.append((start + shape.saving_at, shape.saving))
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
    """Generates entries for all functions.

    ``start`` is the SVMA of ``.text``, ``address`` the SVMA of the new ``.eh_frame``, and
    ``machine`` the file's ``e_machine``. Raises ``ValueError`` if the table is malformed or has an
    unknown version, or if the machine is not supported.
    """
    if machine not in _MACHINES:
        raise ValueError(f".gopclntab is not supported on ELF machine {machine}")
    kind = _MACHINES[machine]
    table = Table(file[table_at.offset : table_at.offset + table_at.size], kind.QUANTUM)
    code, shapes = Code(file, segments), Shapes(table, kind(table))
    try:
        text = find_text(table, table_at.address, code, start, shapes)
        maker = FrameMaker(table, code, text, address, shapes)
        maker.add_all(table_at.size + _SPARE_BYTES)
    except (IndexError, struct.error) as error:
        raise ValueError(f"the row for a function is malformed: {error}") from error
    return maker


def make(words: list[str], file: mmap.mmap) -> bytes:
    """Build the tables for a received file."""
    machine, address, origin = map(int, words[:3])
    parts = [Segment(*map(int, word.split(":"))) for word in words[3:]]
    pairs, table, text, *segments = parts
    maker = make_tables(file, table, text.address, segments, address, machine=machine)
    others = file[pairs.offset : pairs.offset + pairs.size]
    search = pack_pairs(maker.packed_pairs, origin) if pack_pairs and not others else None
    if search is None:
        return pack_tables(maker.pairs, bytes(maker.frames), others, origin)
    return join_tables(search, maker.frames)
