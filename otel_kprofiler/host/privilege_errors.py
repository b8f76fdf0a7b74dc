"""Explains why the kernel refused to set up sampling, and suggests a fix."""

from typing import Final

from otel_kprofiler.errors import PrivilegeError
from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.capabilities import (
    SAMPLING,
    USER_NAMESPACE_FIX,
    get_capability_fix,
    is_in_user_namespace,
    read_capabilities,
)
from otel_kprofiler.host.kernel import find_sysctl, read_release

MEMORY_LOCK_FIX: Final = (
    "sudo prlimit --pid $$ --memlock=unlimited:unlimited, and start it from the same shell; "
    "in a systemd unit: LimitMEMLOCK=infinity"
)


def get_privilege_error(action: str, files: HostFiles) -> PrivilegeError:
    """Returns the error for an ``EPERM`` or ``EACCES`` during sampling setup.

    ``action`` is a noun phrase, such as "loading the BPF program".
    """
    if is_in_user_namespace(files):
        return PrivilegeError(
            f"the kernel does not permit {action}: this process is in a user namespace, and its "
            "capabilities apply only there",
            hint=USER_NAMESPACE_FIX,
        )
    capabilities = read_capabilities(files)
    missing = capabilities.missing(SAMPLING)
    paranoid = _paranoid_fix(files) if capabilities.missing(("CAP_SYS_ADMIN",)) else ""
    if not missing and paranoid:
        return PrivilegeError(
            f"the kernel does not permit {action}: kernel.perf_event_paranoid is above 2, "
            "where Debian and Ubuntu kernels require CAP_SYS_ADMIN",
            missing=("CAP_SYS_ADMIN",),
            hint=paranoid,
        )
    if not missing:
        hint = (
            "a security module, a seccomp profile or kernel lockdown forbids it: check `dmesg` and "
            "the container's security profile"
        )
        if counts_locked_memory(files):
            hint = f"raise the locked-memory limit: {MEMORY_LOCK_FIX}; or {hint}"
        return PrivilegeError(
            f"the kernel does not permit {action}, although no capability is missing", hint=hint
        )
    hint = "; then ".join(filter(None, [paranoid, get_capability_fix(missing, capabilities)]))
    return PrivilegeError(
        f"the kernel does not permit {action}: {' and '.join(missing)} missing",
        missing=missing,
        hint=hint,
    )


def counts_locked_memory(files: HostFiles) -> bool:
    """Returns whether BPF maps count as locked memory (before Linux 5.11, commit 97306be45fbe)."""
    try:
        return read_release(files)[:2] < (5, 11)
    except (OSError, ValueError):
        return False


def _paranoid_fix(files: HostFiles) -> str:
    """Returns a fix if perf_event_paranoid exceeds 2, where Debian requires CAP_SYS_ADMIN."""
    level = find_sysctl(files, "kernel.perf_event_paranoid") or 0
    return "run as root: sysctl -w kernel.perf_event_paranoid=2" if level > 2 else ""
