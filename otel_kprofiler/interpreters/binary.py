"""Finds CPython in an ELF file (an executable or libpython).

CPython 3.10 and later store ``_PyRuntime`` in a separate section, ``.PyRuntime``. All other
addresses are looked up in the dynamic symbols, which strip(1) keeps.
"""

import mmap
import platform
import re
from typing import Final, NamedTuple

from otel_kprofiler.bpf import PYTHON_CFRAME, PythonLayout, PythonProcess
from otel_kprofiler.elf import (
    MACHINES,
    ElfError,
    ElfFile,
    ElfSymbol,
    Section,
    Source,
    find_offset,
    find_symbols,
    read_elf,
    read_sections,
)
from otel_kprofiler.interpreters.debug_offsets import COOKIE, MAX_BYTES, VERSION_AT
from otel_kprofiler.interpreters.eval_loop import find_loop
from otel_kprofiler.interpreters.layouts import Version, make_layout, parse_version
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal
from otel_kprofiler.model import BuildId, Segment

_SECTION: Final = b".PyRuntime"
_VERSION, _CODE_TYPE = b"Py_Version", b"PyCode_Type"
_EVAL: Final = b"_PyEval_EvalFrameDefault"
_ONLY_DEBUG: Final = b"_Py_NegativeRefcount"
_NAMES: Final = (_VERSION, _CODE_TYPE, _EVAL, _ONLY_DEBUG)
_LEAST_ENTRY_BYTES, _MOST_ENTRY_BYTES = 0x80, 0x110
_INDIRECT_JUMPS: Final = {
    "x86_64": re.compile(rb"\xff[\xe0-\xe7]"),  # jmp *%rax, …; the first match dispatches opcodes
    "aarch64": re.compile(rb"[\x00\x20\x40\x60\x80\xa0\xc0\xe0][\x00-\x03]\x1f\xd6"),  # br x0, …
}


class Interpreter(NamedTuple):
    """A Python interpreter found in an ELF file. Addresses are SVMAs.

    Attributes:
        runtime, code_type: addresses of ``_PyRuntime`` and ``PyCode_Type``.
        eval_loop: address ranges of ``_PyEval_EvalFrameDefault``, and of its cold part if the
            compiler split the function.
        entry_bytes: upper bound on the length of the loop's prologue, which runs before the loop's
            frame becomes the current frame; 0 if the loop has no such prologue.
        texts: executable segments of the file.
    """

    version: Version
    layout: PythonLayout
    runtime: int
    code_type: int
    eval_loop: tuple[range, ...]
    entry_bytes: int
    texts: tuple[Segment, ...]
    build_id: BuildId | None

    def find_load_bias(self, start: int, file_offset: int) -> int | None:
        """Returns the runtime address of SVMA 0; None if the mapping does not begin in code."""
        for text in self.texts:
            first = text.offset - text.offset % mmap.PAGESIZE
            if first <= file_offset < text.offset + text.size:
                return start - (text.address + file_offset - text.offset)
        return None

    def in_process(self, load_bias: int, image_tag: int = 0) -> PythonProcess:
        """Returns the interpreter's addresses in a process, where SVMA 0 is at ``load_bias``."""
        return PythonProcess(
            runtime_at=self.runtime + load_bias,
            code_type=self.code_type + load_bias,
            eval_start=self.eval_loop[0].start + load_bias,
            eval_bytes=self.entry_bytes,
            image_tag=image_tag,
        )


def find_interpreter(source: Source, machine: str = platform.machine()) -> Interpreter | None:
    """Finds CPython in a file; None if the file contains no CPython for this machine.

    ``machine`` is this machine's architecture, as named by uname(2). Raises
    :class:`InterpreterRefused` if it is unsafe to read the interpreter's frames.
    """
    try:
        elf = read_elf(source, machine)
        sections = read_sections(source, elf)
    except ElfError:
        return None  # malformed, not ELF, or for a different machine
    section = next((entry for entry in sections if entry.name == _SECTION), None)
    if section is None:
        return None
    try:
        return _read(source, elf, sections, section)
    except ElfError as error:
        raise InterpreterRefused(Refusal.DAMAGED, str(error)) from error


def _read(source: Source, elf: ElfFile, sections: list[Section], section: Section) -> Interpreter:
    symbols = find_symbols(source, sections, _NAMES)
    if _ONLY_DEBUG in symbols:
        raise InterpreterRefused(Refusal.DEBUG_BUILD)
    runtime = source.read(section.offset, min(section.size, MAX_BYTES))
    version = _find_version(source, elf, symbols, runtime)
    layout = make_layout(version, runtime)
    missing = [name.decode() for name in (_CODE_TYPE, _EVAL) if name not in symbols]
    if missing:
        raise InterpreterRefused(Refusal.NO_SYMBOLS, ", ".join(missing))
    entry_bytes = 0
    if layout.flags & PYTHON_CFRAME:
        entry_bytes = _find_entry_bytes(source, elf, symbols[_EVAL].address)
    return Interpreter(
        version,
        layout,
        section.address,
        symbols[_CODE_TYPE].address,
        find_loop(source, elf, symbols[_EVAL]),
        entry_bytes,
        elf.texts,
        elf.build_id,
    )


def _find_entry_bytes(source: Source, elf: ElfFile, at: int) -> int:
    """Returns the length of the evaluation loop's code before its first bytecode dispatch.

    CPython 3.11 and 3.12 set the thread's ``_PyCFrame`` before they store the frame in it.
    """
    code = source.read(find_offset(elf.loads, at, _MOST_ENTRY_BYTES), _MOST_ENTRY_BYTES)
    machine = next(name for name, number in MACHINES.items() if number == elf.machine)
    jump = _INDIRECT_JUMPS[machine].search(code, _LEAST_ENTRY_BYTES)
    return jump.start() if jump else _MOST_ENTRY_BYTES


def _find_version(
    source: Source, elf: ElfFile, symbols: dict[bytes, ElfSymbol], runtime: bytes
) -> Version:
    if runtime.startswith(COOKIE):
        return parse_version(int.from_bytes(runtime[VERSION_AT:][:8], "little"))
    if _VERSION not in symbols:
        raise InterpreterRefused(
            Refusal.UNKNOWN_VERSION, "CPython 3.10 or earlier, or a binary without symbols"
        )
    at = find_offset(elf.loads, symbols[_VERSION].address, 8)
    return parse_version(int.from_bytes(source.read(at, 8), "little"))
