"""Rate-limits repeated warnings to one per pattern and interval, and counts suppressed warnings."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

REPEAT_INTERVAL_S: Final = 60.0


class RepeatFilter(logging.Filter):
    """Allows one message per pattern in each interval, and counts suppressed messages.

    Messages below WARNING always pass, because they are logged only once per event. The record's
    ``subject`` attribute distinguishes messages with the same pattern. Thread-safe.
    """

    def __init__(
        self,
        interval_s: float = REPEAT_INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._now = now
        self._seen: dict[tuple[str, int, str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to log the record, and appends the number of suppressed messages."""
        if record.levelno < logging.WARNING:
            return True
        pattern = (record.name, record.levelno, str(record.msg), getattr(record, "subject", ""))
        now = self._now()
        with self._lock:
            written, suppressed = self._seen.get(pattern, (None, 0))
            if written is not None and now - written < self._interval_s:
                self._seen[pattern] = (written, suppressed + 1)
                return False
            self._seen[pattern] = (now, 0)
        if suppressed:
            record.msg = f"{record.getMessage()} ({suppressed} similar messages suppressed)"
            record.args = ()
        return True
