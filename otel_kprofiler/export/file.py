"""OTLP in files: JSON lines, length-prefixed protobuf, or one bare protobuf message.

JSON is one request per line (OpenTelemetry specification, "OpenTelemetry Protocol File
Exporter"). Protobuf is one request after the other, each behind its length as four bytes,
big-endian, as the Collector's file exporter writes them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import logging
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.base import ExportResult, ProfileExporter
from otel_kprofiler.model import AttributeForm, Batch, Form, LossCause

STDOUT: Final = "-"
LENGTH: Final = struct.Struct(">I")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rotation:
    """When a file is put away as ``NAME-TIME.SUFFIX``, and for how long that is kept.

    Attributes:
        max_bytes: a batch that would make the file larger goes to a new one; 0 means no limit.
        max_age_s: a file that was opened that long ago is put away; 0 means no limit.
        max_backups: how many are kept, the newest; 0 means all.
        max_backup_age_s: older ones are deleted; 0 means never.
    """

    max_bytes: int = 100 * 1024 * 1024
    max_age_s: float = 0
    max_backups: int = 100
    max_backup_age_s: float = 0


class FileExporter(ProfileExporter):
    """Appends batches to a file, complete or not at all, each visible at once to readers.

    One process may write a file at a time.

    Args:
        path: the file, made if missing; ``-`` is standard output.
        form: JSON lines, or protobuf messages behind their lengths.
        rotation: when to begin a new file; None for never. Ignored for what is no regular file.
        attributes: how resource and scope attributes are written; see :class:`AttributeForm`.
        name: component id.
        now: seconds since the Unix epoch.

    Raises:
        ExportError: the path cannot be written, or ends in the middle of a protobuf message.
    """

    max_bytes = None

    def __init__(
        self,
        path: str,
        *,
        form: Form = Form.JSON,
        rotation: Rotation | None = None,
        attributes: AttributeForm = AttributeForm.INLINE,
        name: str = "file",
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.form = form
        self.attributes = attributes
        self._path = path
        self._now = now
        self._broken = ""
        self._busy = threading.Lock()
        self._stopped = threading.Event()
        self._fd = sys.stdout.fileno() if path == STDOUT else _open(path)
        # Pipes and devices can neither be rotated nor shortened after half a write.
        self._regular = path != STDOUT and stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._rotation = rotation if self._regular else None
        self._opened = now()
        if self._regular:
            try:
                self._continue_file()
            except BaseException:
                os.close(self._fd)
                raise

    def export(self, batch: Batch) -> ExportResult:
        """Append one batch."""
        with self._busy:
            if self._stopped.is_set():
                return ExportResult.failure(batch, LossCause.SHUTDOWN, "already shut down")
            result = self._write(batch)
            if self._stopped.is_set():
                self._close()
            return result

    def _write(self, batch: Batch) -> ExportResult:
        if self.form is Form.JSON:
            # A newline can only be white space between JSON tokens.
            record = batch.payload.replace(b"\n", b" ") + b"\n"
        else:
            record = LENGTH.pack(len(batch.payload)) + batch.payload
        try:
            self._rotate_if_due(len(record))
            self._append(record)
        except OSError as error:
            message = f"cannot write {self._path}: {error.strerror}"
            if message != self._broken:
                _log.warning("%s: %s; dropping (said once)", self.name, message)
            self._broken = message
            return ExportResult.failure(
                batch, LossCause.WRITE_FAILED, message, errno.errorcode.get(error.errno or 0, "")
            )
        self._broken = ""
        return ExportResult.success(batch)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Close the file, or have an export close it that takes longer than the timeout."""
        self._stopped.set()
        # Never under an export: it would write to whatever gets the descriptor's number next.
        if self._busy.acquire(timeout=timeout_millis / 1000):
            self._close()
            self._busy.release()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0 and self._path != STDOUT:
            os.close(fd)

    def _append(self, record: bytes) -> None:
        size = os.fstat(self._fd).st_size if self._regular else 0
        try:
            _write_all(self._fd, record)
        except OSError:
            if self._regular:
                # Half a record would make all that follow unreadable.
                os.ftruncate(self._fd, size)
            raise

    def _continue_file(self) -> None:
        """Make sure that what is appended begins where a record may begin."""
        size = os.fstat(self._fd).st_size
        if self.form is Form.JSON:
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
            return
        at = 0
        while at < size:
            at += LENGTH.size + int.from_bytes(os.pread(self._fd, LENGTH.size, at))
        if at != size:
            raise ExportError(
                f"{self._path} does not end with a complete message",
                hint="it is cut off or of another kind: move it away or choose another path",
            )

    def _rotate_if_due(self, more: int) -> None:
        rotation = self._rotation
        size = os.fstat(self._fd).st_size if rotation else 0
        if rotation is None or not size:
            return
        too_large = rotation.max_bytes and size + more > rotation.max_bytes
        too_old = rotation.max_age_s and self._now() - self._opened >= rotation.max_age_s
        if not too_large and not too_old:
            return
        # It is gone already if a new file could not be opened the last time.
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, self._backup_path())
        fresh = os.open(self._path, _FLAGS, 0o666)
        os.close(self._fd)
        self._fd, self._opened = fresh, self._now()
        try:
            _delete_backups(self._path, rotation, self._now())
        except OSError as error:
            _log.warning("%s: cannot delete an old file: %s", self.name, error)

    def _backup_path(self) -> str:
        moment = self._now()
        stem, suffix = os.path.splitext(self._path)
        while True:
            backup = f"{stem}-{_time_text(moment)}{suffix}"
            if not os.path.lexists(backup):
                return backup
            moment += 0.001


