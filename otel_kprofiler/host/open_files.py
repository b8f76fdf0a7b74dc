"""Explains errors caused by running out of file descriptors."""

import errno
from typing import Final

from otel_kprofiler.errors import HostError

TOO_MANY_FILES: Final = ": too many open files"
"""Suffix that distinguishes the message for ``EMFILE`` from the one for ``ENFILE``."""


def find_open_files_error(action: str, error: OSError) -> HostError | None:
    """Returns the error for ``EMFILE`` or ``ENFILE``; None for other errors.

    ``action`` is a noun phrase, such as "loading the BPF program".
    """
    if error.errno == errno.EMFILE:
        return HostError(
            f"{action}: too many open files",
            hint="raise this process's limit: ulimit -n, or LimitNOFILE= in a systemd unit",
        )
    if error.errno == errno.ENFILE:
        return HostError(
            f"{action}: the host has too many open files",
            hint="close some files, or raise the limit as root: sysctl fs.file-max",
        )
    return None
