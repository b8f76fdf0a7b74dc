"""Logs the errors of a spool's file system, once each, and explains why a spool is unusable."""

import errno
import logging
from collections.abc import Callable
from typing import Final

from otel_kprofiler.errors import ExportError, describe_error

_DAMAGED: Final = frozenset({errno.ENOENT, errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors for lost or damaged files. Others, such as EMFILE, may pass."""

_log = logging.getLogger(__name__)


class StorageLog:
    """The last errors of a spool.

    Args:
        name: returns the name of the spool's exporter.

    Attributes:
        write_error: the error of the last write; empty if it succeeded.
        read_error: the error of the last read, if it may pass; else empty.
    """

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name
        self.write_error = self.read_error = ""

    def note_writing(self, error: OSError | None, consequence: str = "") -> None:
        """Log the error of a write and its consequence; None means success."""
        text = (error.strerror or str(error)) if error else ""
        last, self.write_error = self.write_error, text
        if text and text != last:
            _log.warning(
                "%s: cannot write to the spool: %s; %s (logged once)",
                self._name(), text, consequence,
            )  # fmt: skip
        elif last and not text:
            _log.info("%s: the spool is writable again", self._name())

    def may_read_later(self, error: OSError | ValueError) -> bool:
        """Log the error of a read. Returns False if the batch is lost or damaged."""
        text = describe_error(error)
        if not isinstance(error, OSError) or error.errno in _DAMAGED:
            _log.warning("%s: %s", self._name(), text)
            return False
        if text != self.read_error:
            _log.warning("%s: %s; trying again (logged once)", self._name(), text)
        self.read_error = text
        return True

    def note_read(self) -> None:
        """Record that a read succeeded, so that its next error is logged."""
        if self.read_error:
            _log.info("%s: the spool is readable again", self._name())
        self.read_error = ""


def explain_refusal(directory: str, error: OSError) -> ExportError:
    """Returns the error to raise if a spool cannot be opened, with the fix."""
    if error.errno == errno.EBUSY:
        return ExportError(
            f"the spool {directory} is in use",
            hint="give each agent its own storage; if a reload changed storage or its limits,"
            " restart the agent",
        )
    if error.errno == errno.EPERM:
        return ExportError(
            f"the spool {directory} is not safe: {error.strerror}",
            hint="make this user its only owner (chown, chmod 700), or choose another directory for"
            " sending_queue.storage",
        )
    if error.errno == errno.EOVERFLOW:
        return ExportError(
            f"the spool {directory} cannot be used: {error.strerror}",
            hint="move that file out of the directory, and start again",
        )
    return ExportError(
        f"the spool {directory} cannot be used: {error.strerror}",
        hint="use a directory that this user can write to, on a disk with free space, or remove"
        " sending_queue.storage",
    )
