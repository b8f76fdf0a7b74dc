"""Reads a complete :class:`Snapshot` from a host's files."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from otel_kprofiler.elf import find_build_id
from otel_kprofiler.host import HostFiles
from otel_kprofiler.model import AddressRange, BuildId, FileId, Module, ModuleKind, RangeSource
from otel_kprofiler.symbols.kernel.builtin import read_builtin
from otel_kprofiler.symbols.kernel.hidden import HiddenCause, find_hidden_cause
from otel_kprofiler.symbols.kernel.identity import make_file_id
from otel_kprofiler.symbols.kernel.kallsyms import (
    BPF_BLOCK,
    NO_MODULES,
    OUT_OF_LINE_BLOCKS,
    PAGE_BYTES,
    Kallsyms,
    parse_kallsyms,
)
from otel_kprofiler.symbols.kernel.modules import (
    PROC_MODULES,
    ModuleFiles,
    ProcModule,
    next_above,
    parse_modules,
    ranges_from_sections,
    ranges_from_symbols,
    read_module,
    taken_pages,
)
from otel_kprofiler.symbols.kernel.names import END_OF_TEXT
from otel_kprofiler.symbols.kernel.read import read_pieces
from otel_kprofiler.symbols.kernel.snapshot import VMLINUX, CodeBlock, ModuleSymbols, Snapshot
from otel_kprofiler.symbols.kernel.table import SymbolTable

PROC_KALLSYMS: Final = "/proc/kallsyms"
KERNEL_NOTES: Final = "/sys/kernel/notes"
PROC_VERSION: Final = "/proc/version"

_ARM64_VECTORS: Final = b"vectors"
"""Name of a symbol that kallsyms lists on every arm64 kernel, but on no x86 kernel."""
_HEAD_BYTES: Final = 64 << 10
"""Number of bytes from ``_text``, which kallsyms omits on arm64, to ``_stext``. The image's head is
padded to ``SEGMENT_ALIGN`` (arch/arm64/kernel/vmlinux.lds.S, 5.10 to 6.18), which is also
``BaseOfCode`` in the image's header (arch/arm64/kernel/efi-header.S).
"""


def read_snapshot(
    files: HostFiles,
    *,
    generation: int = 1,
    since_ns: int = 0,
    previous: Snapshot | None = None,
) -> Snapshot:
    """Reads a host's kallsyms, its loaded modules and their build ids.

    ``files`` are the host's files, or a captured tree. A missing or unreadable file raises no
    exception, but is reported in the snapshot's ``problems`` or ``hidden``. The snapshot is valid
    from boottime ``since_ns`` on, and reuses the ``Module`` objects of ``previous`` for unchanged
    modules.
    """
    problems: list[str] = []
    kallsyms, hidden = _read_kallsyms(files, problems)
    build_id = _read_build_id(files, problems)
    kernel_file_id = make_file_id(build_id, VMLINUX, _read_version(files, build_id, problems))
    listed, bad_lines = _read_proc_modules(files, kallsyms, problems)
    earlier = {} if previous is None else {module.name: module for module in previous.modules}
    known_builtin = None if previous is None else previous.builtin
    builtin, core = read_builtin(files, kallsyms.core, problems, known_builtin)
    symbols = []
    vmlinux = _make_vmlinux(core, build_id, kernel_file_id)
    if vmlinux is not None:
        symbols.append(ModuleSymbols(_keep(vmlinux, earlier), core))
    highest = max((module.generation for module in earlier.values()), default=0)
    folders = {module.name: read_module(files, module.name) for module in reversed(listed)}
    taken = _find_taken(listed, folders, kallsyms)
    for number, module in enumerate(reversed(listed), highest + 1):
        table = kallsyms.blocks.get(module.name)
        module_files = folders[module.name]
        if module_files.problem:
            problems.append(module_files.problem)
        file_id = make_file_id(
            module_files.build_id, module.name, kernel_file_id, module_files.source_version
        )
        made = make_module(module, module_files, table, taken, file_id)
        symbols.append(ModuleSymbols(_keep(replace(made, generation=number), earlier), table))
    return Snapshot(
        symbols,
        blocks=_blocks(kallsyms.blocks),
        freed=kallsyms.freed,
        generation=generation,
        since_ns=since_ns,
        hidden=hidden,
        vmlinux_build_id=build_id,
        problems=problems,
        bad_lines=kallsyms.bad_lines + bad_lines,
        builtin=builtin,
    )


def _read_kallsyms(files: HostFiles, problems: list[str]) -> tuple[Kallsyms, HiddenCause | None]:
    try:
        kallsyms = parse_kallsyms(read_pieces(files.open_fd(PROC_KALLSYMS)))
    except FileNotFoundError:
        return parse_kallsyms(()), HiddenCause.NO_FILE
    except OSError as error:
        problems.append(f"{PROC_KALLSYMS}: {error.strerror or error}")
        return parse_kallsyms(()), HiddenCause.UNREADABLE
    if kallsyms.hidden:
        return kallsyms, find_hidden_cause(files)
    problems += _find_damage(kallsyms)
    if not len(kallsyms.core) and not kallsyms.blocks:
        problems.append(f"{PROC_KALLSYMS}: contains no symbols")
        return kallsyms, HiddenCause.UNREADABLE
    return kallsyms, None


def _find_damage(kallsyms: Kallsyms) -> list[str]:
    damage = []
    if kallsyms.bad_lines:
        damage.append(
            f"{PROC_KALLSYMS}: {kallsyms.bad_lines} of {kallsyms.lines} lines are malformed or out"
            " of order, so code at their addresses has no name"
        )
    if kallsyms.cut:
        damage.append(f"{PROC_KALLSYMS}: the last line is truncated, so symbols are missing")
    if len(kallsyms.core) and _find_text(kallsyms.core) is None:
        damage.append(f"{PROC_KALLSYMS}: _stext or _etext is missing, so kernel code has no names")
    return damage


def _find_text(core: SymbolTable) -> AddressRange | None:
    """Returns the range from ``_text`` to ``_etext``, which excludes the freed init text."""
    start = core.find_address(b"_text")
    if start is None and (start := core.find_address(b"_stext")) is not None:
        start -= _HEAD_BYTES if core.find_address(_ARM64_VECTORS) is not None else 0
    end = core.find_address(END_OF_TEXT)
    if start is None or end is None or end <= start:
        return None
    return AddressRange(start, end, ".text")


def _read_build_id(files: HostFiles, problems: list[str]) -> BuildId | None:
    try:
        return find_build_id(files.read_bytes(KERNEL_NOTES))
    except OSError as error:
        problems.append(f"{KERNEL_NOTES}: {error.strerror or error}")
        return None


def _read_version(files: HostFiles, build_id: BuildId | None, problems: list[str]) -> str:
    if build_id is not None:
        return ""
    try:
        return files.read_bytes(PROC_VERSION).decode("utf-8", "backslashreplace").strip()
    except OSError as error:
        problems.append(f"{PROC_VERSION}: {error.strerror or error}")
        return ""


def _read_proc_modules(
    files: HostFiles, kallsyms: Kallsyms, problems: list[str]
) -> tuple[list[ProcModule], int]:
    """Returns the loaded modules, newest first, and the number of malformed lines.

    Modules listed only in kallsyms come last.
    """
    names = [name for name in kallsyms.blocks if name not in NO_MODULES]
    try:
        listed, bad = parse_modules(files.read_bytes(PROC_MODULES))
    except OSError as error:
        if names:  # if kallsyms lists no module, the kernel may lack module support
            problems.append(f"{PROC_MODULES}: {error.strerror or error}")
        listed, bad = [], 0
    if bad:
        problems.append(f"{PROC_MODULES}: {bad} malformed lines skipped")
    missing = set(names).difference(module.name for module in listed)
    return listed + [ProcModule(name, 0, "", 0) for name in names if name in missing], bad


def _make_vmlinux(core: SymbolTable, build_id: BuildId | None, file_id: FileId) -> Module | None:
    text = _find_text(core)
    if text is None:
        return None
    return Module(
        VMLINUX, ModuleKind.VMLINUX, build_id, file_id, text.start, (text,), RangeSource.KERNEL
    )


def _find_taken(
    listed: Iterable[ProcModule], folders: Mapping[str, ModuleFiles], kallsyms: Kallsyms
) -> list[int]:
    """Returns the start addresses of modules, and of pages that hold no module's code."""
    taken = [module.address for module in listed if module.address]
    for module_files in folders.values():
        taken += taken_pages(module_files.sections)
    for table in (kallsyms.blocks[name] for name in NO_MODULES if name in kallsyms.blocks):
        taken += {table.address(index) & -PAGE_BYTES for index in range(len(table))}
    return taken


