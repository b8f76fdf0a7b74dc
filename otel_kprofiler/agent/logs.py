"""The agent's log: text on a terminal; otherwise, one JSON object per line."""

import contextlib
import json
import logging
import os
import threading
import warnings
from collections import deque
from datetime import UTC, datetime
from logging.handlers import MemoryHandler
from typing import Any, Final

from otel_kprofiler.host import keep_only, write_all
from otel_kprofiler.repeats import RepeatFilter
from otel_kprofiler.text import escape_controls, escape_surrogates

MAX_WAITING_BYTES: Final = 256 * 1024
"""Log data waiting to be written, in bytes, above which further lines are dropped."""
FLUSH_TIMEOUT_S: Final = 1.0
"""Time limit for writing the log at exit."""

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON, with its sample counts or traceback if it has any.

    Unprintable characters are escaped. In names of files and processes, they could otherwise
    control a terminal, or pass for the end of the line (U+2028).
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as a line of JSON."""
        moment = datetime.fromtimestamp(record.created, tz=UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_surrogates(record.getMessage()),
        }
        if account := getattr(record, "account", None):
            fields["account"] = account
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(fields, ensure_ascii=False)
        if text.isprintable():
            return text
        return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


class _TextFormatter(logging.Formatter):
    """Formats a record as one line without control characters.

    Line breaks in tracebacks are preserved.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - name of logging
        return escape_controls(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - name of logging
        return "\n".join(map(escape_controls, super().formatException(ei).split("\n")))


class DescriptorHandler(logging.Handler):
    """Writes to a file descriptor from a separate thread, so that logging never blocks.

    While more than :data:`MAX_WAITING_BYTES` are buffered in memory, further lines are dropped and
    counted. A single line may be longer, such as the verifier's log. The handler bypasses Python's
    streams, because their locks could block the interpreter at exit. The handler never closes the
    descriptor.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record for writing."""
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001 - as other handlers do with a malformed message
            self.handleError(record)
            return
        with self._changed:
            if self._size > MAX_WAITING_BYTES:
                self._dropped += 1
                return
            if self._dropped:
                line = self._describe_gap() + line
            self._lines.append(line)
            self._size += len(line)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kprofiler-log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait up to :data:`FLUSH_TIMEOUT_S` until all messages have been written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, FLUSH_TIMEOUT_S)

    def _describe_gap(self) -> bytes:
        text = f"{self._dropped} log lines were dropped because no process read the log"
        self._dropped = 0
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)
        return self.format(record).encode() + b"\n"

    def _run(self) -> None:
        keep_only(())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            # There is nowhere else to report a failure to write the log.
            with contextlib.suppress(OSError):
                write_all(self.fd, line)
            with self._changed:
                self._size -= len(line)
                self._changed.notify_all()


def hold_logging() -> None:
    """Buffer warnings and errors until :func:`configure_logging` is called.

    Python's warnings become log records.
    """
    warnings.showwarning = _log_warning
    # Without a target, a MemoryHandler never flushes, whatever its capacity.
    logging.basicConfig(handlers=[MemoryHandler(0)], force=True)


def _log_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    logging.getLogger("py.warnings").warning("%s: %s", category.__name__, message)


def make_formatter(encoding: str, fd: int) -> logging.Formatter:
    """Returns a formatter for an encoding; ``auto`` means text if ``fd`` is a terminal."""
    if encoding == "json" or (encoding == "auto" and not os.isatty(fd)):
        return JsonFormatter()
    return _TextFormatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")


def configure_logging(level: str = "info", encoding: str = "auto", fd: int = 2) -> None:
    """Send the log to ``fd``; may be called again. ``level`` is a key in :data:`LEVELS`."""
    root = logging.root
    there = [
        existing
        for existing in root.handlers
        if isinstance(existing, DescriptorHandler) and existing.fd == fd
    ]
    handler = there[0] if there else DescriptorHandler(fd)
    handler.setFormatter(make_formatter(encoding, fd))
    handler.filters[:] = [RepeatFilter()]
    old_handlers, root.handlers[:] = root.handlers[:], [handler]
    root.setLevel(LEVELS[level])
    for old in old_handlers:
        if isinstance(old, MemoryHandler):
            old.setTarget(handler)
        if old is not handler:
            old.close()
