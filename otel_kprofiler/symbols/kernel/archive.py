"""Converts snapshots of the module list to and from JSON values, for recordings.

A :class:`ModuleReading` is stored as ``{looked_ns, free_ns, removed: {number: [there_ns, gone_ns]},
modules: [number, …], new: {number: [main, init, init_until_ns]}}``. ``new`` contains the modules
that are new or have changed. ``main`` and ``init`` are ``[module, kallsyms lines or null, whether
symbols are pending]``.
"""

from typing import Any, Final

from otel_kprofiler.checked import checked_number, checked_text
from otel_kprofiler.model import AddressRange, BuildId, FileId, Module, ModuleKind, RangeSource
from otel_kprofiler.symbols.kernel.build import MAX_PAD_BYTES
from otel_kprofiler.symbols.kernel.kallsyms import parse_kallsyms
from otel_kprofiler.symbols.kernel.names import PAD_PREFIX
from otel_kprofiler.symbols.kernel.snapshot import ModuleSymbols
from otel_kprofiler.symbols.kernel.table import SymbolTable
from otel_kprofiler.symbols.kernel.timeline import LoadedModule, ModuleReading, Removal

_PAD: Final = PAD_PREFIX.decode()


class ReadingPacker:
    """Packs successive :class:`ModuleReading` objects as JSON values; omits unchanged modules."""

    def __init__(self) -> None:
        self._known: dict[int, LoadedModule] = {}

    def pack(self, reading: ModuleReading) -> dict[str, Any]:
        """Pack the next :class:`ModuleReading`."""
        loaded = {module.main.module.generation: module for module in reading.modules}
        new = {
            number: module for number, module in loaded.items() if self._known.get(number) != module
        }
        self._known = loaded
        return {
            "looked_ns": reading.looked_ns,
            "free_ns": reading.free_ns,
            "removed": {str(number): [*times] for number, times in reading.removed.items()},
            "modules": [*loaded],
            "new": {
                str(number): [
                    _pack(module.main),
                    module.init and _pack(module.init),
                    module.init_until_ns,
                ]
                for number, module in new.items()
            },
        }


class ReadingUnpacker:
    """Unpacks the values of a :class:`ReadingPacker`, in the order in which they were packed."""

    def __init__(self) -> None:
        self._known: dict[int, LoadedModule] = {}

    def unpack(self, row: Any) -> ModuleReading:
        """Unpack the next :class:`ModuleReading`.

        Raises ``AttributeError``, ``KeyError``, ``TypeError`` or ``ValueError`` if the row is
        malformed.
        """
        for number, (main, init, until_ns) in row["new"].items():
            until = checked_number(until_ns)
            loaded = LoadedModule(_unpack(main), init and _unpack(init), until)
            self._known[int(number)] = loaded
        self._known = {number: self._known[number] for number in row["modules"]}
        removed = {
            int(number): Removal(checked_number(there_ns), checked_number(gone_ns))
            for number, (there_ns, gone_ns) in row["removed"].items()
        }
        modules = tuple(self._known.values())
        looked_ns, free_ns = checked_number(row["looked_ns"]), checked_number(row["free_ns"])
        return ModuleReading(looked_ns, free_ns, removed, modules)


def _pack(symbols: ModuleSymbols) -> list[Any]:
    module, table, pending = symbols
    fields = [
        module.name, module.build_id, module.file_id, module.base,
        [list(part) for part in module.ranges], module.range_source.value, module.generation,
    ]  # fmt: skip
    return [fields, None if table is None else _make_lines(table, module.name), pending]


def _unpack(row: Any) -> ModuleSymbols:
    (name, build_id, file_id, base, ranges, source, number), lines, pending = row
    module = Module(
        checked_text(name),
        ModuleKind.LOADED,
        BuildId(checked_text(build_id)) if build_id else None,
        FileId(checked_text(file_id)),
        checked_number(base),
        tuple(
            AddressRange(checked_number(start), checked_number(end), checked_text(part))
            for start, end, part in ranges
        ),
        RangeSource(source),
        checked_number(number),
    )
    table = None
    if lines is not None:
        text = checked_text(lines).encode("utf-8", "surrogateescape")
        table = parse_kallsyms([text]).blocks.get(module.name)
    return ModuleSymbols(module, table, bool(pending))


def _make_lines(table: SymbolTable, module: str) -> str:
    """Returns kallsyms lines, one per address, from which the parser rebuilds ``table``."""
    lines, pad = [], 0
    for index in range(len(table)):
        name, start, _ = table.symbol(index)
        if index + 1 < len(table) and table.address(index + 1) == start:
            continue  # keep only the last alias, which is preferred
        if name and _reaches(table, start, 1):
            # All functions have padding of the same size.
            pad = pad or next(n for n in range(MAX_PAD_BYTES, 0, -1) if _reaches(table, start, n))
            lines.append(f"{start - pad:016x} t {_PAD}{name}\t[{module}]\n")
        lines.append(f"{start:016x} {'t' if name else 'd'} {name or '-'}\t[{module}]\n")
    return "".join(lines)


def _reaches(table: SymbolTable, start: int, count: int) -> bool:
    """Returns whether the function at ``start`` has at least ``count`` bytes of padding."""
    symbol = table.lookup(start - count)
    return symbol is not None and symbol[1] == start
