"""Extracts the container, pod and systemd unit from cgroup paths.

Path formats, by runtime:

- Docker (moby, daemon/cgroup): ``/docker/ID``, ``PARENT/ID``, ``docker-ID.scope``
- containerd (internal/cri): ``cri-containerd-ID.scope``, ``/kubepods/…/podUID/ID``, and
  ``….slice:cri-containerd:ID`` where its cgroup driver differs from the kubelet's; nerdctl:
  ``nerdctl-ID.scope``, ``/NAMESPACE/ID``
- CRI-O (internal/config/cgmgr): ``crio-ID.scope``, ``crio-ID``; the monitor, in
  ``crio-conmon-ID.scope`` next to the container, counts as part of the host
- podman (libpod/oci_conmon_linux.go): ``libpod-ID.scope``, ``/libpod_parent/libpod-ID``,
  ``libpod-payload-ID`` (``--cgroups=split``); not containers: pods, whose ids have the same form
  (``/libpod_parent/ID``, ``machine-libpod_pod_ID.slice``); monitors (``libpod-conmon-ID.scope``);
  and health checks (``ID.service``)
- Amazon ECS (amazon-ecs-agent): ``/ecs/TASK/ID``, ``ecstasks-TASK.slice``; on Fargate
  ``/ecs/TASK/TASK-NUMBER``, where ``TASK-NUMBER`` is the id
- the kubelet (pkg/kubelet/cm/cgroup_manager_linux.go): ``podUID``, or ``…-podUID.slice`` with ``_``
  for ``-``; the UID of a static pod is the hash of its manifest
- systemd (src/basic/cgroup-util.c, ``cg_path_get_unit``): the first unit below the slices, with a
  leading ``_`` where the name would look like a control file
"""

import re
from functools import lru_cache
from typing import Final, NamedTuple

CONTAINER_ID: Final = re.compile(
    r"(?:(?:docker|cri-containerd|containerd|nerdctl|crio|libpod|libpod-payload)-)?"
    r"([0-9a-f]{64})(?:\.scope)?"
)
"""Matches the name of a container's cgroup directory."""
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
"""Cgroup hierarchies in order of precedence: v2, systemd's, and those with controllers."""
_LONGEST_ID: Final = 64


class CgroupNames(NamedTuple):
    """Names parsed from a cgroup's path; a name missing from the path is empty.

    Attributes:
        container: id of the innermost container in the path.
        pod: UID of the Kubernetes pod.
        unit: unit of the system's service manager, except scopes that runtimes create for
            containers.
        user_unit: unit of a user's service manager.
    """

    container: str = ""
    pod: str = ""
    unit: str = ""
    user_unit: str = ""


class CgroupLine(NamedTuple):
    """A line in ``/proc/PID/cgroup``: the controllers (none in cgroup v2), and the path."""

    controllers: tuple[str, ...]
    path: str


NO_NAMES: Final = CgroupNames()


def parse_cgroup_lines(text: bytes) -> list[CgroupLine]:
    """Parses the lines of ``/proc/PID/cgroup`` (cgroups(7)); skips malformed lines."""
    lines = []
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/"):
            controllers = tuple(parts[1].split(",")) if parts[1] else ()
            lines.append(CgroupLine(controllers, parts[2].removesuffix(_DELETED)))
    return lines


def parse_unified_path(text: bytes) -> str:
    """Returns the path in the cgroup v2 hierarchy; empty if there is none."""
    return next((line.path for line in parse_cgroup_lines(text) if not line.controllers), "")


@lru_cache(256)
def parse_cgroup(text: bytes) -> CgroupNames:
    """Parses ``/proc/PID/cgroup``, trying hierarchies in the order of ``_LINES``; never raises."""
    if text == b"0::/\n":
        return NO_NAMES  # most processes on hosts without systemd, and all kernel threads
    lines = sorted(parse_cgroup_lines(text), key=_rank)
    names = [parse_cgroup_path(line.path) for line in lines if len(line.path) > 1]
    inside = next((path_names for path_names in names if path_names.container), NO_NAMES)
    pod = inside.pod or next((path_names.pod for path_names in names if path_names.pod), "")
    managed = next((path_names for path_names in names if path_names.unit), NO_NAMES)
    return CgroupNames(inside.container, pod, managed.unit, managed.user_unit)


@lru_cache(256)
def parse_cgroup_path(path: str) -> CgroupNames:
    """Parses a cgroup's path; never raises. Ignores units outside our namespace (``/../…``)."""
    parts = [part for part in path.split("/") if part and part != ".."]
    at, container = _find_container(parts)
    above = parts[: at + 1]
    pod = next((uid for part in reversed(above or parts) if (uid := _find_pod(part))), "")
    units = ("", "") if path.startswith("/../") else _find_units(parts)
    return CgroupNames(container, pod, *units)


def _rank(line: CgroupLine) -> int:
    controllers = line.controllers or ("",)
    return min(
        _LINES.index(controller) if controller in _LINES else len(_LINES)
        for controller in controllers
    )


def _find_container(parts: list[str]) -> tuple[int, str]:
    """Returns the index and id of the innermost container; -1 and "" if there is none."""
    for at in range(len(parts) - 1, -1, -1):
        part = parts[at]
        if len(part) < _LONGEST_ID:
            fargate = _FARGATE.fullmatch(part)
            if fargate and any(parent.startswith("ecs") for parent in parts[:at]):
                return at, fargate[1]
            continue
        match = CONTAINER_ID.fullmatch(part) or _BY_COLONS.fullmatch(part)
        # Below libpod_parent, an id without a prefix identifies a pod.
        if match and not (part == match[1] and at and parts[at - 1] == _POD_PARENT):
            return at, match[1]
    return -1, ""


def _find_pod(part: str) -> str:
    match = _POD.fullmatch(part)
    if not match or (match["slice"] is None) == (match["end"] is not None):
        return ""
    if "_" in match["uid"] and "-" in match["uid"]:
        return ""
    return match["uid"].replace("_", "-")


def _find_units(parts: list[str]) -> tuple[str, str]:
    """Returns the system manager's unit and a user manager's unit; empty if absent."""
    at = _skip_slices(parts, 0)
    unit = _find_unit(parts, at)
    if not _USER_MANAGER.fullmatch(unit):
        return unit, ""
    # The user manager itself runs in init.scope below its unit.
    return unit, _find_unit(parts, _skip_slices(parts, at + 1))


def _find_unit(parts: list[str], at: int) -> str:
    name = parts[at].removeprefix("_") if at < len(parts) else ""
    return name if _UNIT.fullmatch(name) and not CONTAINER_ID.fullmatch(name) else ""


def _skip_slices(parts: list[str], at: int) -> int:
    while at < len(parts) and _SLICE.fullmatch(parts[at]):
        at += 1
    return at
