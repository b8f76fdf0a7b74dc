"""The only reader of clocks: boot time, Unix time, and the offset between them.

The kernel stamps samples with ``CLOCK_BOOTTIME`` (time since boot, including suspend);
receivers want Unix time. The offset is measured by reading both clocks in a sandwich and
keeping the tightest of several tries (the method of opentelemetry-ebpf-profiler).
"""

from __future__ import annotations

import time
from typing import Protocol

SYNC_TRIES = 5


class TimeSource(Protocol):
    """Where raw clock readings come from; tests pass their own."""

    def boot_ns(self) -> int:
        """Nanoseconds since boot (``CLOCK_BOOTTIME``)."""

    def unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch (``CLOCK_REALTIME``)."""


class SystemTime:
    """The clocks of this host."""

    def boot_ns(self) -> int:
        """Nanoseconds since boot (``CLOCK_BOOTTIME``)."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch (``CLOCK_REALTIME``)."""
        return time.time_ns()


class Clock:
    """Converts boot time to Unix time with an offset that is measured again on demand.

    Thread-safe: the offset is one integer, replaced as a whole.
    """

    def __init__(self, source: TimeSource | None = None) -> None:
        self._source = source or SystemTime()
        self._offset_ns = self._measure()

    def boot_ns(self) -> int:
        """Now, in nanoseconds since boot."""
        return self._source.boot_ns()

    def to_unix_ns(self, boot_ns: int) -> int:
        """Unix time of an instant given in boot time, by the last measured offset."""
        return boot_ns + self._offset_ns

    def sync(self) -> int:
        """Measure the offset again; returns how far Unix time has moved, in nanoseconds."""
        before = self._offset_ns
        self._offset_ns = self._measure()
        return self._offset_ns - before

    def _measure(self) -> int:
        best_width = best_offset = 0
        for attempt in range(SYNC_TRIES):
            first = self._source.boot_ns()
            unix = self._source.unix_ns()
            width = self._source.boot_ns() - first
            if attempt == 0 or width < best_width:
                best_width, best_offset = width, unix - (first + width // 2)
        return best_offset
