"""Runs the iterators in iterators.bpf.c, and lists the functions of all BPF programs.

Running the iterators needs CAP_BPF, CAP_PERFMON and BTF; ``kernel.kptr_restrict`` has no effect.
"""

import os
import struct
from typing import Final

from otel_kprofiler.bpf import PROGRAMS, Loader, ObjectSpec, iterate
from otel_kprofiler.model import Ksymbol, ModuleKind

_SOURCE: Final = PROGRAMS / "iterators.bpf.c"
_OBJECT: Final = PROGRAMS / "iterators.bpf.o"
_PROGRAM: Final = "list_programs"
_ROW: Final = struct.Struct("=QQQII")  # struct row; then the name
_READ_BYTES: Final = 256 * 1024


def read_iterator(loader: Loader, name: str) -> bytes:
    """Run a program from iterators.bpf.c and return the program's output.

    Raises ``OSError`` if there is no such iterator, and the exceptions from :meth:`Loader.load`.
    """
    loaded = loader.load(ObjectSpec(_SOURCE, _OBJECT, (name,), {}))
    try:
        reader = iterate(loaded.program_fd(name))
    finally:
        loaded.close()
    pieces = []
    try:
        while piece := os.read(reader, _READ_BYTES):
            pieces.append(piece)
    finally:
        os.close(reader)
    return b"".join(pieces)


def parse_program_rows(data: bytes) -> list[Ksymbol]:
    """Parse the rows from ``list_programs``. Raises ``ValueError`` if the rows are malformed."""
    symbols, at = [], 0
    while at < len(data):
        if len(data) - at < _ROW.size:
            raise ValueError("a row from the program iterator is truncated")
        start, end, load_time_ns, number, name_bytes = _ROW.unpack_from(data, at)
        at += _ROW.size + name_bytes
        name = data[at - name_bytes : at].rstrip(b"\0").decode("utf-8", "backslashreplace")
        if at > len(data) or end < start:
            raise ValueError("a row from the program iterator is malformed")
        symbols.append(Ksymbol(start, end - start, name, ModuleKind.BPF, load_time_ns, number))
    return symbols


def read_programs(loader: Loader) -> list[Ksymbol]:
    """Reads the functions in all loaded programs.

    Raises the same exceptions as :func:`read_iterator`, and ``ValueError`` for malformed rows.
    """
    return parse_program_rows(read_iterator(loader, _PROGRAM))
