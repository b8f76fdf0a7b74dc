"""Logs the errors of a spool's file system, once each."""

import errno
import logging
from collections.abc import Callable
from typing import Final

from otel_kprofiler.errors import describe_error

_DAMAGED: Final = frozenset({errno.ENOENT, errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors for lost or damaged files. Others, such as EMFILE, may pass."""

_log = logging.getLogger(__name__)


class StorageLog:
    """The last errors of a spool.

    Args:
        name: returns the name of the spool's exporter.

    Attributes:
        write_error: the error of the last write; empty if it succeeded.
    """

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name
        self.write_error = self._read_error = ""

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
        last, self._read_error = self._read_error, describe_error(error)
        if not isinstance(error, OSError) or error.errno in _DAMAGED:
            _log.warning("%s: %s", self._name(), self._read_error)
            return False
        if self._read_error != last:
            _log.warning("%s: %s; trying again (logged once)", self._name(), self._read_error)
        return True
