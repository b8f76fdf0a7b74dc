"""Defines the event for kernel lock contention."""

from typing import Final, NamedTuple

from otel_kprofiler.model import LOCK_CONTENTION, ProfileKind

LOCK_EVENT: Final = "lock-contention"


class LockSpec(NamedTuple):
    """Kernel lock waits, sampled by duration at ``rate`` samples per second on each CPU."""

    rate: int

    @property
    def name(self) -> str:
        """Returns the name of the event."""
        return LOCK_EVENT

    @property
    def period(self) -> int:
        """Returns 0, because a sample does not stand for a fixed number of waits."""
        return 0

    @property
    def kind(self) -> ProfileKind:
        """Returns the kind of the event's samples."""
        return LOCK_CONTENTION

    def __str__(self) -> str:
        return f"{self.name}:freq={self.rate}"