class MessageFileExporter(ProfileExporter):
    """Writes one batch as a bare protobuf message: what ``.otlp`` files hold.

    The file appears complete or not at all: the message is written beside it and moved into
    its place. That the directory can be written is seen at construction.

    Args:
        path: the file, replaced if it exists; may be a device or a pipe.
        name: component id.

    Raises:
        ExportError: the path cannot be written.
    """

    form = Form.PROTOBUF
    max_bytes = None

    def __init__(self, path: str, *, name: str = "file") -> None:
        self.name = name
        self._target = os.path.realpath(path)
        regular = not os.path.exists(self._target) or os.path.isfile(self._target)
        self._part = f"{self._target}.{os.getpid()}.part" if regular else self._target
        self._fd = _open(self._part, of=path)
        if regular:
            os.ftruncate(self._fd, 0)  # what a crash of an earlier process with our id left

    def export(self, batch: Batch) -> ExportResult:
        """Write the message; there can be only one."""
        if self._fd < 0:
            message = f"{self._target} holds one message only, and that is written"
            return ExportResult.failure(batch, LossCause.WRITE_FAILED, message)
        try:
            _write_all(self._fd, batch.payload)
            if self._part != self._target:
                os.replace(self._part, self._target)
        except OSError as error:
            self.shutdown()
            message = f"cannot write {self._target}: {error.strerror}"
            return ExportResult.failure(batch, LossCause.WRITE_FAILED, message)
        os.close(self._fd)
        self._fd = -1
        return ExportResult.success(batch)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Remove the unfinished file, if any."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._part != self._target:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._part)


_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def _open(path: str, *, of: str = "") -> int:
    """Open for appending; ``of`` is the path to name in errors, if it is another."""
    try:
        return os.open(path, _FLAGS, 0o666)
    except OSError as error:
        named = of or path
        raise ExportError(
            f"cannot write {named}: {error.strerror}",
            hint=f"choose a file in an existing directory that this user can write, not {named}",
        ) from error


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _time_text(unix_s: float) -> str:
    moment = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    return moment.strftime("%Y-%m-%dT%H-%M-%S.") + f"{moment.microsecond // 1000:03d}"


def _delete_backups(path: str, rotation: Rotation, now: float) -> None:
    stem, suffix = os.path.splitext(os.path.basename(path))
    directory = os.path.dirname(path) or "."
    # Names of one length with a time in them: sorting them sorts by age.
    pattern_length = len(f"{stem}-{_time_text(now)}{suffix}")
    backups = sorted(
        entry
        for entry in os.listdir(directory)
        if entry.startswith(f"{stem}-") and entry.endswith(suffix) and len(entry) == pattern_length
    )
    doomed = backups[: -rotation.max_backups] if rotation.max_backups else []
    if rotation.max_backup_age_s:
        oldest = f"{stem}-{_time_text(now - rotation.max_backup_age_s)}{suffix}"
        doomed = [entry for entry in backups if entry in doomed or entry < oldest]
    for entry in doomed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, entry))
