"""Finds attributes that describe where processes run: container, pod and unit."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from otel_kprofiler.host import (
    CgroupNames,
    HostFiles,
    KnownContainers,
    OwnContainer,
    find_cgroup_root,
    is_in_cgroup_namespace,
    parse_cgroup,
    parse_cgroup_path,
    parse_own_container,
    parse_unified_path,
    walk_cgroups,
)
from otel_kprofiler.model import AttributeValue
from otel_kprofiler.otlp import UNIT, USER_UNIT
from otel_kprofiler.text import escape_surrogates

_NAMES: Final = ("container.name", "k8s.container.name", "k8s.pod.name", "k8s.namespace.name")
"""The attribute names for the fields of :class:`ContainerNames`."""
_MOST: Final = 4096
_WALK_SHARE: Final = 200
_SHORTEST_WALK_S: Final = 1.0


class Places:
    """Finds the container, pod and unit attributes of processes; not thread-safe."""

    def __init__(self, files: HostFiles, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._monotonic = monotonic
        self._containers = KnownContainers(files, monotonic)
        self._mounted: dict[str, str] = {}  # names of containers in pods, by container id
        self._paths: dict[int, str] = {}
        self._walk_at = 0.0
        self._in_namespace = is_in_cgroup_namespace(files)
        self._own: OwnContainer | None = None

    def read(self, pid: int, cgroup_id: int = 0) -> dict[str, AttributeValue]:
        """Returns the container, pod and unit of a running process, as attributes.

        ``cgroup_id`` is the cgroup v2 id in a sample from the process; 0 if unknown. Raises
        ``OSError`` if the process has exited.
        """
        text = self._files.read_bytes(f"/proc/{pid}/cgroup")
        names = parse_cgroup(text)
        if self._in_namespace:
            names = self._find_around(names, parse_unified_path(text), cgroup_id)
        return self._describe(names, pid)

    def find(self, cgroup_id: int) -> dict[str, AttributeValue]:
        """Returns the attributes of an exited process, derived from its cgroup v2 id."""
        return self._describe(parse_cgroup_path(self._find_path(cgroup_id)), None)

    def name(self, attributes: Mapping[str, AttributeValue]) -> Mapping[str, AttributeValue]:
        """Returns the names, if known, of the container whose id is in ``attributes``."""
        container = attributes.get("container.id")
        return self._find_names(str(container)) if container else {}

    def _find_around(self, names: CgroupNames, path: str, cgroup_id: int) -> CgroupNames:
        """Complete the names parsed from ``path``, a path in this process's cgroup namespace."""
        if not names.container:
            inner = parse_cgroup_path(self._find_path(cgroup_id))
            if any(inner):
                return inner
            if path and not path.startswith("/.."):
                outer = self._find_own()
                return CgroupNames(outer.id, outer.pod)
        return names._replace(unit="", user_unit="")  # may be units on the host or in a container

    def _find_own(self) -> OwnContainer:
        if self._own is None:
            try:
                self._own = parse_own_container(self._files.read_bytes("/proc/self/mountinfo"))
            except OSError:
                self._own = OwnContainer()
        return self._own

    def _find_path(self, cgroup_id: int) -> str:
        """Returns the path of a v2 cgroup; empty if unknown. Uses at most 0.5 % of a core."""
        path, now = self._paths.get(cgroup_id), self._monotonic()
        if path is not None or not cgroup_id or now < self._walk_at:
            return path or ""
        try:
            root = find_cgroup_root(self._files)
        except OSError:
            root = None
        if root is not None:
            above = "/.." * root.level
            self._paths = {root.id: above or "/"}
            for cgroup in walk_cgroups(root):
                self._paths[cgroup.id] = above + cgroup.path[len(root.path) :]
        ended = self._monotonic()
        self._walk_at = ended + max(_SHORTEST_WALK_S, _WALK_SHARE * (ended - now))
        return self._paths.get(cgroup_id, "")

    def _describe(self, names: CgroupNames, pid: int | None) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {}
        if names.container:
            attributes["container.id"] = names.container
        if names.pod and names.container:
            attributes["k8s.pod.uid"] = names.pod
        elif names.pod and self._own and self._own.pod == names.pod:
            attributes["k8s.pod.uid"] = names.pod
            attributes["k8s.container.name"] = self._own.pod_container
        if names.container:
            if names.pod and pid and names.container not in self._mounted:
                if len(self._mounted) >= _MOST:
                    self._mounted.clear()
                self._mounted[names.container] = self._read_pod_container(pid, names.pod)
            attributes |= self._find_names(names.container)
        if names.unit:
            attributes[UNIT] = names.unit
        if names.user_unit:
            attributes[USER_UNIT] = names.user_unit
        return attributes

    def _find_names(self, container: str) -> dict[str, AttributeValue]:
        names = self._containers.find(container)
        if not names.pod_container:
            names = names._replace(pod_container=self._mounted.get(container, ""))
        named = zip(_NAMES, names, strict=True)
        return {key: escape_surrogates(value) for key, value in named if value}

    def _read_pod_container(self, pid: int, pod: str) -> str:
        """Returns the container name in a kubelet mount; empty if it is another pod's mount."""
        try:
            container = parse_own_container(self._files.read_bytes(f"/proc/{pid}/mountinfo"))
        except OSError:
            return ""
        return container.pod_container if container.pod == pod else ""
