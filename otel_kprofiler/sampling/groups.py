"""Follows containers, pods and units as they come and go, so that only these are sampled.

Where possible, the kernel filters by cgroup of version 2, so that each process counts from its
first instruction on. Otherwise it filters by process; these are looked up once a second.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from otel_kprofiler.bpf import MAX_CGROUP_LEVEL, VMLINUX_BTF, get_loader
from otel_kprofiler.errors import HostError
from otel_kprofiler.host import (
    Cgroup,
    CgroupNames,
    HostFiles,
    KnownContainers,
    find_cgroup_root,
    parse_cgroup,
    parse_cgroup_path,
    parse_mount_points,
    parse_unified_path,
    read_pods,
    walk_cgroups,
)
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.target_maps import SLOTS, check_cgroups
from otel_kprofiler.text import describe_count

_INTERVAL_S: Final = 1.0
_SHARE: Final = 400
"""Looking takes at most a quarter of a per cent of a core."""
_SHORTEST_ID: Final = 4
_NO_CGROUP: Final = (1, 0)
"""A level and an id that no cgroup has: nothing is sampled."""
_NO_PID: Final = 1 << 22 | 1  # above PID_MAX_LIMIT, include/linux/threads.h
_MOST: Final = SLOTS // 2 - 1  # old and new ones must fit

_Found = TypeVar("_Found", int, tuple[int, int])

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups to sample; a process must be in any of them.

    Attributes:
        containers: names, or at least four first digits of ids.
        pods: UIDs, names, or ``NAMESPACE/NAME``.
        units: of the system's systemd; ``.service`` may be left out.
    """

    containers: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.containers or self.pods or self.units)


