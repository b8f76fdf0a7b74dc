"""Reads a process's capabilities (capabilities(7)), and suggests fixes for missing capabilities."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles

CAPABILITIES: Final = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYSLOG": 34,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
    "CAP_CHECKPOINT_RESTORE": 40,
}
"""Capability numbers (include/uapi/linux/capability.h)."""

_INITIAL_USER_NAMESPACE: Final = "user:[4026531837]"  # PROC_USER_INIT_INO, linux/proc_ns.h

USER_NAMESPACE_FIX: Final = (
    "run it in the host's user namespace: as root outside of rootless containers, unshare and "
    "Kubernetes' hostUsers: false"
)

SAMPLING: Final = ("CAP_BPF", "CAP_PERFMON")
"""Capabilities required by the sampler. Kernel symbols also require CAP_SYSLOG."""

CONTEXTS: Final = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
"""Capabilities for reading the memory of other users' processes (``/proc/PID/mem``)."""


class Capabilities(NamedTuple):
    """A process's capability sets, as bit masks (``CapEff``, ``CapBnd`` in /proc/PID/status)."""

    effective: int
    bounding: int

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the missing ``names``. CAP_SYS_ADMIN implies CAP_BPF and CAP_PERFMON."""
        covered = ("CAP_BPF", "CAP_PERFMON") if _has(self.effective, "CAP_SYS_ADMIN") else ()
        return tuple(
            name for name in names if name not in covered and not _has(self.effective, name)
        )


def parse_capabilities(status: bytes) -> Capabilities:
    """Parse the text of ``/proc/PID/status``. Raises ``ValueError`` if the sets are missing."""
    sets = dict(line.split(b":\t", 1) for line in status.splitlines() if line.startswith(b"Cap"))
    try:
        return Capabilities(int(sets[b"CapEff"], 16), int(sets[b"CapBnd"], 16))
    except KeyError as error:
        raise ValueError(f"/proc/PID/status has no {error}") from error


def read_capabilities(files: HostFiles, pid: int | str = "self") -> Capabilities:
    """Read the capability sets of a process. Raises ``OSError``."""
    return parse_capabilities(files.read_bytes(f"/proc/{pid}/status"))


def is_in_user_namespace(files: HostFiles) -> bool:
    """Returns whether this process is in a user namespace other than the initial one."""
    try:
        return files.read_link("/proc/self/ns/user") != _INITIAL_USER_NAMESPACE
    except OSError:
        return False  # a kernel without user namespaces, or a captured /proc


def get_capability_fix(missing: Iterable[str], capabilities: Capabilities) -> str:
    """Returns instructions for running this command with the sampling and ``missing`` capabilities.

    In virtual environments, Python's executable is usually a symbolic link to the system's Python,
    which must not be given file capabilities.
    """
    wanted = dict.fromkeys([*SAMPLING, "CAP_SYSLOG", *missing])
    names = [name.removeprefix("CAP_") for name in wanted]
    if any(not _has(capabilities.bounding, name) for name in missing):
        return (
            "add the capabilities to the container: "
            + " ".join(f"--cap-add {name}" for name in names)
            + f", or in Kubernetes securityContext.capabilities.add: [{', '.join(names)}]"
        )
    sets = ",".join(f"+{name.lower()}" for name in names)
    command = shlex.join([sys.executable, *sys.orig_argv[1:]])
    if sys.prefix != sys.base_prefix and not os.path.islink(sys.executable):
        sets = ",".join(name.lower() for name in wanted)
        return (
            "run it as root; or, to let everyone who may execute this python run it, "
            f"as root: setcap {sets}+ep {shlex.quote(sys.executable)}"
        )
    by_sudo = f": sudo {command}; " if shutil.which("sudo") else ", "
    return (
        f"run it as root{by_sudo}or start it for this user, as root: "
        f"setpriv --reuid={os.getuid()} --regid={os.getgid()} --clear-groups "
        f"--inh-caps={sets} --ambient-caps={sets} {command}"
    )


def _has(mask: int, name: str) -> bool:
    return bool(mask >> CAPABILITIES[name] & 1)