def make_module(
    listed: ProcModule,
    module_files: ModuleFiles,
    table: SymbolTable | None,
    taken: Collection[int],
    file_id: FileId,
) -> Module:
    """Creates a ``Module`` whose address range ends at or before the next ``taken`` address."""
    base = module_files.sections.get(".text") or listed.address
    if not base and table is not None and len(table):
        base = table.address(0) & -PAGE_BYTES  # the best available estimate of the address of .text
    following = next_above(base, taken)
    limit = base + listed.size if listed.size else following
    if table is None:
        limit = min(limit, following)
    ranges = ranges_from_sections(module_files.sections, table, limit)
    source = RangeSource.SECTIONS
    if not ranges:
        ranges = ranges_from_symbols(table, base, min(limit, following))
        source = RangeSource.SYMBOLS
    return Module(
        listed.name, ModuleKind.LOADED, module_files.build_id, file_id, base, ranges, source
    )


def _keep(made: Module, earlier: Mapping[str, Module]) -> Module:
    old = earlier.get(made.name)
    if old is None:
        return made
    same = (old.build_id, old.base, old.ranges) == (made.build_id, made.base, made.ranges)
    return old if same else made


def _blocks(blocks: Mapping[str, SymbolTable]) -> list[CodeBlock]:
    kinds = {**dict.fromkeys(OUT_OF_LINE_BLOCKS, ModuleKind.OUT_OF_LINE), BPF_BLOCK: ModuleKind.BPF}
    return [CodeBlock(kind, blocks[name]) for name, kind in kinds.items() if name in blocks]
