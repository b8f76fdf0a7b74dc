"""Reads loaded modules from ``/proc/modules`` and ``/sys/module`` (sections, notes, srcversion).

Executable ranges come from the section addresses. Since kernel 6.4, a module's text, data and
read-only data are separate allocations, so ranges from ``address`` and ``size`` in
``/proc/modules`` would overlap. The ranges exclude init sections, which sysfs still lists although
their memory is freed after loading and may be reused.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from otel_kprofiler.elf import find_build_id
from otel_kprofiler.errors import describe_error
from otel_kprofiler.host import HostFiles
from otel_kprofiler.model import AddressRange, BuildId
from otel_kprofiler.symbols.kernel.table import SymbolTable

PROC_MODULES: Final = "/proc/modules"
SYS_MODULE: Final = "/sys/module"

_EXECUTABLE = re.compile(
    r"\.(?:[\w.]*\.)?text(?:\..*)?|\.altinstr_(?:replacement|aux)|\.plt|\.fixup"
)
_FREED = re.compile(r"\.init\..*|\.symtab|\.strtab|\.rela?\..*")
_PAGE_MASK = ~0xFFF


class ProcModule(NamedTuple):
    """A line in ``/proc/modules``; ``address`` is 0 if the kernel hides it."""

    name: str
    size: int
    state: str
    address: int


class ModuleFiles(NamedTuple):
    """A module's data in sysfs; ``sections`` is empty if the sections cannot be read."""

    sections: Mapping[str, int]
    build_id: BuildId | None
    source_version: str
    problem: str


def parse_modules(data: bytes) -> tuple[list[ProcModule], int]:
    """Returns the valid lines in ``/proc/modules``, and the number of malformed lines.

    A line is ``name size references users, state 0xaddress [taint]`` (kernel/module/procfs.c).
    """
    modules, bad = [], 0
    for line in data.decode("utf-8", "backslashreplace").splitlines():
        fields = line.split()
        try:
            name, size, _, _, state, address = fields[:6]
            modules.append(ProcModule(name, int(size), state, int(address, 16)))
        except ValueError:
            bad += 1
    return modules, bad


def read_module(files: HostFiles, name: str) -> ModuleFiles:
    """Reads a loaded module's sections, build id and srcversion, where they are readable."""
    folder = f"{SYS_MODULE}/{name}"
    problem = ""
    sections = {}
    try:
        for section in files.list_dir(f"{folder}/sections"):
            sections[section] = int(files.read_bytes(f"{folder}/sections/{section}"), 16)
    except (OSError, ValueError) as error:
        sections, problem = {}, f"{folder}/sections: {describe_error(error)}"
    build_id = None
    try:
        for note in files.list_dir(f"{folder}/notes"):
            build_id = build_id or find_build_id(files.read_bytes(f"{folder}/notes/{note}"))
    except OSError as error:
        problem = problem or f"{folder}/notes: {error.strerror or error}"
    try:
        source_version = files.read_bytes(f"{folder}/srcversion").decode("ascii", "replace").strip()
    except OSError:  # only modules that declare a version have a srcversion
        source_version = ""
    if not any(sections.values()):  # hidden addresses read as zero
        sections = {}
    return ModuleFiles(sections, build_id, source_version, problem)


def ranges_from_sections(
    sections: Mapping[str, int], table: SymbolTable | None, limit: int
) -> tuple[AddressRange, ...]:
    """Returns a module's executable ranges in address order, excluding its init sections.

    A section counts as executable if it has the name of a text section, or contains one of the
    module's functions. A section's range ends at the module's next section, or at ``limit``. The
    last text section ends with the page in which its last function starts, because other
    allocations may follow. Ignores sections below ``.text``, or all sections if the address of
    ``.text`` is 0.
    """
    if not sections.get(".text", 1):
        return ()
    live = sorted(
        (address, name)
        for name, address in sections.items()
        if address >= sections.get(".text", 1) and not _FREED.fullmatch(name)
    )
    starts = [address for address, _ in live]
    ranges = []
    for start, name in live:
        end = min([*starts[bisect_right(starts, start) :][:1], limit])
        last = table.last_function(start, end) if table is not None else None
        if start < end and (_EXECUTABLE.fullmatch(name) or last is not None):
            ranges.append((AddressRange(start, end, name), start if last is None else last))
    if table is None:
        return tuple(part for part, _ in ranges)
    code = {part.start for part, _ in ranges}
    return tuple(
        part if part.end in code else part._replace(end=min(part.end, _page_end(last)))
        for part, last in ranges
    )


def ranges_from_symbols(
    table: SymbolTable | None, base: int, limit: int
) -> tuple[AddressRange, ...]:
    """Returns one range with the functions of a module, or no range if it has no functions.

    The range ends with the page in which the last function starts, because other allocations may
    follow, but not above ``limit``. ``base`` is the start of the module's text; 0 if unknown.
    """
    if table is None:
        return ()
    start = base or next((table.address(index) for index in range(len(table))), limit)
    last = table.last_function(start, limit)
    if last is None:
        return ()
    return (AddressRange(start, min(_page_end(last), limit), ".text"),)


def taken_pages(sections: Mapping[str, int]) -> Iterator[int]:
    """Yields the first page of each of a module's non-code sections, skipping init sections."""
    for name, address in sections.items():
        if address and not _FREED.fullmatch(name) and not _EXECUTABLE.fullmatch(name):
            yield address & _PAGE_MASK


def _page_end(address: int) -> int:
    return (address & _PAGE_MASK) - _PAGE_MASK


def next_above(address: int, starts: Iterable[int]) -> int:
    """Returns the lowest of ``starts`` above an address, or else the end of the address space."""
    return min((start for start in starts if start > address), default=1 << 64)
