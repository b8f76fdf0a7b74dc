"""Determines the lengths of windows and the intervals between drains."""

from dataclasses import dataclass
from typing import Final

DRAIN_INTERVAL_S: Final = 0.25
"""Interval between drains, in seconds. The kernel wakes the thread earlier if the ring fills up."""
LONGEST_DRAIN_INTERVAL_S: Final = 1.0
"""Interval, in seconds, between drains of the agent's ring while no new process is sampled.
Draining less often costs less per sample, because caches are cold after each wait."""
IDLE_S: Final = 5.0
"""Maximum interval, in seconds, between drains while no samples arrive."""
FIRST_WINDOW_NS: Final = 100_000_000
"""Length of the first window, except in recordings to a file."""


@dataclass(frozen=True, slots=True)
class WindowSchedule:
    """The lengths of windows.

    Attributes:
        interval_ns: the length of a window, in nanoseconds.
        jitter: the fraction (0 to 1) by which each window's length varies at random, so that hosts
            do not report at the same time.
        first_ns: the length of the first window, which is short so that data arrives soon. The
            length doubles after each empty window.
        max_samples: the number of samples at which a window ends early; None for no limit.
    """

    interval_ns: int
    jitter: float = 0.0
    first_ns: int | None = None
    max_samples: int | None = None

    def length_ns(self, random_unit: float) -> int:
        """Returns the length of a window; ``random_unit`` is in [0, 1)."""
        return max(1, round(self.interval_ns * (1 + self.jitter * (2 * random_unit - 1))))


LIVE_SCHEDULE: Final = WindowSchedule(1_000_000_000, first_ns=250_000_000)
"""For live displays: one window per second, but a shorter first window."""
WHOLE_RECORDING: Final = WindowSchedule(2**62)
"""A single window, closed at the end of the recording."""
