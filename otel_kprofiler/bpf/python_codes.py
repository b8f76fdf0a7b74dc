"""Parses the records in the description ring: code objects, and newly seen processes.

See python_types.bpf.h for the structs.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.bpf.ring import record_spans
from otel_kprofiler.model import PythonCode
from otel_kprofiler.text import escape_surrogates

_HEAD: Final = struct.Struct("=QII")  # code id or image; kind; fragment size or process id
_PROGRAM: Final = struct.Struct("=3Q")
_DESCRIPTION: Final = struct.Struct("=QIIQQIIIHHBB6x")
_PIECE, _WHOLE, _SEEN = 0, 1, 2
_CPU_SHIFT: Final = 27
_ENCODINGS: Final = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}


class Program(NamedTuple):
    """Identifies a program by its executable's inode and the size of its loaded code.

    Attributes:
        device: device of the executable, in the kernel's encoding (``MKDEV``).
        inode: inode number of the executable; 0 if unknown.
        code_pages: size of the process's executable mappings, in pages.
    """

    device: int
    inode: int
    code_pages: int


class ProcessSeen(NamedTuple):
    """A sampled process whose current program is not registered.

    Attributes:
        image: distinguishes successive programs run by a process, and processes with the same pid.
    """

    tgid: int
    image: int
    program: Program = Program(0, 0, 0)


class CodeParser:
    """Assembles code objects from their descriptions; must not be used concurrently."""

    def __init__(self) -> None:
        # Each CPU sends the description of one code object at a time: line table fragments, then
        # the other fields.
        self._tables: dict[int, tuple[int, bytearray]] = {}

    def parse(self, chunk: bytes) -> Iterator[PythonCode | ProcessSeen]:
        """Yields the code objects whose descriptions end in a chunk, and newly seen processes.

        Strings are unchecked copies of the process's memory, truncated to 508 bytes. Raises
        ``ValueError`` if the chunk is malformed.
        """
        for start, end in record_spans(chunk):
            if end - start < _HEAD.size:
                raise ValueError(f"the record at byte {start} is too short")
            code_id, kind, size = _HEAD.unpack_from(chunk, start)
            if kind == _PIECE:
                self._keep(code_id, chunk[start + _HEAD.size : end], size)
            elif kind == _SEEN and end - start >= _HEAD.size + _PROGRAM.size:
                program = Program._make(_PROGRAM.unpack_from(chunk, start + _HEAD.size))
                yield ProcessSeen(size, code_id, program)
            elif kind == _WHOLE and end - start >= _DESCRIPTION.size:
                yield self._describe(chunk, start, end)
            else:
                raise ValueError(f"the record at byte {start} has the unknown kind {kind}")

    def _keep(self, code_id: int, piece: bytes, size: int) -> None:
        if len(piece) != size:
            raise ValueError(f"a line table fragment has {len(piece)} bytes instead of {size}")
        cpu = code_id >> _CPU_SHIFT
        pending_id, table = self._tables.get(cpu, (0, bytearray()))
        if pending_id != code_id:  # the table is left over from a failed description
            table = bytearray()
        table += piece
        self._tables[cpu] = code_id, table

    def _describe(self, chunk: bytes, start: int, end: int) -> PythonCode:
        (
            code_id, _, process, address, image, first_line, traceable, table_bytes,
            file_bytes, name_bytes, file_width, name_width,
        ) = _DESCRIPTION.unpack_from(chunk, start)  # fmt: skip
        file = start + _DESCRIPTION.size
        name = file + file_bytes
        if name + name_bytes != end:
            raise ValueError(
                f"the length of the description at byte {start} does not match its strings"
            )
        pending_id, table = self._tables.pop(code_id >> _CPU_SHIFT, (0, bytearray()))
        whole = pending_id == code_id and len(table) == table_bytes
        return PythonCode(
            code_id,
            process,
            address,
            image,
            _decode(chunk[file:name], file_width),
            _decode(chunk[name:end], name_width),
            first_line,
            traceable,
            bytes(table) if whole else b"",
        )


def _decode(text: bytes, width: int) -> str:
    """Decodes a string, escaping the surrogates that stand for bytes that are not UTF-8."""
    encoding = _ENCODINGS.get(width, "latin-1")
    try:
        return escape_surrogates(text.decode(encoding, "surrogatepass"))
    except UnicodeDecodeError:  # not a Python string
        return text.decode(encoding, "replace")