class GroupFollower:
    """Finds the cgroups or processes of groups. Not thread-safe.

    Args:
        files: the host's files.
        groups: what to sample; at least one.
        loader: library that loads the program, ``auto``, ``libbpf`` or ``bcc``.
        monotonic: the clock, in seconds.
    """

    def __init__(
        self,
        files: HostFiles,
        groups: Groups,
        *,
        loader: str = "auto",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._containers = frozenset(groups.containers)
        self._id_starts = tuple(one for one in groups.containers if len(one) >= _SHORTEST_ID)
        self._pods = frozenset(groups.pods)
        self._units = frozenset(unit if "." in unit else f"{unit}.service" for unit in groups.units)
        self._by_cgroup = _can_filter_cgroups(files, loader)
        self._monotonic = monotonic
        self._next_look = 0.0
        self._known = KnownContainers(files, monotonic)
        self._uids: frozenset[str] = frozenset()
        self._names: dict[int, CgroupNames] = {}
        self._has_btf = _has_btf(files)
        self._found: list[Cgroup] = []
        self._cgroups: tuple[tuple[int, int], ...] = ()
        self._pids: tuple[int, ...] | None = None  # of processes that no cgroup filter finds
        self._said_limit = False

    def look(self) -> bool:
        """Look for the groups if it is time; returns whether the selection has changed."""
        started = self._monotonic()
        if started < self._next_look:
            return False
        before = self._cgroups, self._pids
        self._look()
        ended = self._monotonic()
        self._next_look = ended + max(_INTERVAL_S, _SHARE * (ended - started))
        return before != (self._cgroups, self._pids)

    def find(self) -> tuple[Sequence[Cgroup], Sequence[int]]:
        """The cgroups of the groups now; or their processes, where the kernel cannot filter so."""
        self._look()
        return self._found, self._pids or ()

    def apply(self, config: SamplerConfig) -> SamplerConfig:
        """The configuration of a sampler for what was found; ``target_pids`` in it hold, too."""
        if self._pids is None:
            return replace(config, target_cgroups=self._cgroups or (_NO_CGROUP,))
        wanted = config.target_pids
        pids = tuple(pid for pid in self._pids if pid in wanted) if wanted else self._pids
        return replace(
            config,
            target_pids=pids or (_NO_PID,),
            target_descendants=self._has_btf and not wanted,
        )

    def describe(self) -> str:
        """Describes what is sampled, for people."""
        if self._pids is not None:
            return f"{describe_count(len(self._pids), 'process', 'processes')} by their ids"
        return describe_count(len(self._cgroups), "cgroup")

    def _look(self) -> None:
        pods = read_pods(self._files) if self._pods else {}
        self._uids = self._pods | {
            uid
            for uid, pod in pods.items()
            if pod.name in self._pods or f"{pod.namespace}/{pod.name}" in self._pods
        }
        root = self._find_root()
        self._found = []
        if root is None:
            self._pids = self._limit(self._find_pids(()))
            return
        found = list(self._find_cgroups(root))
        paths = tuple(one.path[len(root.path) :] for one in found)
        outside = self._find_pids(paths) if self._has_version_1() else ()
        if outside or any(one.level > MAX_CGROUP_LEVEL for one in found):
            self._pids = self._limit(self._find_pids(()))
            return
        self._pids, self._found = None, found
        self._cgroups = self._limit(sorted((one.level, one.id) for one in found))

    def _find_root(self) -> Cgroup | None:
        """The root of the hierarchy, if the kernel can filter by all that is in it."""
        try:
            root = find_cgroup_root(self._files) if self._by_cgroup else None
        except OSError:
            return None
        return root if root is not None and not root.level else None

    def _has_version_1(self) -> bool:
        """Returns whether processes can be in containers that version 2 does not know."""
        try:
            mounts = self._files.read_bytes("/proc/self/mountinfo")
        except OSError:
            return True
        return bool(parse_mount_points(mounts, "cgroup"))

    def _find_cgroups(self, root: Cgroup) -> Iterable[Cgroup]:
        """The uppermost cgroups of the groups: the kernel also finds those below them."""
        names, covered = {}, set()
        for one in walk_cgroups(root):
            if os.path.dirname(one.path) in covered:
                covered.add(one.path)
                continue
            names[one.id] = self._names.get(one.id) or parse_cgroup_path(one.path[len(root.path) :])
            if self._are_wanted(names[one.id]):
                covered.add(one.path)
                yield one
        self._names = names

    def _find_pids(self, outside_of: tuple[str, ...]) -> list[int]:
        """Processes of the groups, unless they are in or below these cgroups of version 2."""
        found = []
        for entry in self._files.list_dir("/proc"):
            if not entry.isdecimal():
                continue
            try:
                text = self._files.read_bytes(f"/proc/{entry}/cgroup")
            except OSError:
                continue  # it has ended
            if not self._are_wanted(parse_cgroup(text)):
                continue
            path = parse_unified_path(text) + "/"
            if not any(path.startswith(one + "/") for one in outside_of):
                found.append(int(entry))
        return sorted(found)

    def _are_wanted(self, names: CgroupNames) -> bool:
        if names.unit in self._units or names.pod in self._uids:
            return True
        if not self._containers or not names.container:
            return False
        if names.container.startswith(self._id_starts):
            return True
        return not self._containers.isdisjoint(self._known.find(names.container).all)

    def _limit(self, found: list[_Found]) -> tuple[_Found, ...]:
        if len(found) <= _MOST:
            return tuple(found)
        if not self._said_limit:
            _log.warning(
                "%d cgroups or processes are to be sampled, only the first %d are; name fewer",
                len(found), _MOST,
            )  # fmt: skip
            self._said_limit = True
        return tuple(found[:_MOST])


def _can_filter_cgroups(files: HostFiles, loader: str) -> bool:
    try:
        check_cgroups(files, get_loader(loader).name)
    except (HostError, OSError, ValueError):
        return False
    return True


def _has_btf(files: HostFiles) -> bool:
    try:
        os.close(files.open_fd(VMLINUX_BTF))
    except OSError:
        return False
    return True
