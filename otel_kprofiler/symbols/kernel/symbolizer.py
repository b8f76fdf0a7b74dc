"""Resolves kernel frames, and looks up kernel names and addresses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from errno import EISDIR, ENOTDIR
from operator import attrgetter
from typing import Final, NamedTuple

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import Access, HostFiles
from otel_kprofiler.model import (
    STACK_OK,
    Frame,
    Ksymbol,
    KsymbolAction,
    KsymbolChange,
    Module,
    RawSample,
    RawSide,
    Side,
)
from otel_kprofiler.symbols.cache import BoundedCache
from otel_kprofiler.symbols.captured import CapturedFiles, is_archive
from otel_kprofiler.symbols.kernel.bpf import NOW_NS, KsymbolSource, KsymbolTable
from otel_kprofiler.symbols.kernel.builtin import builtin_ranges_path, find_release
from otel_kprofiler.symbols.kernel.explain import Explanation
from otel_kprofiler.symbols.kernel.hidden import HiddenCause
from otel_kprofiler.symbols.kernel.load import read_snapshot
from otel_kprofiler.symbols.kernel.mixed import (
    MixedSide,
    explain_ksymbol,
    is_outside,
    make_kernel_side,
)
from otel_kprofiler.symbols.kernel.snapshot import Match, Snapshot, lookup_addresses
from otel_kprofiler.symbols.kernel.table import SymbolTable
from otel_kprofiler.symbols.kernel.timeline import ModuleSource, Timeline
from otel_kprofiler.symbols.resolver import VariableSide

MAX_FRAMES_CACHED: Final = 4_096
MAX_HISTORY: Final = 16
_MODULE: Final = attrgetter("module")


class _View(NamedTuple):
    since_ns: int
    generation: int
    snapshot: Snapshot
    frames: BoundedCache[int, Frame]


class KernelSymbolizer:
    """Resolves kernel stacks using the symbols that were loaded at the time of the sample.

    Lookups are lock-free and thread-safe. Only one thread may call ``advance``, ``reload`` and
    ``close``. Replaced snapshots are kept for a while, for samples taken before the replacement.

    Example:
        >>> symbolizer = KernelSymbolizer.live()
        >>> start = symbolizer.find("schedule")[0].address
        >>> symbolizer.resolve_addresses([start])[0].function
        'schedule'

    Args:
        files: files that ``reload`` reads; None if symbols cannot change.
        ksymbols: tracks BPF programs and other code outside modules. The tracker must have been
            started before ``snapshot`` was read; ``close`` closes it. If None, the snapshot's
            symbols for code outside modules are used for samples taken at any time.
        modules: tracks loaded modules; started and closed like ``ksymbols``.
        known_ksymbols: initial ksymbols; None for the ksymbols in the snapshot.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        files: HostFiles | None = None,
        ksymbols: KsymbolSource | None = None,
        modules: ModuleSource | None = None,
        known_ksymbols: Sequence[Ksymbol] | None = None,
    ) -> None:
        self._files = files
        self._source = ksymbols
        self._ksymbols: KsymbolTable | None = None
        if ksymbols is not None or known_ksymbols is not None:
            initial = snapshot.ksymbols() if known_ksymbols is None else tuple(known_ksymbols)
            self._ksymbols = KsymbolTable(ksymbols)
            self._ksymbols.apply(KsymbolChange(0, KsymbolAction.ALL_READ, initial))
        self._views: tuple[_View, ...] = (self._make_view(snapshot),)  # newest first
        self._modules = modules
        self._complete_until_ns = 0
        self._timeline = Timeline(self.snapshot)
        if modules is not None:
            modules.begin(snapshot)

    @classmethod
    def live(
        cls,
        access: HostFiles | None = None,
        *,
        ksymbols: KsymbolSource | None = None,
        modules: ModuleSource | None = None,
    ) -> KernelSymbolizer:
        """Reads the symbols of this host, or of a captured tree given as ``access``.

        Hidden or missing symbols are not errors; see ``hidden`` and ``problems``. For the other
        arguments, see the class docstring.
        """
        files = access or Access()
        return cls(read_snapshot(files), files=files, ksymbols=ksymbols, modules=modules)

    @classmethod
    def from_files(
        cls,
        *,
        kallsyms: str | os.PathLike[str],
        modules: str | os.PathLike[str] | None = None,
        sys_module: str | os.PathLike[str] | None = None,
        notes: str | os.PathLike[str] | None = None,
        version: str | os.PathLike[str] | None = None,
        builtin_ranges: str | os.PathLike[str] | None = None,
        kallmodsyms: str | os.PathLike[str] | None = None,
        elf: Sequence[str | os.PathLike[str]] = (),
    ) -> KernelSymbolizer:
        """Reads symbols from copies of a host's files, which may be compressed (xz, gzip, zstd).

        Args:
            kallsyms: copy of ``/proc/kallsyms``, or a System.map, which has link addresses.
            modules: copy of ``/proc/modules``.
            sys_module: copy of ``/sys/module`` as a directory or tar archive.
            notes: copy of ``/sys/kernel/notes``.
            version: copy of ``/proc/version``.
            builtin_ranges: copy of ``modules.builtin.ranges``.
            kallmodsyms: copy of ``/proc/kallmodsyms``.
            elf: vmlinux, ``.ko`` or debug files. ELF files contain function sizes, which kallsyms
                lacks, so that code past the end of a function is not attributed to it.

        Raises:
            OSError: a copy does not exist, or is a directory instead of a file or vice versa.
            KProfilerError: a copy is malformed, or an ELF file belongs to no loaded module.
        """
        sources = {
            "/proc/kallsyms": kallsyms,
            "/proc/modules": modules,
            "/sys/module": sys_module,
            "/sys/kernel/notes": notes,
            "/proc/version": version,
            "/proc/kallmodsyms": kallmodsyms,
        }
        given = {host: path for host, path in sources.items() if path is not None}
        files = CapturedFiles(given)
        if builtin_ranges is not None:
            ranges_path = builtin_ranges_path(find_release(files))
            files = CapturedFiles({**given, ranges_path: builtin_ranges})
        for path in (kallsyms, modules, notes, version, builtin_ranges, kallmodsyms):
            if path is not None and os.path.isdir(path):
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR), os.fspath(path))
        folder = "" if sys_module is None else os.fspath(sys_module)
        if folder and not (os.path.isdir(folder) or is_archive(folder)):
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), folder)
        snapshot = read_snapshot(files)
        return cls(_with_sizes(snapshot, elf) if elf else snapshot)

    def copy_for_child(
        self,
        *,
        files: HostFiles,
        ksymbols: KsymbolSource | None = None,
        modules: ModuleSource | None = None,
    ) -> KernelSymbolizer:
        """Returns a symbolizer for a forked child, with the same symbols but new change trackers.

        ``ksymbols`` reports changes to code outside modules since :attr:`complete_until_ns`.
        """
        snapshot = self.snapshot
        without_init = snapshot.with_modules(
            snapshot.loaded(), generation=snapshot.generation + 1, since_ns=0
        )
        return KernelSymbolizer(
            without_init,
            files=files,
            ksymbols=ksymbols,
            modules=modules,
            known_ksymbols=None if self._ksymbols is None else self.ksymbols(),
        )

    @property
    def complete_until_ns(self) -> int:
        """Returns the ``CLOCK_BOOTTIME`` up to which symbols were complete at the last advance."""
        return self._complete_until_ns

    @property
    def snapshot(self) -> Snapshot:
        """Returns the current symbols."""
        return self._views[0].snapshot

    @property
    def hidden(self) -> HiddenCause | None:
        """Returns why kernel symbols are hidden; None if they are not hidden."""
        return self._views[0].snapshot.hidden

    @property
    def problems(self) -> tuple[str, ...]:
        """Returns one sentence for each unreadable or malformed file."""
        return self._views[0].snapshot.problems

    def count_lost_records(self) -> Mapping[str, int]:
        """Returns the number of lost ksymbol records, by cause.

        After records are lost, the symbols are reread from the kernel. Until symbols have been
        reread, frames may be unresolved.
        """
        return self._source.count_lost() if self._source else {}

    def advance(self, now_boot_ns: int) -> int:
        """Applies the changes that ``ksymbols`` and ``modules`` have reported.

        Returns the ``CLOCK_BOOTTIME`` up to which symbols are complete, so earlier samples can be
        resolved.
        """
        ksymbols_ns = modules_ns = now_boot_ns
        if self._source is not None and self._ksymbols is not None:
            changes, ksymbols_ns = self._source.poll(now_boot_ns)
            for change in changes:
                self._ksymbols.apply(change)
        if self._modules is not None:
            readings, modules_ns = self._modules.poll(now_boot_ns)
            for reading in readings:
                self._timeline.apply(reading)
            if readings:
                views = {view.snapshot.generation: view for view in self._views}
                self._views = tuple(
                    views.get(snapshot.generation) or self._make_view(snapshot)
                    for snapshot in self._timeline.snapshots
                )
        self._complete_until_ns = min(ksymbols_ns, modules_ns)
        return self._complete_until_ns

    def reload(self, now_boot_ns: int) -> Snapshot:
        """Rereads all symbols. The old symbols still apply to samples taken before ``now_boot_ns``.

        Does nothing if modules are tracked or the symbols cannot change.
        """
        current = self.snapshot
        if self._files is None or self._modules is not None:
            return current
        after = read_snapshot(
            self._files,
            generation=current.generation + 1,
            since_ns=now_boot_ns,
            previous=current,
        )
        self._views = (self._make_view(after), *self._views[:MAX_HISTORY])
        return after

    def state(self, sample: RawSample) -> int:
        """Returns the generation of the snapshot valid at the time of a sample."""
        time_ns, views = sample.time_ns, self._views  # inlines _view, to avoid a call
        for view in views:
            if time_ns >= view.since_ns:
                return view.generation
        return views[-1].generation

    def resolve(self, raw: RawSide, state: int) -> Side | VariableSide:
        """Resolves the kernel frames of a stack with the snapshot of generation ``state``."""
        view = self._views[0]
        for view in self._views:
            if view.generation == state:
                break
        frames = _frames(view.frames, raw.addresses())
        side = make_kernel_side(frames, raw.status)
        if self._ksymbols is None or all(map(_MODULE, frames)):
            return side
        return MixedSide(side, self._ksymbols)

    def resolve_addresses(
        self,
        pcs: Sequence[int],
        *,
        leaf_exact: bool = True,
        time_ns: int | None = None,
    ) -> tuple[Frame, ...]:
        """Resolves the kernel addresses of a stack to frames, leaf first.

        With ``leaf_exact``, the first address is a program counter rather than a return address.
        ``time_ns`` is a boottime; None means now.
        """
        time_ns = NOW_NS if time_ns is None else time_ns
        frames = _frames(self._view(time_ns).frames, pcs, leaf_exact=leaf_exact)
        if self._ksymbols is None or all(map(_MODULE, frames)):
            return frames
        mixed = MixedSide(make_kernel_side(frames, STACK_OK), self._ksymbols)
        return tuple(mixed.at(time_ns).frames)

    def find(self, name: str, *, prefix: bool = False) -> tuple[Match, ...]:
        """Finds all symbols with this linkage name, or with this prefix."""
        matches = self.snapshot.find(name, prefix=prefix)
        return (*matches, *self._ksymbols.find(name, prefix=prefix)) if self._ksymbols else matches

    def ksymbols(self) -> tuple[Ksymbol, ...]:
        """Returns the ksymbols that were loaded at the last :meth:`advance`, sorted by address."""
        if self._ksymbols is None:
            return self.snapshot.ksymbols()
        return tuple(
            entry.symbol._replace(since_ns=entry.since_ns) for entry in self._ksymbols.live()
        )

    def module(self, name: str) -> Module | None:
        """Returns the loaded module with this name, or ``vmlinux``; None if it is not loaded."""
        return self.snapshot.module(name)

    def explain(self, address: int, *, time_ns: int | None = None) -> Explanation:
        """Explains a runtime address: its names, its section, and why its frame was chosen.

        ``address`` is a program counter, or a return address minus one. ``time_ns`` is a boottime;
        None means now.
        """
        time_ns = NOW_NS if time_ns is None else time_ns
        explanation = self._view(time_ns).snapshot.explain(address)
        if self._ksymbols is None or not is_outside(explanation.frame):
            return explanation
        ksymbol = self._ksymbols.lookup(address, time_ns)
        return explanation if ksymbol is None else explain_ksymbol(ksymbol, address)

    def finish(self, timeout_s: float) -> None:
        """Does nothing, because no reads are pending after :meth:`advance`."""

    def close(self) -> None:
        """Drop replaced snapshots and caches, and close the sources."""
        self._views = (self._make_view(self.snapshot),)
        for source in (self._source, self._modules):
            if source is not None:
                source.close()

    def _make_view(self, snapshot: Snapshot) -> _View:
        if self._ksymbols is not None:
            snapshot = snapshot.without_ksymbols()
        frames = BoundedCache(MAX_FRAMES_CACHED, snapshot.frame)
        return _View(snapshot.since_ns, snapshot.generation, snapshot, frames)

    def _view(self, time_ns: int) -> _View:
        views = self._views
        return next((view for view in views if time_ns >= view.since_ns), views[-1])


def _frames(
    cache: BoundedCache[int, Frame], pcs: Sequence[int], *, leaf_exact: bool = True
) -> tuple[Frame, ...]:
    return tuple(map(cache.__getitem__, lookup_addresses(pcs, leaf_exact=leaf_exact)))


def _with_sizes(snapshot: Snapshot, paths: Sequence[str | os.PathLike[str]]) -> Snapshot:
    from otel_kprofiler.symbols.kernel.elf_functions import ElfSymbols  # noqa: PLC0415 - elftools

    tables: dict[str, Callable[[int], SymbolTable]] = {}
    loaded = {module.build_id for module in snapshot.modules}
    for path in paths:
        symbols = ElfSymbols(os.fspath(path))
        if symbols.build_id is None or symbols.build_id not in loaded:
            raise KProfilerError(
                f"{path} does not match any loaded module: "
                f"build id {symbols.build_id or 'missing'}",
                hint="pass ELF files of the captured kernel, and copies of its /proc/modules,"
                " /sys/module and /sys/kernel/notes",
            )
        tables[symbols.build_id] = symbols.table
    return snapshot.with_tables(tables)
