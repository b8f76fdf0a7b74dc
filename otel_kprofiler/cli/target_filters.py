"""Finds the processes to sample, by pid, name, cgroup, container, pod and unit."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from otel_kprofiler.bpf import MAX_CGROUP_LEVEL
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import (
    Access,
    Cgroup,
    Container,
    find_cgroup,
    find_containers,
    is_populated,
    read_process,
)
from otel_kprofiler.sampling import (
    INITIAL_NAMESPACE,
    EbpfSampler,
    GroupFollower,
    Groups,
    ProcessFollower,
    SamplerConfig,
    has_btf,
)

_GROUP_HINTS: Final = {
    True: "list pods with crictl pods; names need the host's /var/log/pods, UIDs do not",
    False: "list units with systemctl list-units; user units are in user@UID.service",
}
"""Hints for errors about a missing pod (True) or unit (False)."""


@dataclass(slots=True)
class Targets:
    """The processes to sample, which are tracked until all of them have exited.

    Attributes:
        follower: tracks the processes selected by ``--pid``, and the processes in containers, pods
            and units without a v2 cgroup; None if there are no such processes.
        cgroups: cgroups selected by ``--cgroup``, ``--container``, ``--pod`` and ``--unit``.
    """

    follower: ProcessFollower | None
    comms: Sequence[str]
    cgroups: Sequence[Cgroup]

    def apply(self, config: SamplerConfig, access: Access) -> SamplerConfig:
        """Returns a sampler configuration that samples only the targets."""
        return replace(
            config,
            target_pids=self.follower.pids if self.follower else (),
            target_descendants=self.follower is not None and has_btf(access),
            target_comms=tuple(map(os.fsencode, self.comms)),
            target_cgroups=tuple((cgroup.level, cgroup.id) for cgroup in self.cgroups),
        )

    def have_ended(self, sampler: EbpfSampler) -> bool:
        """Update the set of sampled processes, and return whether all of them have exited."""
        if self.follower:
            if self.follower.look() and self.follower.pids:
                sampler.retarget(self.follower.pids)
            if not self.follower.pids:
                return True
        return bool(self.cgroups) and not any(map(is_populated, self.cgroups))


def find_namespace(access: Access) -> tuple[int, int] | None:
    """Returns the device and inode of ``/proc``'s pid namespace; None for the initial namespace."""
    namespace = os.stat("/proc/self/ns/pid")
    is_initial = namespace.st_ino == INITIAL_NAMESPACE or _is_proc_of_another(access)
    return None if is_initial else (namespace.st_dev, namespace.st_ino)


def check_namespace(access: Access) -> None:
    """Raise ``KProfilerError`` if this process and ``/proc`` have different pid namespaces."""
    if _is_proc_of_another(access):
        raise KProfilerError(
            "/proc belongs to a different pid namespace than this process",
            hint="remount /proc in a separate mount namespace: unshare --mount-proc",
        )


def _is_proc_of_another(access: Access) -> bool:
    """Returns whether ``/proc`` shows an ancestor of this process's pid namespace."""
    return len(_read_ids(access, "self", b"NSpid:")) > 1


def find_targets(
    access: Access,
    *,
    pids: Sequence[int],
    comms: Sequence[str],
    cgroups: Sequence[str],
    containers: Sequence[str],
    groups: Sequence[Groups] = (),
    loader: str = "auto",
) -> Targets:
    """Find the running processes that the filters select.

    Descendants of ``pids`` are also selected. ``cgroups`` are cgroup v2 paths, and
    ``containers`` are names, or prefixes of ids. Each of the ``groups`` selects a single pod or
    unit. Raises ``KProfilerError`` if a target does not exist.
    """
    if pids:
        check_namespace(access)
    for pid in pids:
        check_process(access, pid)
    chosen_directories = [_get_cgroup(access, path) for path in cgroups]
    listed = find_containers(access) if containers else []
    followed = list(pids)
    for name in containers:
        for container in get_containers(listed, name):
            if container.cgroup:
                chosen_directories.append(_get_cgroup(access, container.cgroup))
            else:
                followed += _take_pids(f"container {name}", container.pids, pids)
    for group in groups:
        name = f"pod {group.pods[0]}" if group.pods else f"unit {group.units[0]}"
        directories, processes = GroupFollower(access, group, loader=loader).find()
        if not directories and not processes:
            raise KProfilerError(f"there is no {name}", hint=_GROUP_HINTS[bool(group.pods)])
        chosen_directories += directories
        if processes:
            followed += _take_pids(name, processes, pids)
    follower = ProcessFollower(access, followed, time.monotonic) if followed else None
    return Targets(follower, comms, chosen_directories)


def _take_pids(name: str, named_pids: Sequence[int], pids: Sequence[int]) -> Sequence[int]:
    """Returns the pids of a target without a v2 cgroup. Raises an error if ``pids`` are given."""
    if pids:
        raise KProfilerError(
            f"the {name} has no v2 cgroup and cannot be combined with --pid",
            hint="use only one of the two",
        )
    return named_pids


def check_process(access: Access, pid: int) -> None:
    """Raise ``KProfilerError`` unless ``pid`` is the id of a process, rather than of a thread."""
    if read_process(access, pid) is None:
        raise KProfilerError(f"there is no process {pid}", hint="list processes with ps or pgrep")
    (leader,) = _read_ids(access, pid, b"Tgid:")
    if leader != pid:
        raise KProfilerError(
            f"{pid} is a thread of process {leader}", hint=f"use --pid {leader}, or --comm"
        )


def _read_ids(access: Access, pid: int | str, name: bytes) -> list[int]:
    """Returns the ids on a line of ``/proc/PID/status``; empty if the file lacks the line."""
    status = access.read_bytes(f"/proc/{pid}/status")
    values = (line[len(name) :] for line in status.splitlines() if line.startswith(name))
    return [int(word) for word in next(values, b"").split()]


def _get_cgroup(access: Access, path: str) -> Cgroup:
    cgroup = find_cgroup(access, path)
    if cgroup is None:
        raise KProfilerError(
            f"{path} is not a v2 cgroup",
            hint="list cgroups with systemd-cgls; pass a path below /sys/fs/cgroup",
        )
    if not 1 <= cgroup.level <= MAX_CGROUP_LEVEL:
        raise KProfilerError(
            f"the cgroup {path} is {cgroup.level} levels below the root; "
            f"1 to {MAX_CGROUP_LEVEL} are supported"
        )
    return cgroup


def get_containers(listed: Sequence[Container], name: str) -> list[Container]:
    """Returns the containers that match a name or id; raises ``KProfilerError`` if none match."""
    matching = [container for container in listed if container.is_called(name)]
    if matching:
        return matching
    running = ", ".join(
        container.names[0] if container.names else container.id[:12] for container in listed
    )
    raise KProfilerError(
        f"there is no running container {name}",
        hint=f"running containers: {running}" if running else "no containers are running",
    )
