"""Converts boottime to Unix time, and tracks the offset between the two clocks.

The kernel stamps samples with boottime (``CLOCK_BOOTTIME``: time since boot, including suspend),
but receivers expect Unix time. To measure the offset, the Unix clock is read between two reads of
boottime. Of several measurements, the one with the shortest time between the boottime reads is
used, as in opentelemetry-ebpf-profiler. Boottime is never set, so only setting or slewing the Unix
clock changes the offset.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

SYNC_TRIES: Final = 5
STEP_NS: Final = 1_000_000
"""Minimum offset change, in nanoseconds, treated as a clock step, not a measurement error."""
EARLIEST_UNIX_NS: Final = 1_577_836_800_000_000_000
"""2020-01-01 in Unix time. A clock that shows an earlier time has not been set since boot."""
CATCH_UP: Final = 2
"""Factor by which a stream is slowed down while it is ahead of the Unix clock."""

_log = logging.getLogger(__name__)


class TimeSource(Protocol):
    """Reads clocks. Tests replace it with a fake clock."""

    def boot_ns(self) -> int:
        """Returns nanoseconds since boot (``CLOCK_BOOTTIME``)."""

    def unix_ns(self) -> int:
        """Returns nanoseconds since the Unix epoch (``CLOCK_REALTIME``)."""


class SystemTime:
    """The clocks of this host."""

    def boot_ns(self) -> int:
        """Returns nanoseconds since boot (``CLOCK_BOOTTIME``)."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def unix_ns(self) -> int:
        """Returns nanoseconds since the Unix epoch (``CLOCK_REALTIME``)."""
        return time.time_ns()


def suspended_ns() -> int:
    """Returns the total time that the host has been suspended since boot, in nanoseconds."""
    best_width = best = 0
    for attempt in range(SYNC_TRIES):
        first = time.monotonic_ns()
        boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        width = time.monotonic_ns() - first
        if attempt == 0 or width < best_width:
            best_width, best = width, boot - (first + width // 2)
    return max(0, best)


class Clock:
    """Converts boottime to Unix time, using an offset that is remeasured on demand.

    Until the Unix clock is set, Unix time counts from :data:`EARLIEST_UNIX_NS`, because receivers
    reject or misplace data from 1970. Thread-safe, because the offset is a single integer.
    """

    def __init__(self, source: TimeSource | None = None) -> None:
        self._source = source or SystemTime()
        self._unset = False
        self._offset_ns = self._measure()

    def boot_ns(self) -> int:
        """Returns the current time in nanoseconds since boot."""
        return self._source.boot_ns()

    def to_unix_ns(self, boot_ns: int) -> int:
        """Convert a boottime to Unix time, using the most recently measured offset."""
        return boot_ns + self._offset_ns

    def sync(self) -> int:
        """Measure the offset again, and return its change in nanoseconds."""
        old_offset_ns = self._offset_ns
        self._offset_ns = self._measure()
        return self._offset_ns - old_offset_ns

    def follow(self) -> int:
        """Measure the offset again if the Unix clock was set.

        Return the offset's change in nanoseconds.
        """
        distance = self._source.unix_ns() - self._source.boot_ns() - self._offset_ns
        if abs(distance) < STEP_NS:
            return 0
        moved = self.sync()
        if abs(moved) >= STEP_NS:
            _log.info("the Unix clock has jumped by %.3f s", moved / 1e9)
        return moved

    def _measure(self) -> int:
        best_width = best_offset = 0
        for attempt in range(SYNC_TRIES):
            first = self._source.boot_ns()
            unix = self._source.unix_ns()
            width = self._source.boot_ns() - first
            if attempt == 0 or width < best_width:
                best_width, best_offset = width, unix - (first + width // 2)
        if unix < EARLIEST_UNIX_NS:
            if not self._unset:
                _log.warning(
                    "the Unix clock is not set; timestamps will start in 2020 until it is set"
                )
            self._unset = True
            return EARLIEST_UNIX_NS
        return best_offset


class Interval(NamedTuple):
    """An interval of boottime and the corresponding interval of Unix time, both half-open."""

    start_boot_ns: int
    end_boot_ns: int
    start_unix_ns: int
    end_unix_ns: int

    def to_unix_ns(self, times_boot_ns: Sequence[int], resolution_ns: int = 1) -> list[int]:
        """Convert boottimes to Unix times, rounded down and clamped to this interval.

        ``resolution_ns`` is a power of two. The low bits of rounded times are 0.
        """
        first, last = self.start_unix_ns, self.end_unix_ns - 1
        length, boot_length = last + 1 - first, self.end_boot_ns - self.start_boot_ns
        bits = -resolution_ns
        if length == boot_length:
            offset = first - self.start_boot_ns
            times = [time + offset & bits for time in times_boot_ns]
        else:
            start = self.start_boot_ns
            times = [
                first + (time - start) * length // boot_length & bits for time in times_boot_ns
            ]
        if not times or (first <= min(times) and max(times) <= last):
            return times
        return [min(max(time, first), last) for time in times]


class StreamClock:
    """Maps consecutive boottime intervals to Unix times that never go backwards. Not thread-safe.

    If the clock is set forward, the stream jumps with it, leaving a gap. If the clock is set back,
    the stream runs at a fraction of the clock's speed until the clock has caught up.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end_unix_ns = 0

    def interval(self, start_boot_ns: int, end_boot_ns: int) -> Interval:
        """Returns the next interval (at least 1 ns long) and its Unix times."""
        self._clock.follow()
        length = max(1, end_boot_ns - start_boot_ns)
        start = max(self._clock.to_unix_ns(start_boot_ns), self._end_unix_ns)
        end = max(self._clock.to_unix_ns(start_boot_ns + length), start + -(-length // CATCH_UP))
        self._end_unix_ns = end
        return Interval(start_boot_ns, start_boot_ns + length, start, end)
