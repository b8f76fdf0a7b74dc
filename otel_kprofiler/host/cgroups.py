"""Cgroups of version 2 (cgroups(7)): where they are mounted, their ids and depths."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles

_MOUNTS: Final = "/proc/self/mounts"


class Cgroup(NamedTuple):
    """A cgroup.

    Attributes:
        path: its directory.
        level: depth below the root, which has 0.
        id: what ``bpf_get_current_cgroup_id`` returns, the number of its inode.
    """

    path: str
    level: int
    id: int


def parse_cgroup_mount(mounts: bytes) -> str | None:
    """Where the hierarchy of version 2 is mounted; from ``/proc/self/mounts``, see fstab(5)."""
    for line in mounts.splitlines():
        fields = line.split(b" ")
        if len(fields) > 2 and fields[2] == b"cgroup2":
            return os.fsdecode(fields[1])
    return None


def find_cgroup(files: HostFiles, path: str) -> Cgroup | None:
    """A cgroup by the path of its directory, or below the root of the hierarchy.

    None if there is none, or no hierarchy of version 2.

    Raises:
        OSError: it cannot be read.
    """
    root = parse_cgroup_mount(files.read_bytes(_MOUNTS))
    if root is None:
        return None
    for candidate in (path, os.path.join(root, path.lstrip("/"))):
        directory = os.path.realpath(candidate)
        if os.path.isfile(os.path.join(directory, "cgroup.procs")) and (
            directory == root or directory.startswith(root + "/")
        ):
            level = len([part for part in directory[len(root) :].split("/") if part])
            return Cgroup(directory, level, os.stat(directory).st_ino)
    return None


def is_populated(cgroup: Cgroup) -> bool:
    """Whether a process is in a cgroup or below."""
    try:
        with open(os.path.join(cgroup.path, "cgroup.events"), "rb") as file:
            return b"populated 1" in file.read()
    except OSError:
        return False
