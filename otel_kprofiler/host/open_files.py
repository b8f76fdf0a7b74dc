"""Raises the limit on open files, and explains errors caused by running out of descriptors."""

import errno
import resource
from typing import Final

from otel_kprofiler.errors import HostError, ShortageError

TOO_MANY_FILES: Final = ": too many open files"
"""Suffix that distinguishes the message for ``EMFILE`` from the one for ``ENFILE``."""

_WANTED: Final = 65_536
"""Enough for eight descriptors for each CPU on the largest host (NR_CPUS is at most 8192)."""


def raise_open_files_limit() -> None:
    """Raise this process's soft limit on open files to the hard limit, but at most to 65,536.

    The usual soft limit of 1024 exists for programs that use select(2), and is too low for the
    events of some hundred CPUs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        return ShortageError(
            f"{action}: the host has too many open files",
            hint="close some files, or raise the limit as root: sysctl fs.file-max",
        )
    return None
