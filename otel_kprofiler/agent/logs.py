"""The agent's log: text on a terminal, one JSON object per line otherwise."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import MemoryHandler
from typing import Final

from otel_kprofiler.host import keep_only

REPEAT_INTERVAL_S: Final = 60.0
"""Of messages with the same text pattern, one per interval is written, and the rest counted."""

MAX_WAITING_BYTES: Final = 256 * 1024
"""So much of the log may wait to be written."""
FLUSH_TIMEOUT_S: Final = 1.0
"""So long the end of the process waits for the log to be written."""

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


class RepeatFilter(logging.Filter):
    """Lets the first message of a pattern through, then one per interval with a count.

    Messages below WARNING are not limited: they are written on purpose, once per event. A
    record's attribute ``subject`` tells messages apart that have one pattern.
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
        self._seen: dict[tuple[str, int, str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record; adds how many like it were left out."""
        if record.levelno < logging.WARNING:
            return True
        pattern = (record.name, record.levelno, str(record.msg), getattr(record, "subject", ""))
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


class DescriptorHandler(logging.Handler):
    """Writes to a file descriptor from a thread of its own: whoever logs waits for no reader.

    What nobody reads waits in memory, up to :data:`MAX_WAITING_BYTES`; then new lines are left
    out and counted. Not a stream of Python's: at the end of the process the interpreter would
    wait for the lock of one that is being written to.

    Args:
        fd: where to write; stays open.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._left_out = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Have the record written soon."""
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001 - logging's own way with a message that does not fit
            self.handleError(record)
            return
        with self._changed:
            if self._size + len(line) > MAX_WAITING_BYTES:
                self._left_out += 1
                return
            if self._left_out:
                line = self._describe_gap() + line
            self._lines.append(line)
            self._size += len(line)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kprofiler-log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait until all is written, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, FLUSH_TIMEOUT_S)

    def _describe_gap(self) -> bytes:
        text = f"{self._left_out} lines of the log were left out: nobody has read them"
        self._left_out = 0
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)
        return self.format(record).encode() + b"\n"

    def _run(self) -> None:
        keep_only(())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            # There is no other place to say that the log cannot be written.
            with contextlib.suppress(OSError):
                write_all(self.fd, line)
            with self._changed:
                self._size -= len(line)
                self._changed.notify_all()


def write_all(fd: int, data: bytes) -> None:
    """Write to a descriptor, however long that takes. Raises ``OSError``."""
    while data:
        data = data[os.write(fd, data) :]


def hold_logging() -> None:
    """Keep warnings and errors until :func:`configure_logging` says where they go.

    Libraries write no lines of their own: Python's warnings become log records, and gRPC, which
    must not be imported before, is silent unless ``GRPC_VERBOSITY`` is set; what it would say
    comes with the status of a call.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    warnings.showwarning = _log_warning
    # Without a target it flushes nothing, whatever its capacity.
    logging.basicConfig(handlers=[MemoryHandler(0)], force=True)


def _log_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    logging.getLogger("py.warnings").warning("%s: %s", category.__name__, message)


def configure_logging(level: str = "info", encoding: str = "auto", fd: int = 2) -> None:
    """Send the log to a file descriptor; may be called again with other settings.

    Args:
        level: a key of :data:`LEVELS`.
        encoding: ``console``, ``json``, or ``auto``: text if ``fd`` is a terminal.
        fd: where to write; by default standard error.
    """
    root = logging.root
    there = [one for one in root.handlers if isinstance(one, DescriptorHandler) and one.fd == fd]
    handler = there[0] if there else DescriptorHandler(fd)
    as_json = encoding == "json" or (encoding == "auto" and not os.isatty(fd))
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else text)
    handler.filters[:] = [RepeatFilter()]
    before, root.handlers[:] = root.handlers[:], [handler]
    root.setLevel(LEVELS[level])
    for one in before:
        if isinstance(one, MemoryHandler):
            one.setTarget(handler)
        if one is not handler:
            one.close()
