"""Restricts sampling to containers, pods and units, and tracks them as they start and stop.

Where possible, the BPF program filters by cgroup v2, so that each process is sampled from its first
instruction on. Where cgroups cannot be used, the BPF program filters by process ids, which are
looked up once a second.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from otel_kprofiler.bpf import MAX_CGROUP_LEVEL, get_loader
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
from otel_kprofiler.sampling.loading import has_btf
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.target_maps import SLOTS, check_cgroups
from otel_kprofiler.text import describe_count

_INTERVAL_S: Final = 1.0
_SHARE: Final = 400
"""Minimum interval after a lookup, as a multiple of the lookup's duration."""
_SHORTEST_ID: Final = 4
_NO_CGROUP: Final = (1, 0)
"""A level and id that match no cgroup, so that nothing is sampled."""
_NO_PID: Final = 1 << 22 | 1  # above PID_MAX_LIMIT, include/linux/threads.h
_MOST: Final = SLOTS // 2 - 1  # during a change, the map holds old and new targets

_Found = TypeVar("_Found", int, tuple[int, int])

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups to sample. A process in any of the groups is sampled.

    Attributes:
        containers: container names, or prefixes of container ids with at least four digits.
        pods: pods, each given as UID, name or ``NAMESPACE/NAME``.
        units: system service manager units; ``.service`` may be omitted.
    """

    containers: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.containers or self.pods or self.units)


class GroupFollower:
    """Finds the cgroups or processes of the groups to sample. Not thread-safe.

    Args:
        groups: the groups to sample; at least one.
        loader: library that loads the BPF program: ``auto``, ``libbpf`` or ``bcc``.
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
        self._id_starts = tuple(name for name in groups.containers if len(name) >= _SHORTEST_ID)
        self._pods = frozenset(groups.pods)
        self._units = frozenset(unit if "." in unit else f"{unit}.service" for unit in groups.units)
        self._by_cgroup = _can_filter_cgroups(files, loader)
        self._monotonic = monotonic
        self._next_look = 0.0
        self._known = KnownContainers(files, monotonic)
        self._uids: frozenset[str] = frozenset()
        self._names: dict[int, CgroupNames] = {}
        self._has_btf = has_btf(files)
        self._found: list[Cgroup] = []
        self._cgroups: tuple[tuple[int, int], ...] = ()
        self._pids: tuple[int, ...] | None = (
            None  # pids in the groups, if processes are selected by pid
        )
        self._said_limit = False

    def look(self) -> bool:
        """Look up the groups if a lookup is due, and return whether the selection has changed."""
        started = self._monotonic()
        if started < self._next_look:
            return False
        previous = self._cgroups, self._pids
        self._look()
        ended = self._monotonic()
        self._next_look = ended + max(_INTERVAL_S, _SHARE * (ended - started))
        return previous != (self._cgroups, self._pids)

    def find(self) -> tuple[Sequence[Cgroup], Sequence[int]]:
        """Returns the groups' cgroups, or their processes if the kernel cannot filter by cgroup."""
        self._look()
        return self._found, self._pids or ()

    def apply(self, config: SamplerConfig) -> SamplerConfig:
        """Returns the configuration, restricted to the groups. ``target_pids`` still apply."""
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
        """Returns a description of the selected groups, for messages."""
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
        cgroups = list(self._find_cgroups(root))
        paths = tuple(cgroup.path[len(root.path) :] for cgroup in cgroups)
        outside = self._find_pids(paths) if self._has_version_1() else ()
        if outside or any(cgroup.level > MAX_CGROUP_LEVEL for cgroup in cgroups):
            self._pids = self._limit(self._find_pids(()))
            return
        self._pids, self._found = None, cgroups
        self._cgroups = self._limit(sorted((cgroup.level, cgroup.id) for cgroup in cgroups))

    def _find_root(self) -> Cgroup | None:
        """Returns the cgroup v2 root if the BPF program can filter by any cgroup below it."""
        try:
            root = find_cgroup_root(self._files) if self._by_cgroup else None
        except OSError:
            return None
        return root if root is not None and not root.level else None

    def _has_version_1(self) -> bool:
        """Returns whether a cgroup v1 hierarchy, which may contain containers, is mounted."""
        try:
            mounts = self._files.read_bytes("/proc/self/mountinfo")
        except OSError:
            return True
        return bool(parse_mount_points(mounts, "cgroup"))

    def _find_cgroups(self, root: Cgroup) -> Iterable[Cgroup]:
        """Yields the topmost selected cgroups; the BPF program also matches their descendants."""
        names, covered = {}, set()
        for cgroup in walk_cgroups(root):
            if os.path.dirname(cgroup.path) in covered:
                covered.add(cgroup.path)
                continue
            names[cgroup.id] = self._names.get(cgroup.id) or parse_cgroup_path(
                cgroup.path[len(root.path) :]
            )
            if self._are_wanted(names[cgroup.id]):
                covered.add(cgroup.path)
                yield cgroup
        self._names = names

    def _find_pids(self, outside_of: tuple[str, ...]) -> list[int]:
        """Returns the pids in the groups, except those in or below the cgroups ``outside_of``."""
        pids = []
        for entry in self._files.list_dir("/proc"):
            if not entry.isdecimal():
                continue
            try:
                text = self._files.read_bytes(f"/proc/{entry}/cgroup")
            except OSError:
                continue  # the process has exited
            if not self._are_wanted(parse_cgroup(text)):
                continue
            path = parse_unified_path(text) + "/"
            if not any(path.startswith(cgroup + "/") for cgroup in outside_of):
                pids.append(int(entry))
        return sorted(pids)

    def _are_wanted(self, names: CgroupNames) -> bool:
        if names.unit in self._units or names.pod in self._uids:
            return True
        if not self._containers or not names.container:
            return False
        if names.container.startswith(self._id_starts):
            return True
        return not self._containers.isdisjoint(self._known.find(names.container).all)

    def _limit(self, members: list[_Found]) -> tuple[_Found, ...]:
        if len(members) <= _MOST:
            return tuple(members)
        if not self._said_limit:
            _log.warning(
                "%d cgroups or processes match, but only the first %d are sampled; select fewer",
                len(members), _MOST,
            )  # fmt: skip
            self._said_limit = True
        return tuple(members[:_MOST])


def _can_filter_cgroups(files: HostFiles, loader: str) -> bool:
    try:
        check_cgroups(files, get_loader(loader).name)
    except (HostError, OSError, ValueError):
        return False
    return True
