"""Builds missing unwind tables for files, in processes with limited time and memory."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from otel_kprofiler.elf import ElfFile, Section, Source, frame_index, read_sections
from otel_kprofiler.host import (
    ChildFailed,
    ChildLimits,
    ChildProblem,
    CpuRate,
    LimitedChildren,
    RefusedFiles,
    identify_content,
)
from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding.frame_writing import COUNT, MEMORY_BYTES, PAIR
from otel_kprofiler.unwinding.gaps import Gap, find_starts
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from otel_kprofiler.unwinding.table import ENTRY_BYTES, MAX_ENTRIES, Tables, check_pairs

MAX_FRAMES_BYTES: Final = 64 << 20
MAX_GO_BYTES: Final = 256 << 20
TIMEOUT_S: Final = 30.0
"""Limit on elapsed time in seconds, for busy machines, in addition to the CPU time limit."""
FRAMES_CPU: Final = CpuRate(least_s=1, per_mib_s=0.25, most_s=10)
"""CPU time limit for ``.eh_frame``: ten times what compiler-generated tables need."""
GO_CPU: Final = CpuRate(least_s=5, per_mib_s=0.25, most_s=20)
"""CPU time limit for ``.gopclntab``: six times what tables from the Go linker need. Small tables
are allowed more time, because the process takes 2 s to start on an emulated processor."""
MAX_CODE_BYTES: Final = 4 << 20
CODE_CPU: Final = CpuRate(least_s=5, per_mib_s=15, most_s=30)
"""CPU time limit for code without tables: five times the CPU time that musl's code takes."""
CODE_TIMEOUT_S: Final = 120.0
CODE_SECTIONS: Final = (".dynsym", ".dynstr", ".symtab", ".rela.dyn", ".rela.plt")
_GO_FRAMES, _CODE_FRAMES = "go_frames", "code_frames"
"""Modules that child processes run. Importing them here would keep them in the agent's memory."""
_PYTHON: Final = (sys.executable, "-I", "-S")
_FOLDER: Final = Path(__file__).parent
_PACKAGES: Final = [
    (__package__, str(_FOLDER)),
    (__package__.rpartition(".")[0], str(_FOLDER.parent)),
]
_SERVE: Final = (
    *_PYTHON,
    "-c",
    f"""
import sys, types
for name, path in {_PACKAGES}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from {__package__}.frame_serving import main
main()
""",
)
"""Command that serves files without importing this package's parents, to save time and memory."""
_REFUSALS: Final = {
    ChildProblem.UNANSWERED: Refusal.UNREADABLE,
    ChildProblem.NO_PROCESS: Refusal.FAILED,
    ChildProblem.CPU_TIME: Refusal.SLOW,
}
_MAY_PASS: Final = (Refusal.UNREADABLE, Refusal.FAILED)


