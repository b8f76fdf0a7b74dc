"""Reads the sections, and later the symbol names, of each newly loaded module."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from otel_kprofiler.model import AddressRange, FileId, Module, ModuleKind, RangeSource
from otel_kprofiler.symbols.kernel.identity import make_file_id
from otel_kprofiler.symbols.kernel.kallsyms import BPF_BLOCK, PAGE_BYTES, parse_kallsyms
from otel_kprofiler.symbols.kernel.load import make_module
from otel_kprofiler.symbols.kernel.modules import ModuleFiles, ProcModule
from otel_kprofiler.symbols.kernel.snapshot import ModuleSymbols
from otel_kprofiler.symbols.kernel.table import SymbolTable
from otel_kprofiler.symbols.kernel.timeline import FOREVER, LoadedModule

INIT_TEXT: Final = ".init.text"
LOADING: Final = "Loading"
"""State in ``/proc/modules`` for a module whose init function is running."""

_ZERO = b"0" * 16


class FoundModule(NamedTuple):
    """A loaded module, and the data that describes it in ``/proc`` and sysfs.

    Attributes:
        listed: the module's line in ``/proc/modules``.
        files: the module's data in sysfs.
        loaded: the module and its symbols, built from ``listed`` and ``files``.
        attempts: number of attempts to read the module's symbol names; None after a success.
    """

    listed: ProcModule
    files: ModuleFiles
    loaded: LoadedModule
    attempts: int | None = 0

    @property
    def number(self) -> int:
        """Returns the module's generation, which identifies the module."""
        return self.loaded.main.module.generation

    def is_at(self, line: ProcModule) -> bool:
        """Returns whether a ``/proc/modules`` line has this module's address, or hides it."""
        return not line.address or line.address == self.loaded.main.module.base

    def is_same(self, files: ModuleFiles) -> bool:
        """Returns whether sysfs still describes this module and contains no new data."""
        module = self.loaded.main.module
        has_sections = module.range_source is RangeSource.SECTIONS or not files.sections
        return has_sections and module.build_id == files.build_id

    def started(self, line: ProcModule, time_ns: int) -> FoundModule:
        """Returns a copy with a new ``/proc/modules`` line, in which the state may have changed."""
        if self.listed.state != LOADING or line.state == LOADING:
            return self._replace(listed=line)
        loaded = self.loaded._replace(init_until_ns=time_ns)
        return self._replace(listed=line, loaded=loaded)


def make_found(
    line: ProcModule,
    files: ModuleFiles,
    taken: Collection[int],
    kernel_file_id: FileId,
    *,
    number: int,
    init_until_ns: int | None,
) -> FoundModule:
    """Builds a module whose symbol names have not been read.

    ``taken`` contains the start addresses of other modules and of pages without code.
    ``number`` is the module's generation. ``init_until_ns`` is a boottime at which the init
    function had already returned; ``FOREVER`` if the function is still running; None if unknown.
    """
    file_id = make_file_id(files.build_id, line.name, kernel_file_id, files.source_version)
    module = make_module(line, files, None, taken, file_id)
    init = None
    start = files.sections.get(INIT_TEXT, 0)
    if start and init_until_ns is not None:
        # The kernel does not export the size of the init text, but allocates whole pages for it.
        init = ModuleSymbols(_init_module(module, start, start | (PAGE_BYTES - 1), number), None)
        init = init._replace(pending=init_until_ns == FOREVER)
    main = ModuleSymbols(replace(module, generation=number), None, pending=True)
    return FoundModule(line, files, LoadedModule(main, init, init_until_ns or FOREVER))


