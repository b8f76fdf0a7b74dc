"""Finds and verifies the interpreter of this process."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType
from typing import NamedTuple

from otel_kprofiler.bpf import PythonProcess
from otel_kprofiler.elf import FileSource
from otel_kprofiler.host import (
    Access,
    FileRequest,
    MappedFileError,
    MemoryMapping,
    open_mapped,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.interpreters.binary import Interpreter, find_interpreter
from otel_kprofiler.interpreters.proof import prove
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal
from otel_kprofiler.model import FileKey


class OwnInterpreter(NamedTuple):
    """This process's interpreter, the interpreter's runtime addresses, and the key of its file."""

    interpreter: Interpreter
    process: PythonProcess
    file: FileKey


def open_own() -> OwnInterpreter:
    """Find and verify this process's interpreter. Raises :class:`InterpreterRefused` on failure."""
    if sys.implementation.name != "cpython":
        raise InterpreterRefused(Refusal.UNKNOWN_VERSION, sys.implementation.name)
    files, code_type = Access(), id(CodeType)
    try:
        mapping = _find_mapping(list(parse_mappings(read_maps(files, "self"))), code_type)
        file = FileKey(mapping.inode, mapping.device, 0)
        opened = open_mapped(_make_request(file, mapping), files)
    except (OSError, MappedFileError) as error:
        raise InterpreterRefused(Refusal.DAMAGED, str(error)) from error
    try:
        interpreter = find_interpreter(FileSource(opened.fd, opened.status.st_size))
    finally:
        opened.close()
    if interpreter is None:
        raise InterpreterRefused(Refusal.NO_SYMBOLS, opened.path)
    process = interpreter.in_process(code_type - interpreter.code_type)
    prove(interpreter.layout, process)
    return OwnInterpreter(interpreter, process, file)


def _find_mapping(mappings: list[MemoryMapping], address: int) -> MemoryMapping:
    return next(mapping for mapping in mappings if mapping.start <= address < mapping.end)


def _make_request(file: FileKey, mapping: MemoryMapping) -> FileRequest:
    pid, tid = os.getpid(), threading.get_native_id()
    return FileRequest(file, mapping.start, mapping.end, mapping.file_offset, pid, tid)
