"""Names of containers and pods, from files of runtimes and of the kubelet."""

from __future__ import annotations

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
    """Names of a container; empty where no readable file has them.

    Attributes:
        name: its name in Docker or podman.
        pod_container: its name in its Kubernetes pod.
        pod: name of the pod.
        namespace: Kubernetes namespace of the pod.
    """

    name: str = ""
    pod_container: str = ""
    pod: str = ""
    namespace: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """All its names on the command line."""
        named = (self.name, self.pod_container, self.pod)
        both = f"{self.pod}/{self.pod_container}" if self.pod else ""
        return tuple(dict.fromkeys(filter(None, (*named, both))))


class OwnContainer(NamedTuple):
    """The container that a process sees itself in; empty where its mounts do not name it."""

    id: str = ""
    pod: str = ""
    pod_container: str = ""


def read_pod_names(files: HostFiles) -> dict[str, ContainerNames]:
    """Containers of pods by id, from the names of the kubelet's logs: ``POD_NAMESPACE_NAME-ID.log``
    (pkg/kubelet/kuberuntime/legacy.go)."""  # noqa: D205, D209 - one sentence
    try:
        logs = files.list_dir(_KUBERNETES)
    except OSError:
        return {}
    matches = [found for log in logs if (found := _LOG_NAME.fullmatch(log))]
    return {
        found["id"]: ContainerNames("", found["name"], found["pod"], found["namespace"])
        for found in matches
    }


class PodName(NamedTuple):
    """Namespace and name of a pod."""

    namespace: str
    name: str


def read_pods(files: HostFiles) -> dict[str, PodName]:
    """Pods of this host by UID, from the kubelet's directories for their logs
    (``BuildPodLogsDirectory`` in pkg/kubelet/kuberuntime): ``NAMESPACE_NAME_UID``."""  # noqa: D205, D209 - one sentence
    try:
        entries = files.list_dir(_PODS)
    except OSError:
        return {}
    parts = [entry.split("_") for entry in entries]
    return {one[2]: PodName(one[0], one[1]) for one in parts if len(one) == 3}


class _Asked(NamedTuple):
    """Names of a container, and when to ask again."""

    names: ContainerNames
    again_at: float
    wait_s: float


class KnownContainers:
    """Remembers the names of containers; not thread-safe.

    Runtimes and the kubelet write them while a container starts, so that they are asked for again
    after 1, 2, 4 and up to 60 seconds.

    Args:
        files: the host's files.
        monotonic: the clock, in seconds.
    """

    def __init__(self, files: HostFiles, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._monotonic = monotonic
        self._asked: dict[str, _Asked] = {}

    def find(self, container: str) -> ContainerNames:
        """The names of a container, as far as they are known by now."""
        known, now = self._asked.get(container), self._monotonic()
        if known and now < known.again_at:
            return known.names
        names = read_pod_names(self._files).get(container)
        if names is None:
            names = ContainerNames(read_runtime_name(self._files, container))
        if len(self._asked) >= _MOST:
            self._asked.clear()
        wait_s = min(2 * known.wait_s, _LAST_RETRY_S) if known else _FIRST_RETRY_S
        again_at = float("inf") if any(names) else now + wait_s
        self._asked[container] = _Asked(names, again_at, wait_s)
        return names


def read_runtime_name(files: HostFiles, container: str) -> str:
    """Name of a container in Docker or podman; empty if their files do not have it."""
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
    """Parses the mounts of a process in a container for its names.

    They come from the runtime, but a process may add its own: only for what is known to be one's
    own container, or to confirm what the cgroup says.
    """
    text = mountinfo.decode("utf-8", "replace")
    own = _OWN_DOCKER.search(text) or _OWN_PODMAN.search(text)
    in_pod = _TERMINATION_LOG.search(text)
    if in_pod is None:
        return OwnContainer(own[1] if own else "")
    return OwnContainer("", in_pod["uid"], in_pod["name"])
