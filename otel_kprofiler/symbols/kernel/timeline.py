"""Which modules were in memory when: from readings of the modules to snapshots for each time.

A module is taken to have its memory from the last look that showed it free, because it runs
before the kernel tells of it; at the latest from the moment at which the one before it there was
announced as removed. A removal is known to lie between two looks at the announcements: in
between the address belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.symbols.kernel.snapshot import ModuleSymbols, Snapshot

KEEP_NS: Final = 15_000_000_000
"""How long modules that were unloaded are kept for samples from before."""
MAX_SNAPSHOTS: Final = 64
"""No more of them are kept."""
FOREVER: Final = 1 << 63


class LoadedModule(NamedTuple):
    """A module from loading to unloading; ``main.module.generation`` is its number.

    Attributes:
        main: the module and its symbols.
        init: its init code, while that was in memory; None if nothing is known of it.
        init_until_ns: boot time until which the init code was there.
    """

    main: ModuleSymbols
    init: ModuleSymbols | None = None
    init_until_ns: int = FOREVER


class Departure(NamedTuple):
    """When a module was unloaded, as far as that is known.

    Attributes:
        there_ns: boot time of the last look by which it was still there.
        gone_ns: boot time of the first look by which it was gone.
    """

    there_ns: int
    gone_ns: int


class ModuleReading(NamedTuple):
    """All modules that were found in memory.

    Attributes:
        looked_ns: boot time at which the list of modules was read.
        free_ns: boot time of the look before; what was not there then was loaded later.
        removed: those that were unloaded since then, by number; without an entry it was between
            ``free_ns`` and ``looked_ns``.
        modules: those there are, oldest first.
    """

    looked_ns: int
    free_ns: int
    removed: Mapping[int, Departure]
    modules: tuple[LoadedModule, ...]


class ModuleCounts(NamedTuple):
    """What a watch has done.

    Attributes:
        events: announcements of modules.
        rescans: how often everything was read again, because announcements were lost.
        readings: how often the modules were read.
        names_read: how often kallsyms was read for names.
        restarts: how often the thread had to be started again.
    """

    events: int = 0
    rescans: int = 0
    readings: int = 0
    names_read: int = 0
    restarts: int = 0


class ModuleSource(Protocol):
    """Where readings come from: the running kernel, or a recording."""

    def begin(self, snapshot: Snapshot) -> None:
        """Start from what was there at first. Once."""

    def poll(self, now_ns: int) -> tuple[list[ModuleReading], int]:
        """Readings since the last call, and the boot time up to which they are complete."""

    def close(self) -> None:
        """Give everything back; may be called again."""


class _Stay:
    """One module, or its init code, in memory: [since_ns, until_ns)."""

    __slots__ = ("free_ns", "since_ns", "symbols", "until_ns")

    def __init__(self, symbols: ModuleSymbols, since_ns: int) -> None:
        self.symbols = symbols
        self.since_ns = since_ns
        self.until_ns = FOREVER
        self.free_ns = FOREVER
        """From when another one may be there; it is unknown who was there since ``until_ns``."""

    def end(self, until_ns: int, free_ns: int) -> None:
        """Note when it went."""
        self.until_ns = max(self.since_ns, until_ns)
        self.free_ns = max(self.since_ns, free_ns)

    def overlaps(self, other: _Stay) -> bool:
        """Whether both claim an address."""
        return any(
            mine.start < their.end and their.start < mine.end
            for mine in self.symbols.module.ranges
            for their in other.symbols.module.ranges
        )


class Timeline:
    """Snapshots of a kernel whose modules come and go. For one thread.

    Args:
        first: what was there at the beginning.
    """

    def __init__(self, first: Snapshot) -> None:
        self._first = first
        self._generation = first.generation
        self._stays: dict[tuple[int, bool], _Stay] = {  # by number, and whether it is no init code
            (symbols.module.generation, True): _Stay(symbols, first.since_ns)
            for symbols in first.loaded()
        }
        self.snapshots: tuple[Snapshot, ...] = (first,)
        """Newest first."""
        self._live: dict[int, list[ModuleSymbols]] = {}  # of each snapshot, by its start

    def apply(self, reading: ModuleReading) -> None:
        """Take over what was read; readings come in the order of their times."""
        now = {loaded.main.module.generation: loaded for loaded in reading.modules}
        for (number, _), stay in self._stays.items():
            if number not in now and stay.until_ns == FOREVER:
                unseen = Departure(reading.free_ns, reading.looked_ns)
                stay.end(*reading.removed.get(number, unseen))
        for number, loaded in now.items():
            self._put((number, True), loaded.main, FOREVER, reading.free_ns)
            if loaded.init is not None:
                self._put((number, False), loaded.init, loaded.init_until_ns, reading.free_ns)
        horizon_ns = reading.looked_ns - KEEP_NS
        self._stays = {k: stay for k, stay in self._stays.items() if stay.until_ns > horizon_ns}
        self._make_snapshots(horizon_ns)

    def _put(
        self, key: tuple[int, bool], symbols: ModuleSymbols, until_ns: int, free_ns: int
    ) -> None:
        stay = self._stays.get(key)
        if stay is None:
            stay = _Stay(symbols, free_ns)
            for other in self._stays.values():
                if other.until_ns < until_ns and other.overlaps(stay):
                    stay.since_ns = max(stay.since_ns, other.free_ns)
            self._stays[key] = stay
        stay.symbols = symbols
        stay.end(until_ns, until_ns)

    def _make_snapshots(self, horizon_ns: int) -> None:
        stays = [stay for _, stay in sorted(self._stays.items())]
        edges = {time for stay in stays for time in (stay.since_ns, stay.until_ns)} - {FOREVER}
        starts = sorted((edge for edge in edges if edge > horizon_ns), reverse=True)
        starts.append(max((edge for edge in edges if edge <= horizon_ns), default=0))
        known = {snapshot.since_ns: snapshot for snapshot in self.snapshots}
        lives: dict[int, list[ModuleSymbols]] = {}
        snapshots = []
        for start_ns in reversed(starts[:MAX_SNAPSHOTS]):
            live = [stay.symbols for stay in stays if stay.since_ns <= start_ns < stay.until_ns]
            snapshot = known.get(start_ns)
            if snapshot is None or self._live.get(start_ns) != live:
                self._generation += 1
                snapshot = self._first.with_modules(
                    live,
                    generation=self._generation,
                    since_ns=start_ns,
                    gone=[
                        part
                        for (_, is_main), stay in self._stays.items()
                        if is_main and stay.until_ns <= start_ns
                        for part in stay.symbols.module.ranges
                    ],
                )
            lives[start_ns] = live
            snapshots.append(snapshot)
        self._live = lives
        self.snapshots = tuple(reversed(snapshots))
