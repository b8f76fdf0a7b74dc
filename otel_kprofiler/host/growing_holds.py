"""Delays retries by intervals that grow with each failure."""

from collections.abc import Hashable
from typing import Final

FIRST_HOLD_S: Final = 30.0
"""Time until the first retry, in seconds."""
LAST_HOLD_S: Final = 3600.0
"""Maximum time between retries, in seconds."""
MAX_HELD: Final = 1024
"""Maximum number of keys. The key that failed least recently is forgotten first."""


class GrowingHolds:
    """Retry intervals by key: 30 s, doubled by each failure up to an hour. Not thread-safe."""

    def __init__(self) -> None:
        self._holds_s: dict[Hashable, float] = {}  # most recent failure last

    def extend(self, key: Hashable) -> float:
        """Record a failure, and return the seconds until the next retry."""
        hold_s = min(2 * self._holds_s.pop(key, FIRST_HOLD_S / 2), LAST_HOLD_S)
        self._holds_s[key] = hold_s
        if len(self._holds_s) > MAX_HELD:
            del self._holds_s[next(iter(self._holds_s))]
        return hold_s

    def end(self, key: Hashable) -> None:
        """Record a success, so that the next failure counts as the first."""
        self._holds_s.pop(key, None)
