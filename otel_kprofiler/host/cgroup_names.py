"""Parses the paths of cgroups for container, pod and unit.

Each form as its runtime makes it:

- Docker (moby, daemon/cgroup): ``/docker/ID``, ``PARENT/ID``, ``docker-ID.scope``
- containerd (internal/cri): ``cri-containerd-ID.scope``, ``/kubepods/…/podUID/ID``, and
  ``….slice:cri-containerd:ID`` where its cgroup driver differs from the kubelet's; nerdctl:
  ``nerdctl-ID.scope``, ``/NAMESPACE/ID``
- CRI-O (internal/config/cgmgr): ``crio-ID.scope``, ``crio-ID``; with its monitor beside it in
  ``crio-conmon-ID.scope``, which is a process of the host
- podman (libpod/oci_conmon_linux.go): ``libpod-ID.scope``, ``/libpod_parent/libpod-ID``,
  ``libpod-payload-ID`` (``--cgroups=split``); its pods have ids of the same form
  (``/libpod_parent/ID``, ``machine-libpod_pod_ID.slice``), its monitor ``libpod-conmon-ID.scope``,
  its health checks ``ID.service``, and none of these is a container
- Amazon ECS (amazon-ecs-agent): ``/ecs/TASK/ID``, ``ecstasks-TASK.slice``; on Fargate
  ``/ecs/TASK/TASK-NUMBER``, which is the id there
- the kubelet (pkg/kubelet/cm/cgroup_manager_linux.go): ``podUID``, or ``…-podUID.slice`` with ``_``
  for ``-``; the UID of a static pod is the hash of its file
- systemd (src/basic/cgroup-util.c, ``cg_path_get_unit``): the first unit below its slices, with a
  leading ``_`` where the name would look like a file of the kernel
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

CONTAINER_ID: Final = re.compile(
    r"(?:(?:docker|cri-containerd|containerd|nerdctl|crio|libpod|libpod-payload)-)?"
    r"([0-9a-f]{64})(?:\.scope)?"
)
"""A directory of a container."""
_BY_COLONS: Final = re.compile(
    r"(?:[^:]*:)?(?:docker|cri-containerd|nerdctl|crio|libpod):([0-9a-f]{64})"
)
_FARGATE: Final = re.compile(r"([0-9a-f]{32}-\d{8,20})")
_HEX: Final = r"[0-9a-f]"
_POD: Final = re.compile(
    rf"(?:(?P<slice>.*-))?pod(?P<uid>{_HEX}{{32}}|{_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}})"
    r"(?P<end>\.slice)?(?::.*)?"
)
_UNIT: Final = re.compile(r"[\w:.\\@-]+\.(?:service|scope)", re.ASCII)
_SLICE: Final = re.compile(r"[\w:.\\@-]+\.slice", re.ASCII)
_USER_MANAGER: Final = re.compile(r"user@\d+\.service")
_POD_PARENT: Final = "libpod_parent"
_DELETED: Final = " (deleted)"
_LINES: Final = ("", "name=systemd", "cpu", "cpuacct", "memory", "pids")
"""Hierarchies in the order of trust: version 2, systemd's own, then controllers."""
_LONGEST_ID: Final = 64


class CgroupNames(NamedTuple):
    """Names in the path of a cgroup; empty where it has none.

    Attributes:
        container: id of the innermost container.
        pod: UID of its Kubernetes pod.
        unit: unit of the system's systemd, without the scopes that runtimes make for containers.
        user_unit: unit of a user's systemd.
    """

    container: str = ""
    pod: str = ""
    unit: str = ""
    user_unit: str = ""


class CgroupLine(NamedTuple):
    """A line of ``/proc/PID/cgroup``: controllers (none in version 2), and the path."""

    controllers: tuple[str, ...]
    path: str


NO_NAMES: Final = CgroupNames()


def parse_cgroup_lines(text: bytes) -> list[CgroupLine]:
    """Lines of ``/proc/PID/cgroup``, see cgroups(7); malformed ones are left out."""
    found = []
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/"):
            controllers = tuple(parts[1].split(",")) if parts[1] else ()
            found.append(CgroupLine(controllers, parts[2].removesuffix(_DELETED)))
    return found


def parse_unified_path(text: bytes) -> str:
    """The path in the hierarchy of version 2; empty if there is none."""
    return next((line.path for line in parse_cgroup_lines(text) if not line.controllers), "")


@lru_cache(256)
def parse_cgroup(text: bytes) -> CgroupNames:
    """Parses ``/proc/PID/cgroup``, by its most specific hierarchy; never raises."""
    if text == b"0::/\n":
        return NO_NAMES  # most processes of hosts without systemd, and all kernel threads
    lines = sorted(parse_cgroup_lines(text), key=_rank)
    names = [parse_cgroup_path(line.path) for line in lines if len(line.path) > 1]
    inside = next((one for one in names if one.container), NO_NAMES)
    pod = inside.pod or next((one.pod for one in names if one.pod), "")
    managed = next((one for one in names if one.unit), NO_NAMES)
    return CgroupNames(inside.container, pod, managed.unit, managed.user_unit)


def parse_cgroup_path(path: str) -> CgroupNames:
    """Parses one path; never raises.

    A path relative to a cgroup namespace (``/../…``) does not show which systemd a unit belongs to.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    at, container = _find_container(parts)
    above = parts[: at + 1]
    pod = next((uid for part in reversed(above or parts) if (uid := _find_pod(part))), "")
    units = ("", "") if path.startswith("/../") else _find_units(parts)
    return CgroupNames(container, pod, *units)


def _rank(line: CgroupLine) -> int:
    controllers = line.controllers or ("",)
    return min(_LINES.index(one) if one in _LINES else len(_LINES) for one in controllers)


def _find_container(parts: list[str]) -> tuple[int, str]:
    """Place and id of the innermost container; -1 and nothing if there is none."""
    for at in range(len(parts) - 1, -1, -1):
        part = parts[at]
        if len(part) < _LONGEST_ID:
            fargate = _FARGATE.fullmatch(part)
            if fargate and any(one.startswith("ecs") for one in parts[:at]):
                return at, fargate[1]
            continue
        found = CONTAINER_ID.fullmatch(part) or _BY_COLONS.fullmatch(part)
        # Without a runtime's name and below this directory, it is a pod of podman.
        if found and not (part == found[1] and at and parts[at - 1] == _POD_PARENT):
            return at, found[1]
    return -1, ""


def _find_pod(part: str) -> str:
    found = _POD.fullmatch(part)
    if not found or (found["slice"] is None) == (found["end"] is not None):
        return ""
    if "_" in found["uid"] and "-" in found["uid"]:
        return ""
    return found["uid"].replace("_", "-")


def _find_units(parts: list[str]) -> tuple[str, str]:
    """Units of the system's and of a user's systemd, outside of containers."""
    at = _skip_slices(parts, 0)
    unit = _find_unit(parts, at)
    if not _USER_MANAGER.fullmatch(unit):
        return unit, ""
    # The manager itself is in init.scope below its unit.
    return unit, _find_unit(parts, _skip_slices(parts, at + 1))


def _find_unit(parts: list[str], at: int) -> str:
    name = parts[at].removeprefix("_") if at < len(parts) else ""
    return name if _UNIT.fullmatch(name) and not CONTAINER_ID.fullmatch(name) else ""


def _skip_slices(parts: list[str], at: int) -> int:
    while at < len(parts) and _SLICE.fullmatch(parts[at]):
        at += 1
    return at
