"""Limits the memory of child processes to keep the cgroup below its limit.

If a cgroup reaches its limit, the kernel kills processes in the cgroup. Above ``memory.high``, the
kernel throttles all processes in the cgroup (Documentation/admin-guide/cgroup-v2.rst).
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from otel_kprofiler.host.access import Access, HostFiles
from otel_kprofiler.host.cgroup_names import parse_cgroup_lines
from otel_kprofiler.host.cgroups import parse_mount_points

_UNLIMITED: Final = 1 << 60
"""Lowest value that means no limit. cgroup v1 uses LONG_MAX, rounded down to pages."""
_SHARE: Final = 2
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_MIB: Final = 1 << 20


class _Files(NamedTuple):
    """Names of the memory control files in a cgroup version."""

    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[bytes, ...]


_V1: Final = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    (b"total_inactive_file", b"total_active_file"),
)
_V2: Final = _Files(
    ("memory.max", "memory.high"), "memory.current", (b"inactive_file", b"active_file")
)


class MemoryLeft(NamedTuple):
    """The memory that a cgroup has left for its processes; page cache counts as free.

    Attributes:
        path: the control file that contains the limit.
    """

    count_bytes: int
    path: str
    limit_bytes: int


class MemoryGrant(NamedTuple):
    """Memory granted to a child process.

    Attributes:
        count_bytes: limit on heap and private writable mappings (``RLIMIT_DATA``).
        cgroup: the cgroup whose limit determined the grant; None if the full request was granted.
    """

    count_bytes: int
    cgroup: MemoryLeft | None

    def describe(self, fix: str) -> str:
        """Describes the limit and how to raise it; uses ``fix`` if no cgroup limits the child."""
        limit = f"the {self.count_bytes // _MIB} MiB limit"
        if self.cgroup is None:
            return f"{limit}; {fix}"
        return (
            f"{limit}, half of what {self.cgroup.path} ({self.cgroup.limit_bytes // _MIB} MiB) "
            "leaves; raise it: the unit's MemoryHigh and MemoryMax, or the container's limit"
        )


_running: dict[int, int] = {}
"""Bytes granted to each running child, by process id. Single operations on a dict are atomic."""


def grant_memory(most_bytes: int, files: HostFiles | None = None) -> MemoryGrant:
    """Grant a new child up to ``most_bytes``, but at most half of the memory left in the cgroup.

    Memory already granted to running children counts as used.
    """
    left = find_memory_left(files or Access())
    if left is None:
        return MemoryGrant(most_bytes, None)
    promised = sum(max(0, most - _data_bytes(pid)) for pid, most in list(_running.items()))
    granted = max(0, left.count_bytes - promised) // _SHARE
    return MemoryGrant(most_bytes, None) if granted >= most_bytes else MemoryGrant(granted, left)


@contextmanager
def limit_memory(pid: int, grant: MemoryGrant, *, is_final: bool = True) -> Iterator[None]:
    """Limit a child's memory to ``grant``, and make the child the OOM killer's first choice.

    The child must run as the same user as this process. The grant counts as used until the context
    exits. Unless the limit ``is_final``, a later grant for the same child may be larger.
    """
    with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write("1000")
    with suppress(OSError):  # the child has exited
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        most = grant.count_bytes if hard == resource.RLIM_INFINITY else min(grant.count_bytes, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (most, most if is_final else hard))
    _running[pid] = grant.count_bytes
    try:
        yield
    finally:
        _running.pop(pid, None)


def find_memory_left(files: HostFiles) -> MemoryLeft | None:
    """Returns the minimum memory left across our cgroup and its ancestors; None if unlimited."""
    try:
        lines = parse_cgroup_lines(files.read_bytes("/proc/self/cgroup"))
        mounts = files.read_bytes("/proc/self/mountinfo")
    except OSError:
        return None
    left: list[MemoryLeft] = []
    for line in lines:
        if not line.controllers:
            left += _read_upwards(files, mounts, "cgroup2", line.path, _V2)
        elif "memory" in line.controllers:
            left += _read_upwards(files, mounts, "cgroup", line.path, _V1)
    return min(left, key=lambda left: left.count_bytes, default=None)


def _read_upwards(
    files: HostFiles, mounts: bytes, kind: str, path: str, names: _Files
) -> Iterator[MemoryLeft]:
    for mount in parse_mount_points(mounts, kind):
        root = mount.root.rstrip("/")
        if path != root and not path.startswith(root + "/"):
            continue
        below = path[len(root) :].rstrip("/")
        while True:
            if left := _read_left(files, mount.path + below, names):
                yield left
            if not below:
                break
            below = below.rpartition("/")[0]


def _read_left(files: HostFiles, directory: str, names: _Files) -> MemoryLeft | None:
    limits = []
    for name in names.limits:
        path = f"{directory}/{name}"
        with suppress(OSError, ValueError):  # the root cgroup has no limit; "max" is not a number
            limit = int(files.read_bytes(path))
            if limit < _UNLIMITED:
                limits.append((limit, path))
    if not limits:
        return None
    limit, path = min(limits)
    try:
        used = int(files.read_bytes(f"{directory}/{names.usage}"))
        rows = files.read_bytes(f"{directory}/memory.stat").splitlines()
        stat = dict(row.split(b" ", 1) for row in rows)
        cached = sum(int(stat.get(name, 0)) for name in names.page_cache)
    except (OSError, ValueError):
        return None
    return MemoryLeft(max(0, limit - max(0, used - cached)), path, limit)


def _data_bytes(pid: int) -> int:
    """Returns a process's resident anonymous memory in bytes; 0 if the process has exited."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * _PAGE_BYTES
