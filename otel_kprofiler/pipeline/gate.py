"""The event-time gate: a sample waits until every symbol stream has passed its time.

Samples, module events and BPF symbol records arrive on different ways. Resolving a sample
as soon as it is read could use symbols that are already newer, or not yet as new, as the
moment at which it was taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from otel_kprofiler.model import RawSample, SampleCounts

_TIME = attrgetter("time_ns")
_KIND = attrgetter("kind.name")


def count_kinds(samples: Iterable[RawSample]) -> SampleCounts:
    """Number of samples by the name of their kind."""
    return SampleCounts(map(_KIND, samples))


class EventTimeGate:
    """Holds samples back and lets them go in the order of their times.

    The wait is bounded: a symbol stream that stands still delays samples by ``max_wait_ns``
    at most, and a sampler that no longer says how far it is by ``max_stall_ns``; what it hands
    over later counts in the window that is open then. Belongs to one thread.

    Args:
        max_wait_ns: longest time that a sample waits for symbol streams, in nanoseconds.
        max_stall_ns: longest time that it waits for older samples.

    Attributes:
        counts: number of waiting samples by kind.
    """

    def __init__(self, max_wait_ns: int = 500_000_000, max_stall_ns: int = 10_000_000_000) -> None:
        self._max_wait_ns = max_wait_ns
        self._max_stall_ns = max_stall_ns
        self._waiting: list[RawSample] = []
        self.counts = SampleCounts()

    def push(self, samples: list[RawSample]) -> None:
        """Take samples, in any order."""
        self._waiting += samples
        self.counts += count_kinds(samples)

    def passed_ns(self, samples_ns: int, symbols_ns: int, now_ns: int) -> int:
        """Boot time up to which everything is known, or will not be waited for any longer.

        Args:
            samples_ns: every sample before this boot time has been pushed.
            symbols_ns: every symbol event before this boot time has been applied.
            now_ns: the present, in boot time.
        """
        samples_ns = max(samples_ns, now_ns - self._max_stall_ns)
        return min(samples_ns, max(symbols_ns, now_ns - self._max_wait_ns))

    def find_earliest_ns(self) -> int | None:
        """Time of the oldest sample that waits; None if none does."""
        return min((sample.time_ns for sample in self._waiting), default=None)

    def release(self, before_ns: int) -> list[RawSample]:
        """Samples taken before ``before_ns``, sorted by time."""
        self._waiting.sort(key=_TIME)
        low, high = 0, len(self._waiting)
        while low < high:
            middle = (low + high) // 2
            if self._waiting[middle].time_ns < before_ns:
                low = middle + 1
            else:
                high = middle
        released, self._waiting = self._waiting[:low], self._waiting[low:]
        self.counts -= count_kinds(released)
        return released
