"""Holds each sample until every symbol stream has passed the sample's timestamp.

Samples, module events and BPF symbol records arrive separately. If a sample were resolved as soon
as it was read, the symbols could be older or newer than the sample.
"""

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from otel_kprofiler.model import RawSample, SampleCounts

MAX_WAIT_NS: Final = 500_000_000
"""Maximum time, in nanoseconds, that a sample waits for symbol changes up to its timestamp."""

_MAX_STALL_NS: Final = 10_000_000_000
_TIME = attrgetter("time_ns")
_KIND = attrgetter("kind.name")


def count_kinds(samples: Iterable[RawSample]) -> SampleCounts:
    """Returns the number of samples by kind name."""
    return SampleCounts(map(_KIND, samples))


class EventTimeGate:
    """Holds samples back and releases them in time order. Not thread-safe.

    The wait is bounded: a stalled symbol stream delays samples by at most ``max_wait_ns``, and a
    stalled sampler watermark delays them by at most ten seconds. Samples that arrive even later are
    counted in the window open at that time.
    """

    def __init__(self, max_wait_ns: int = MAX_WAIT_NS) -> None:
        self._max_wait_ns = max_wait_ns
        self._waiting: list[RawSample] = []

    @property
    def counts(self) -> SampleCounts:
        """Returns the number of waiting samples, by kind."""
        return count_kinds(self._waiting)

    def push(self, samples: list[RawSample]) -> None:
        """Add samples, in any order."""
        self._waiting += samples

    def passed_ns(self, samples_ns: int, symbols_ns: int, now_ns: int) -> int:
        """Returns the ``CLOCK_BOOTTIME`` before which no more data is expected.

        All samples before the boottime ``samples_ns`` must have been pushed, and all symbol events
        before ``symbols_ns`` must have been applied.
        """
        samples_ns = max(samples_ns, now_ns - _MAX_STALL_NS)
        return min(samples_ns, max(symbols_ns, now_ns - self._max_wait_ns))

    def find_earliest_ns(self) -> int | None:
        """Returns the time of the oldest waiting sample; None if there is none."""
        return min((sample.time_ns for sample in self._waiting), default=None)

    def release(self, before_ns: int) -> list[RawSample]:
        """Remove and return the samples older than ``before_ns``, sorted by time."""
        self._waiting.sort(key=_TIME)
        count = bisect_left(self._waiting, before_ns, key=_TIME)
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        return released
