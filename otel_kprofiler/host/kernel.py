"""Reads the running kernel's release, settings, lockdown mode and symbol visibility."""

import enum
import os
import re
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.capabilities import is_in_user_namespace, read_capabilities

OLDEST_KERNEL: Final = (5, 10)
"""First kernel release with all features that the sampler needs (BPF ring buffer, CAP_BPF)."""

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_SCAN_BYTES: Final = 64 * 1024  # about 1,500 lines of kallsyms


class KernelRelease(NamedTuple):
    """The version of a kernel; compares like a tuple."""

    major: int
    minor: int
    patch: int
    text: str


class SymbolsVisibility(enum.Enum):
    """Visibility of the addresses in ``/proc/kallsyms``, or the reason why they are hidden."""

    VISIBLE = "visible"
    NO_FILE = "there is no readable /proc/kallsyms"
    KPTR_RESTRICT = "kernel.kptr_restrict is 2, which hides them from everybody"
    NO_CAPABILITY = "CAP_SYSLOG is missing"
    NAMESPACE = "CAP_SYSLOG is not held in the initial user namespace"


def parse_release(text: str) -> KernelRelease:
    """Parses the text of ``uname -r``, such as ``6.1.0-13-amd64``. Raises ``ValueError``."""
    match = _RELEASE.match(text)
    if match is None:
        raise ValueError(f"not a kernel release: {text!r}")
    return KernelRelease(int(match[1]), int(match[2]), int(match[3] or 0), text.strip())


def read_release(files: HostFiles) -> KernelRelease:
    """Read the version of the running kernel.

    Raises ``OSError`` if the version is unreadable, and ``ValueError`` if it is malformed.
    """
    return parse_release(files.read_bytes("/proc/sys/kernel/osrelease").decode())


def find_sysctl(files: HostFiles, name: str) -> int | None:
    """Read a numeric setting such as ``kernel.kptr_restrict``; None if the kernel lacks it."""
    try:
        return int(files.read_bytes("/proc/sys/" + name.replace(".", "/")))
    except (OSError, ValueError):
        return None


def find_lockdown(files: HostFiles) -> str | None:
    """Read the lockdown mode, such as ``integrity`` (kernel_lockdown(7)); None if unknown."""
    try:
        text = files.read_bytes("/sys/kernel/security/lockdown").decode()
    except OSError:
        return None
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else None


def read_symbols_visibility(files: HostFiles) -> SymbolsVisibility:
    """Check whether addresses are visible, and find the cause if they are hidden.

    The rules are those of ``kallsyms_show_value`` (kernel/ksyms_common.c). If ``kptr_restrict`` is
    2, no process can read addresses. If it is 1, only holders of CAP_SYSLOG in the initial user
    namespace can. If ``kptr_restrict`` is 0 and ``perf_event_paranoid`` is below 2, all processes
    can read addresses; otherwise, only holders of CAP_SYSLOG can.
    """
    try:
        with os.fdopen(files.open_fd("/proc/kallsyms"), "rb") as file:
            text = file.read(_SCAN_BYTES)
        if not text:
            raise FileNotFoundError("/proc/kallsyms is empty")
        if any(line.split(b" ", 1)[0].strip(b"0") for line in text.splitlines()):
            return SymbolsVisibility.VISIBLE
    except OSError:
        return SymbolsVisibility.NO_FILE
    if (find_sysctl(files, "kernel.kptr_restrict") or 0) >= 2:
        return SymbolsVisibility.KPTR_RESTRICT
    if is_in_user_namespace(files):
        return SymbolsVisibility.NAMESPACE
    if read_capabilities(files).missing(["CAP_SYSLOG"]):
        return SymbolsVisibility.NO_CAPABILITY
    return SymbolsVisibility.NAMESPACE
