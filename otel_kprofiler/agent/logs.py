"""The agent's log: text on a terminal, one JSON object per line otherwise."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import MemoryHandler
from typing import Final, TextIO

REPEAT_INTERVAL_S: Final = 60.0
"""Of messages with the same text pattern, one per interval is written, and the rest counted."""

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


class RepeatFilter(logging.Filter):
    """Lets the first message of a pattern through, then one per interval with a count.

    Messages below WARNING are not limited: they are written on purpose, once per event.
    Thread-safe.
    """

    def __init__(
        self,
        interval_s: float = REPEAT_INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._now = now
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record; adds how many like it were left out."""
        if record.levelno < logging.WARNING:
            return True
        pattern = (record.name, record.levelno, str(record.msg))
        now = self._now()
        with self._lock:
            written, left_out = self._seen.get(pattern, (None, 0))
            if written is not None and now - written < self._interval_s:
                self._seen[pattern] = (written, left_out + 1)
                return False
            self._seen[pattern] = (now, 0)
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more like this were left out)"
            record.args = ()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        moment = datetime.fromtimestamp(record.created, tz=UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def hold_logging() -> None:
    """Keep warnings and errors until :func:`configure_logging` says where they go."""
    # Without a target it flushes nothing, whatever its capacity.
    logging.basicConfig(handlers=[MemoryHandler(0)], force=True)


def configure_logging(
    level: str = "info", encoding: str = "auto", stream: TextIO | None = None
) -> None:
    """Send the log to ``stream`` (standard error); may be called again with other settings.

    Args:
        level: a key of :data:`LEVELS`.
        encoding: ``console``, ``json``, or ``auto``: text if ``stream`` is a terminal.
        stream: where to write.
    """
    out = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(out)
    as_json = encoding == "json" or (encoding == "auto" and not out.isatty())
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else text)
    handler.addFilter(RepeatFilter())
    for before in logging.root.handlers:
        if isinstance(before, MemoryHandler):
            before.setTarget(handler)
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
