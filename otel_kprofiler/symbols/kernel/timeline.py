"""Keeps the history of loaded modules: builds a snapshot from each scan of the module list.

A module's code runs before the kernel announces the module. The load time of a new module is
therefore taken to be the time of the previous scan, or the time at which the previous module at its
addresses was removed, whichever is later. The time at which a module was removed is known only to
lie between two polls for announcements. Between those polls, addresses of a removed module are not
attributed to any module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.symbols.kernel.snapshot import ModuleSymbols, Snapshot

KEEP_NS: Final = 15_000_000_000
"""How long an unloaded module is kept, for samples taken before it was unloaded."""
MAX_SNAPSHOTS: Final = 64
"""Maximum number of snapshots that are kept."""
FOREVER: Final = 1 << 63


class LoadedModule(NamedTuple):
    """A loaded module, identified by ``main.module.generation``.

    ``init`` is the module's init code, or None if unknown. The init code was in memory until
    ``init_until_ns``.
    """

    main: ModuleSymbols
    init: ModuleSymbols | None = None
    init_until_ns: int = FOREVER


class Removal(NamedTuple):
    """Boottimes at which a module was last seen loaded, and first seen unloaded."""

    there_ns: int
    gone_ns: int


class ModuleReading(NamedTuple):
    """A scan of the loaded modules, at ``looked_ns``.

    Attributes:
        looked_ns: boottime at which the list of modules was read.
        free_ns: boottime of the previous scan; modules missing from that scan were loaded later.
        removed: removal times, by module number. If a removed module has no entry, it was unloaded
            between ``free_ns`` and ``looked_ns``.
        modules: the loaded modules, oldest first.
    """

    looked_ns: int
    free_ns: int
    removed: Mapping[int, Removal]
    modules: tuple[LoadedModule, ...]


class ModuleCounts(NamedTuple):
    """Counters for the thread that watches modules.

    Attributes:
        events: number of module load and unload notifications received.
        rescans: number of times all modules were reread because notifications were lost.
        readings: number of times the module list was read.
        names_read: number of times kallsyms was read for symbol names.
        restarts: number of times the watching thread was restarted after a failure.
    """

    events: int = 0
    rescans: int = 0
    readings: int = 0
    names_read: int = 0
    restarts: int = 0


class ModuleSource(Protocol):
    """Provides scans of the loaded modules, from the running kernel or a recording."""

    def begin(self, snapshot: Snapshot) -> None:
        """Start from the modules in the first snapshot. Call this only once."""

    def poll(self, now_ns: int) -> tuple[list[ModuleReading], int]:
        """Returns new scans, and the ``CLOCK_BOOTTIME`` up to which all scans were returned."""

    def close(self) -> None:
        """Release all resources; idempotent."""


class _Lifetime:
    """The period in which a module, or its init code, was in memory: ``[since_ns, until_ns)``."""

    __slots__ = ("free_ns", "since_ns", "symbols", "until_ns")

    def __init__(self, symbols: ModuleSymbols, since_ns: int) -> None:
        self.symbols = symbols
        self.since_ns = since_ns
        self.until_ns = FOREVER
        self.free_ns = FOREVER
        """Boottime from which other modules may use the module's memory. Between ``until_ns`` and
        ``free_ns``, it is unknown which module uses the memory.
        """

    def end(self, until_ns: int, free_ns: int) -> None:
        self.until_ns = max(self.since_ns, until_ns)
        self.free_ns = max(self.since_ns, free_ns)

    def overlaps(self, other: _Lifetime) -> bool:
        return any(
            mine.start < their.end and their.start < mine.end
            for mine in self.symbols.module.ranges
            for their in other.symbols.module.ranges
        )


class Timeline:
    """The history of kernel snapshots, one per change in the loaded modules; not thread-safe."""

    def __init__(self, first: Snapshot) -> None:
        self._first = first
        self._generation = first.generation
        # by the module's generation and whether the code is core code, as opposed to init code
        self._lifetimes: dict[tuple[int, bool], _Lifetime] = {
            (symbols.module.generation, True): _Lifetime(symbols, first.since_ns)
            for symbols in first.loaded()
        }
        self.snapshots: tuple[Snapshot, ...] = (first,)
        """The snapshots, newest first."""
        self._live: dict[int, list[ModuleSymbols]] = {}  # modules in each snapshot, by ``since_ns``

    def apply(self, reading: ModuleReading) -> None:
        """Apply a scan of the module list. Scans must be applied in chronological order."""
        now = {loaded.main.module.generation: loaded for loaded in reading.modules}
        for (number, _), lifetime in self._lifetimes.items():
            if number not in now and lifetime.until_ns == FOREVER:
                unseen = Removal(reading.free_ns, reading.looked_ns)
                lifetime.end(*reading.removed.get(number, unseen))
        for number, loaded in now.items():
            self._put((number, True), loaded.main, FOREVER, reading.free_ns)
            if loaded.init is not None:
                self._put((number, False), loaded.init, loaded.init_until_ns, reading.free_ns)
        horizon_ns = reading.looked_ns - KEEP_NS
        self._lifetimes = {
            k: lifetime for k, lifetime in self._lifetimes.items() if lifetime.until_ns > horizon_ns
        }
        self._make_snapshots(horizon_ns)

    def _put(
        self, key: tuple[int, bool], symbols: ModuleSymbols, until_ns: int, free_ns: int
    ) -> None:
        lifetime = self._lifetimes.get(key)
        if lifetime is None:
            lifetime = _Lifetime(symbols, free_ns)
            for other in self._lifetimes.values():
                if other.until_ns < until_ns and other.overlaps(lifetime):
                    lifetime.since_ns = max(lifetime.since_ns, other.free_ns)
            self._lifetimes[key] = lifetime
        lifetime.symbols = symbols
        lifetime.end(until_ns, until_ns)

    def _make_snapshots(self, horizon_ns: int) -> None:
        lifetimes = [lifetime for _, lifetime in sorted(self._lifetimes.items())]
        edges = {
            time for lifetime in lifetimes for time in (lifetime.since_ns, lifetime.until_ns)
        } - {FOREVER}
        starts = sorted((edge for edge in edges if edge > horizon_ns), reverse=True)
        starts.append(max((edge for edge in edges if edge <= horizon_ns), default=0))
        existing = {snapshot.since_ns: snapshot for snapshot in self.snapshots}
        lives: dict[int, list[ModuleSymbols]] = {}
        snapshots = []
        for start_ns in reversed(starts[:MAX_SNAPSHOTS]):
            live = [
                lifetime.symbols
                for lifetime in lifetimes
                if lifetime.since_ns <= start_ns < lifetime.until_ns
            ]
            snapshot = existing.get(start_ns)
            if snapshot is None or self._live.get(start_ns) != live:
                self._generation += 1
                snapshot = self._first.with_modules(
                    live,
                    generation=self._generation,
                    since_ns=start_ns,
                    gone=[
                        part
                        for (_, is_main), lifetime in self._lifetimes.items()
                        if is_main and lifetime.until_ns <= start_ns
                        for part in lifetime.symbols.module.ranges
                    ],
                )
            lives[start_ns] = live
            snapshots.append(snapshot)
        self._live = lives
        self.snapshots = tuple(reversed(snapshots))
