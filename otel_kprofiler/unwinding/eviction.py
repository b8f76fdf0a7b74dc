"""Tracks loaded tables and their sizes, and selects tables to evict for a new one."""

from collections.abc import Sequence
from typing import NamedTuple

from otel_kprofiler.model import FileKey
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused


class Limits(NamedTuple):
    """Limits on kernel memory for tables.

    Attributes:
        total_bytes: limit for all tables together.
        file_bytes: limit for a single file's table.
        idle_ns: time without a sample after which a table may be evicted. Tables used more recently
            are not evicted, which avoids thrashing if the tables in use exceed the limit.
    """

    total_bytes: int = 64 << 20
    file_bytes: int = 40 << 20
    idle_ns: int = 10_000_000_000


class Table(NamedTuple):
    """A loaded table; ``loaded_ns`` is a boottime, or 0 if no sample has requested the table."""

    key: FileKey
    slot: int
    size: int
    loaded_ns: int


class Claim(NamedTuple):
    """Space reserved for a table: a slot, possibly a victim's, and the victims to remove first."""

    slot: int
    size: int
    victims: tuple[Table, ...]


class TableSpace:
    """Manages the slots and the memory of tables; not thread-safe.

    A claim reserves its bytes and slot immediately. Removing evicted tables takes milliseconds,
    during which the tables in the kernel may exceed the limit.
    """

    def __init__(self, slots: int, limits: Limits) -> None:
        self._limits = limits
        self._free = list(range(slots - 1, -1, -1))
        self._leaving = 0  # size in bytes of evicted tables that have not been removed yet
        self.bytes = 0
        """Number of bytes used by tables, including those being loaded or removed."""
        self.tables: dict[FileKey, Table] = {}

    def claim(
        self, size: int, last_uses_ns: Sequence[int], now_ns: int, *, evicts: bool = True
    ) -> Claim:
        """Claim space for a table; finish with :meth:`removed` and :meth:`add`, or :meth:`cancel`.

        ``last_uses_ns`` contains the boottime of each slot's last use. If there is no space,
        nothing is claimed, and :class:`TableRefused` is raised. ``evicts`` allows evicting other
        tables.
        """
        limits = self._limits
        if size > min(limits.file_bytes, limits.total_bytes):
            raise TableRefused(Refusal.TOO_LARGE, f"{size} bytes")

        def last_use_ns(table: Table) -> int:
            return max(table.loaded_ns, last_uses_ns[table.slot])

        over = self.bytes - self._leaving + size - limits.total_bytes
        victims: list[Table] = []
        if evicts and (over > 0 or not self._free):
            for table in sorted(self.tables.values(), key=last_use_ns):
                if now_ns - last_use_ns(table) < limits.idle_ns:
                    break
                victims.append(table)
                over -= table.size
                if over <= 0:
                    break
        if over > 0 or not (self._free or victims):
            raise TableRefused(Refusal.MEMORY_IN_USE, f"{size} bytes")
        for table in victims:
            del self.tables[table.key]
            self._leaving += table.size
        self.bytes += size
        return Claim(self._free.pop() if self._free else victims[0].slot, size, tuple(victims))

    def removed(self, claim: Claim) -> None:
        """Record that the tables evicted for a claim have been removed."""
        self._free += [table.slot for table in claim.victims if table.slot != claim.slot]
        size = sum(table.size for table in claim.victims)
        self._leaving -= size
        self.bytes -= size

    def add(self, claim: Claim, key: FileKey, loaded_ns: int) -> None:
        """Add a loaded table, whose space has been claimed.

        A table whose ``loaded_ns`` is 0 is evicted first, unless a sample has used the table.
        """
        self.tables[key] = Table(key, claim.slot, claim.size, loaded_ns)

    def cancel(self, claim: Claim) -> None:
        """Release the claim on a table that could not be loaded."""
        self._free.append(claim.slot)
        self.bytes -= claim.size
