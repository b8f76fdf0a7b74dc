"""Reads container and pod names from files written by runtimes and the kubelet."""

import json
import re
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles

_DOCKER: Final = "/var/lib/docker/containers"
_PODMAN: Final = "/var/lib/containers/storage/overlay-containers/containers.json"
_KUBERNETES: Final = "/var/log/containers"
_PODS: Final = "/var/log/pods"
_MOST: Final = 4096
_FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 60.0
_LOG_NAME: Final = re.compile(
    r"(?P<pod>.+)_(?P<namespace>[^_]+)_(?P<name>.+)-(?P<id>[0-9a-f]{64})\.log"
)
_TERMINATION_LOG: Final = re.compile(
    r" \S*/pods/(?P<uid>[0-9a-f-]{32,36})/containers/(?P<name>[a-z0-9-]{1,63})/[0-9a-f]{8} "
)
_OWN_DOCKER: Final = re.compile(r" \S*/containers/([0-9a-f]{64})/hostname /etc/hostname ")
_OWN_PODMAN: Final = re.compile(
    r" \S*/overlay-containers/([0-9a-f]{64})/userdata/\.containerenv /run/\.containerenv "
)


class ContainerNames(NamedTuple):
    """The names of a container; empty if no readable file contains them.

    Attributes:
        name: name in Docker or podman.
        pod_container: the container's name within the Kubernetes pod.
        pod: name of the pod, not its UID.
    """

    name: str = ""
    pod_container: str = ""
    pod: str = ""
    namespace: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """Returns all names by which commands can select the container."""
        named = (self.name, self.pod_container, self.pod)
        both = f"{self.pod}/{self.pod_container}" if self.pod else ""
        return tuple(dict.fromkeys(filter(None, (*named, both))))


class OwnContainer(NamedTuple):
    """A process's container and the UID of its pod; empty if the mounts do not reveal them."""

    id: str = ""
    pod: str = ""
    pod_container: str = ""


def read_pod_names(files: HostFiles) -> dict[str, ContainerNames]:
    """Reads pod and container names, by container id, from the names of the kubelet's log files.

    The names have the form ``POD_NAMESPACE_NAME-ID.log`` (pkg/kubelet/kuberuntime/legacy.go).
    """
    try:
        logs = files.list_dir(_KUBERNETES)
    except OSError:
        return {}
    matches = [match for log in logs if (match := _LOG_NAME.fullmatch(log))]
    return {
        match["id"]: ContainerNames("", match["name"], match["pod"], match["namespace"])
        for match in matches
    }


class PodName(NamedTuple):
    """Namespace and name of a pod."""

    namespace: str
    name: str


def read_pods(files: HostFiles) -> dict[str, PodName]:
    """Reads the pods on this host, by UID, from the names of the kubelet's log directories.

    Directory names have the form ``NAMESPACE_NAME_UID`` (``BuildPodLogsDirectory`` in
    pkg/kubelet/kuberuntime).
    """
    try:
        entries = files.list_dir(_PODS)
    except OSError:
        return {}
    parts = [entry.split("_") for entry in entries]
    return {fields[2]: PodName(fields[0], fields[1]) for fields in parts if len(fields) == 3}


class _Asked(NamedTuple):
    names: ContainerNames
    again_at: float
    wait_s: float


class KnownContainers:
    """Caches container names; not thread-safe.

    Container runtimes and the kubelet write names while a container starts, so missing names are
    looked up again after a second, and then at intervals that double up to a minute.
    """

    def __init__(self, files: HostFiles, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._monotonic = monotonic
        self._asked: dict[str, _Asked] = {}

    def find(self, container: str) -> ContainerNames:
        """Returns a container's names; empty if no file contains them yet."""
        asked, now = self._asked.get(container), self._monotonic()
        if asked and now < asked.again_at:
            return asked.names
        names = read_pod_names(self._files).get(container)
        if names is None:
            names = ContainerNames(read_runtime_name(self._files, container))
        if len(self._asked) >= _MOST:
            self._asked.clear()
        wait_s = min(2 * asked.wait_s, _LAST_RETRY_S) if asked else _FIRST_RETRY_S
        again_at = float("inf") if any(names) else now + wait_s
        self._asked[container] = _Asked(names, again_at, wait_s)
        return names


def read_runtime_name(files: HostFiles, container: str) -> str:
    """Returns a Docker or Podman container's name; empty if the runtime's files lack the name."""
    return _read_docker(files, container) or _read_podman(files, container)


def _read_docker(files: HostFiles, container: str) -> str:
    try:
        settings = json.loads(files.read_bytes(f"{_DOCKER}/{container}/config.v2.json"))
        return str(settings["Name"]).removeprefix("/")
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _read_podman(files: HostFiles, container: str) -> str:
    try:
        rows = json.loads(files.read_bytes(_PODMAN))
        return next(
            (str(row["names"][0]) for row in rows if row["id"] == container and row["names"]), ""
        )
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def parse_own_container(mountinfo: bytes) -> OwnContainer:
    """Identifies a process's container from its mounts.

    A process can add misleading mounts, so trust the result for another process only if it matches
    the names in that process's cgroup.
    """
    text = mountinfo.decode("utf-8", "replace")
    runtime_match = _OWN_DOCKER.search(text) or _OWN_PODMAN.search(text)
    in_pod = _TERMINATION_LOG.search(text)
    if in_pod is None:
        return OwnContainer(runtime_match[1] if runtime_match else "")
    return OwnContainer("", in_pod["uid"], in_pod["name"])
