"""Finds cgroups in the cgroup v2 hierarchy (cgroups(7)), and their mounts, ids and depths."""

import os
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.cgroup_names import parse_unified_path
from otel_kprofiler.host.process_stat import read_stat

_MOUNTS: Final = "/proc/self/mountinfo"
_INITIAL: Final = "cgroup:[4026531835]"  # PROC_CGROUP_INIT_INO, include/linux/proc_ns.h
_KTHREADD: Final = 2  # kthreadd, which is always in the root cgroup
_MOST: Final = 20_000
_NONE_BELOW: Final = 2  # link count of a directory without subdirectories: kernfs_set_inode_attr()
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


class Cgroup(NamedTuple):
    """A cgroup's directory.

    Attributes:
        level: depth in the hierarchy; 0 for the root.
        id: inode number, as returned by ``bpf_get_current_cgroup_id``.
    """

    path: str
    level: int
    id: int


class MountPoint(NamedTuple):
    """A mount of a cgroup hierarchy, or of part of one.

    Attributes:
        root: path of the mounted cgroup in this process's cgroup namespace. ``/..`` denotes the
            parent of the namespace's root.
    """

    path: str
    root: str


def parse_mount_points(mountinfo: bytes, kind: str) -> list[MountPoint]:
    """Parses mounts of one file system type in ``/proc/PID/mountinfo`` (proc_pid_mountinfo(5))."""
    mounts = []
    for line in mountinfo.decode("utf-8", "surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        parts = fields.split(" ")
        if len(parts) >= 5 and rest.partition(" ")[0] == kind:
            mounts.append(MountPoint(_unescape(parts[4]), _unescape(parts[3])))
    return mounts


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def is_in_cgroup_namespace(files: HostFiles) -> bool:
    """Returns whether this process is in a non-initial cgroup namespace, as in most containers."""
    try:
        return files.read_link("/proc/self/ns/cgroup") != _INITIAL
    except OSError:
        return False  # a kernel without cgroup namespaces


def find_cgroup_root(files: HostFiles) -> Cgroup | None:
    """Find the mounted cgroup nearest to the root of the cgroup v2 hierarchy.

    Returns None if no cgroup v2 hierarchy is mounted, or if a cgroup namespace hides the depth of
    the mounted cgroup. Raises ``OSError`` if the mounts cannot be read.
    """
    own_level = _find_own_level(files)
    if own_level is None:
        return None
    cgroups = []
    for path, root in parse_mount_points(files.read_bytes(_MOUNTS), "cgroup2"):
        parts = [part for part in root.split("/") if part]
        level = own_level + sum(-1 if part == ".." else 1 for part in parts)
        try:
            cgroups.append(Cgroup(path, level, os.stat(path).st_ino))
        except OSError:
            continue  # hidden by another mount
    return min(cgroups, key=lambda cgroup: cgroup.level, default=None)


def _find_own_level(files: HostFiles) -> int | None:
    """Returns the depth of the cgroup namespace's root; None if unknown."""
    if not is_in_cgroup_namespace(files):
        return 0
    first = read_stat(files, _KTHREADD)
    if first is None or not first.is_kernel_thread:
        return None  # a pid namespace hides kthreadd
    try:
        path = parse_unified_path(files.read_bytes(f"/proc/{_KTHREADD}/cgroup"))
    except OSError:
        return None
    return path.count("..")


def find_cgroup(files: HostFiles, path: str) -> Cgroup | None:
    """Find a cgroup by its directory, or by its path below the hierarchy's root.

    Returns None if there is no cgroup v2 hierarchy or no such cgroup. Raises ``OSError``.
    """
    root = find_cgroup_root(files)
    if root is None:
        return None
    for candidate in (path, os.path.join(root.path, path.lstrip("/"))):
        directory = os.path.realpath(candidate)
        if os.path.isfile(os.path.join(directory, "cgroup.procs")) and (
            directory == root.path or directory.startswith(root.path + "/")
        ):
            below = [part for part in directory[len(root.path) :].split("/") if part]
            return Cgroup(directory, root.level + len(below), os.stat(directory).st_ino)
    return None


def walk_cgroups(root: Cgroup) -> Iterator[Cgroup]:
    """Yields all descendants of a cgroup, parents first; at most 20,000."""
    rest, left = [root], _MOST
    while rest and left:
        above = rest.pop()
        try:
            if os.stat(above.path).st_nlink == _NONE_BELOW:
                continue
            with os.scandir(above.path) as entries:
                below = [
                    Cgroup(entry.path, above.level + 1, entry.inode())
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                ]
        except OSError:
            continue  # the cgroup has been removed
        left -= min(left, len(below))
        yield from below
        rest += below


def is_populated(cgroup: Cgroup) -> bool:
    """Returns whether a cgroup or one of its descendants contains a process."""
    try:
        with open(os.path.join(cgroup.path, "cgroup.events"), "rb") as file:
            return b"populated 1" in file.read()
    except OSError:
        return False