def add_names(nameless: FoundModule, lines: bytes | None, taken: Collection[int]) -> FoundModule:
    """Returns a copy with names from the module's kallsyms ``lines``; None adds no names."""
    main, init, _ = nameless.loaded
    if lines is None or all(line.startswith(_ZERO) for line in lines.splitlines()):
        loaded = nameless.loaded._replace(
            main=main._replace(pending=False), init=init and init._replace(pending=False)
        )
        return nameless._replace(loaded=loaded, attempts=(nameless.attempts or 0) + 1)
    lines, init_lines = _split(lines, nameless.files.sections)
    table = _parse(lines, nameless.listed.name)
    made = make_module(nameless.listed, nameless.files, table, taken, main.module.file_id)
    module = main.module
    if made.ranges != module.ranges:
        module = replace(made, generation=nameless.number)
    if init is not None:
        init = _name_init(init, _parse(init_lines, nameless.listed.name))
    loaded = nameless.loaded._replace(main=ModuleSymbols(module, table), init=init)
    return nameless._replace(loaded=loaded, attempts=None)


class LineCollector:
    """Collects kallsyms lines for the named modules, and can stop at the first BPF program."""

    def __init__(self, names: Iterable[str], *, until_bpf: bool) -> None:
        self.lines: dict[str, bytes] = {}
        self._wanted = {b"\t[" + name.encode() + b"]": name for name in names}
        self._until = b"\t[" + BPF_BLOCK.encode() + b"]\n" if until_bpf else None
        self._rest = b""

    def feed(self, piece: bytes) -> bool:
        """Scans the next chunk. Returns False if no more input is required."""
        text = self._rest + piece
        cut = text.rfind(b"\n") + 1
        text, self._rest = text[:cut], text[cut:]
        if b"\t" in text:
            for suffix, name in [*self._wanted.items()]:
                self._take(text, suffix, name)
        return bool(self._wanted) and not (self._until and self._until in text)

    def _take(self, text: bytes, suffix: bytes, name: str) -> None:
        """Collect a module's first block of lines.

        The module's second block of lines lists freed init functions.
        """
        at = text.find(suffix + b"\n")
        start = text.rfind(b"\n", 0, at) + 1
        if at >= 0 and not (name in self.lines and start):
            end = start
            while end < len(text):
                following = text.index(b"\n", end) + 1
                if not text.endswith(suffix, end, following - 1):
                    break
                end = following
            self.lines[name] = self.lines.get(name, b"") + text[start:end]
            if end == len(text):
                return
        if name in self.lines:
            del self._wanted[suffix]


def _split(lines: bytes, sections: Mapping[str, int]) -> tuple[bytes, bytes]:
    """Splits a module's kallsyms lines into core code and init code.

    Drops references to kernel symbols, which kallsyms also lists while the module's init function
    runs. Kernel symbols have lower addresses than all modules.
    """
    if INIT_TEXT not in sections:
        return lines, b""
    starts = sorted((address, name) for name, address in sections.items())
    places = [address for address, _ in starts]
    parts: tuple[list[bytes], list[bytes]] = [], []
    for line in lines.splitlines(keepends=True):
        index = bisect_right(places, int(line[:16], 16)) - 1
        if index >= 0:
            parts[starts[index][1] == INIT_TEXT].append(line)
    return b"".join(parts[0]), b"".join(parts[1])


def _parse(lines: bytes, name: str) -> SymbolTable | None:
    table = parse_kallsyms([lines]).blocks.get(name)
    return table if table is not None and len(table) else None


def _name_init(init: ModuleSymbols, table: SymbolTable | None) -> ModuleSymbols:
    if table is None:
        return init._replace(pending=False)
    module = init.module
    last = max(table.address(len(table) - 1), module.ranges[0].start)
    return ModuleSymbols(
        replace(module, ranges=(_init_range(module.base, last | (PAGE_BYTES - 1)),)), table
    )


def _init_module(module: Module, start: int, last: int, number: int) -> Module:
    """Returns a separate module for init code, to which the file's RVAs do not apply."""
    return Module(
        module.name,
        ModuleKind.LOADED,
        None,
        make_file_id(None, module.file_id, INIT_TEXT),
        start,
        (_init_range(start, last),),
        RangeSource.SECTIONS,
        number,
    )


def _init_range(start: int, last: int) -> AddressRange:
    return AddressRange(start, last + 1, INIT_TEXT)
