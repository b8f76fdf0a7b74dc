"""Determines why the kernel hides its symbols from this process."""

import enum
from contextlib import suppress

from otel_kprofiler.host import HostFiles

_KPTR_RESTRICT = "/proc/sys/kernel/kptr_restrict"


class HiddenCause(enum.Enum):
    """The reason why kernel symbols are hidden. The value is shown to users."""

    KPTR_RESTRICT = "kernel.kptr_restrict is 2, which hides kernel addresses from everybody"
    NO_CAP_SYSLOG = "the process lacks CAP_SYSLOG, so the kernel hides addresses from it"
    NO_FILE = "there is no /proc/kallsyms (kernel without CONFIG_KALLSYMS, or /proc not mounted)"
    UNREADABLE = "/proc/kallsyms cannot be read"

    @property
    def fix(self) -> str:
        """Returns instructions for making the symbols visible."""
        return {
            HiddenCause.KPTR_RESTRICT: "sysctl kernel.kptr_restrict=1",
            HiddenCause.NO_CAP_SYSLOG: "give the process CAP_SYSLOG",
            HiddenCause.NO_FILE: "mount /proc, or use a kernel with CONFIG_KALLSYMS=y",
            HiddenCause.UNREADABLE: "allow the process to read /proc/kallsyms",
        }[self]


def find_hidden_cause(files: HostFiles) -> HiddenCause:
    """Determines why ``/proc/kallsyms`` shows zero addresses.

    If ``kptr_restrict`` is 0, the kernel shows addresses to processes with CAP_SYSLOG, and to all
    processes if ``perf_event_paranoid`` is 1 or less. If ``kptr_restrict`` is 1, addresses are
    visible only to processes with CAP_SYSLOG; if 2, to no process (kernel/ksyms_common.c).
    """
    # If /proc/sys is missing, as in some containers, CAP_SYSLOG is assumed to be missing.
    with suppress(OSError, ValueError):
        if int(files.read_bytes(_KPTR_RESTRICT)) >= 2:
            return HiddenCause.KPTR_RESTRICT
    return HiddenCause.NO_CAP_SYSLOG