class Children(LimitedChildren):
    """Runs table-building processes until :meth:`stop`. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: RefusedFiles[tuple[Refusal, str]] = RefusedFiles()

    def run_script(
        self, script: str, fd: int, arguments: Iterable[object], limits: ChildLimits
    ) -> bytes:
        """Run a Python script that does not import this package, and return its output.

        ``fd`` becomes the script's standard input. Raises :class:`TableRefused` if the script
        failed, took too long, or was stopped.
        """
        with _refusing():
            return self.run([*_PYTHON, script, *map(str, arguments)], fd, limits)

    def serve_module(
        self, module: str, fd: int, arguments: Iterable[object], limits: ChildLimits
    ) -> bytes:
        """Pass a file to a module's ``make``, and return the reply; see ``LimitedChildren.serve``.

        The module may import only modules from this package and ``speedups``. For errors, see
        :meth:`run_script`.
        """
        with _refusing():
            return self.serve(_SERVE, [module, *map(str, arguments)], fd, limits)

    @contextmanager
    def trying_once(self, fd: int, section: str) -> Iterator[None]:
        """Context manager that immediately rejects a section that was rejected in the last hour.

        A section is tried again after a temporary failure, or if the file has changed. Raises
        :class:`TableRefused` if the section is rejected.
        """
        key = section, identify_content(fd)
        if (reason := self._refused.find(key)) is not None:
            raise TableRefused(*reason)
        try:
            yield
        except TableRefused as error:
            if error.refusal not in _MAY_PASS:
                self._refused.add(key, (error.refusal, error.detail))
            raise


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ChildFailed as error:
        others = Refusal.FAILED if error.may_pass else Refusal.NOT_INDEXED
        refusal = _REFUSALS.get(error.problem, others)
        raise TableRefused(refusal, str(error)) from error


def index_frames(
    fd: int, frames: Segment, timeout_s: float = TIMEOUT_S, *, children: Children
) -> Tables:
    """Build the ``.eh_frame`` search table in a child process, and wait for the process to exit.

    Raises :class:`TableRefused` if the section is malformed or too large, or if the process
    exceeded a limit. After ``timeout_s`` seconds, the child process is killed.
    """
    if frames.size > MAX_FRAMES_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".eh_frame occupies {frames.size} bytes")
    with children.trying_once(fd, ".eh_frame"):
        arguments = (frames.offset, frames.size, frames.address)
        # the output is at most half as large as the section
        limits = ChildLimits(frame_index.MEMORY_BYTES, FRAMES_CPU.grant(frames.size), timeout_s)
        pairs = children.run_script(frame_index.__file__, fd, arguments, limits)
        entries = len(pairs) // ENTRY_BYTES
        if not entries:
            raise TableRefused(Refusal.NO_FRAMES, ".eh_frame has no entries")
        _check(pairs)
        return Tables(frames.address, None, entries, frames, pairs)


def index_go(
    fd: int,
    elf: ElfFile,
    table: Segment,
    text: Segment,
    others: Tables | None,
    *,
    children: Children,
) -> Tables:
    """Generate tables from ``.gopclntab`` in a child process, and wait for its exit.

    ``others`` contains the file's existing tables, which cover its C code. Raises
    :class:`TableRefused` if the table is malformed, too large or of an unknown version, or if the
    child process exceeded a limit.
    """
    if table.size > MAX_GO_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f".gopclntab occupies {table.size} bytes")
    empty = Segment(table.offset, 0, table.address)
    tables = others or Tables(table.address, table.offset, 0, empty)
    in_file = 0 if tables.made else tables.search_bytes
    pairs = Segment(tables.search_offset or 0, in_file, 0)
    places = elf.machine, tables.frames.address + tables.made_at, tables.origin
    arguments = list(map(str, places))
    arguments += [":".join(map(str, part)) for part in (pairs, table, text, *elf.loads)]
    with children.trying_once(fd, ".gopclntab"):
        limits = ChildLimits(MEMORY_BYTES, GO_CPU.grant(table.size), TIMEOUT_S)
        return _parse_made(children.serve_module(_GO_FRAMES, fd, arguments, limits), tables)


def index_code(
    fd: int,
    source: Source,
    elf: ElfFile,
    gaps: list[Gap],
    others: Tables | None,
    *,
    children: Children,
) -> Tables:
    """Generate tables from machine code in a child process, and wait for it to exit.

    ``gaps`` are ranges of code without unwind rules. Raises :class:`TableRefused` if the code is
    too large or the child process exceeded a limit, and ``ElfError`` if the section headers are
    malformed.
    """
    size = sum(end - start for start, end in gaps)
    if size > MAX_CODE_BYTES:
        raise TableRefused(Refusal.TOO_LARGE, f"{size} bytes of code have no unwind rules")
    text = elf.texts[0]
    tables = others or Tables(text.address, None, 0, text._replace(size=0))
    starts = ",".join(map(str, find_starts(source, elf)))
    arguments = [tables.frames.address + tables.made_at, tables.origin, starts]
    data = [load for load in elf.loads if load not in elf.texts]
    parts = {"text": elf.texts, "data": data}
    sections = {section.name.decode("latin-1"): section for section in read_sections(source, elf)}
    parts |= {name: [_locate(sections[name])] for name in CODE_SECTIONS if name in sections}
    if tables.search_offset is not None:
        parts["pairs"] = [Segment(tables.search_offset, tables.search_bytes, 0)]
    words = [",".join(f"{start}:{end}" for start, end in gaps)]
    for name, places in parts.items():
        words.append(f"{name}=" + ",".join(":".join(map(str, place)) for place in places))
    with children.trying_once(fd, "code"):
        limits = ChildLimits(MEMORY_BYTES, CODE_CPU.grant(size), CODE_TIMEOUT_S)
        made = children.serve_module(_CODE_FRAMES, fd, [*arguments, *words], limits)
        return _parse_made(made, tables)


def _locate(section: Section) -> Segment:
    return Segment(section.offset, section.size, section.address)


def _parse_made(made: bytes, tables: Tables) -> Tables:
    (entries,) = COUNT.unpack_from(made)
    end = COUNT.size + entries * ENTRY_BYTES
    pairs = made[COUNT.size : end]
    if tables.made:  # the child read only the file, which lacks pairs generated earlier
        rows = sorted(PAIR.iter_unpack(pairs + tables.made))
        pairs = b"".join(PAIR.pack(*row) for row in rows)
    _check(pairs)
    entries = len(pairs) // ENTRY_BYTES
    return tables._replace(search_offset=None, entries=entries, made=pairs, made_frames=made[end:])


def _check(pairs: bytes) -> None:
    if len(pairs) > MAX_ENTRIES * ENTRY_BYTES:
        raise TableRefused(
            Refusal.TOO_LARGE,
            f"the search table lists {len(pairs) // ENTRY_BYTES} functions (limit {MAX_ENTRIES})",
        )
    check_pairs(iter([pairs]))
