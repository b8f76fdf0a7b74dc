"""Finds and verifies this process's interpreter."""

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
    open_mapped,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.interpreters.binary import Interpreter, find_interpreter
from otel_kprofiler.interpreters.proof import prove
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal
from otel_kprofiler.model import FileKey


class OwnInterpreter(NamedTuple):
    """This process's interpreter, with its runtime addresses and file key."""

    interpreter: Interpreter
    process: PythonProcess
    file: FileKey


def open_own() -> OwnInterpreter:
    """Find and verify this process's interpreter. Raises :class:`InterpreterRefused` on failure."""
    if sys.implementation.name != "cpython":
        raise InterpreterRefused(Refusal.UNKNOWN_VERSION, sys.implementation.name)
    files, code_type = Access(), id(CodeType)
    try:
        mappings = parse_mappings(read_maps(files, "thread-self"))
        mapping = next(each for each in mappings if each.start <= code_type < each.end)
        file = FileKey(mapping.inode, mapping.device, 0)
        pid, tid = os.getpid(), threading.get_native_id()
        place = mapping.start, mapping.end, mapping.file_offset
        opened = open_mapped(FileRequest(file, *place, pid, tid), files)
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
