"""The running containers of this host, with the names that their runtimes keep in files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.cgroup_names import parse_cgroup, parse_unified_path

_DOCKER: Final = "/var/lib/docker/containers"
_PODMAN: Final = "/var/lib/containers/storage/overlay-containers/containers.json"
_KUBERNETES: Final = "/var/log/containers"
_LOG_NAME: Final = re.compile(
    r"(?P<pod>.+)_(?P<namespace>[^_]+)_(?P<name>.+)-(?P<id>[0-9a-f]{64})\.log"
)
_SHORTEST_ID: Final = 4


class Container(NamedTuple):
    """A running container.

    Attributes:
        id: the runtime's id.
        names: what people call it; empty if the runtime's files cannot be read.
        cgroup: its path in the hierarchy of version 2; empty if it has none.
        pids: its processes.
    """

    id: str
    names: tuple[str, ...]
    cgroup: str
    pids: tuple[int, ...]

    def is_called(self, text: str) -> bool:
        """Whether ``text`` is one of the names, or the beginning of the id."""
        return text in self.names or (len(text) >= _SHORTEST_ID and self.id.startswith(text))


def find_containers(files: HostFiles) -> list[Container]:
    """All containers with a running process, by id."""
    pids: dict[str, list[int]] = {}
    cgroups: dict[str, str] = {}
    for entry in files.list_dir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            text = files.read_bytes(f"/proc/{entry}/cgroup")
        except OSError:
            continue  # it has ended
        found = parse_cgroup(text).container
        if found:
            pids.setdefault(found, []).append(int(entry))
            cgroups[found] = cgroups.get(found) or _cut_cgroup(text, found)
    return [
        Container(one, _find_names(files, one), cgroups[one], tuple(pids[one]))
        for one in sorted(pids)
    ]


def _cut_cgroup(text: bytes, container: str) -> str:
    """The path of a container's cgroup of version 2, without what is below it."""
    path = parse_unified_path(text)
    before, found, after = path.rpartition(container)
    return f"{before}{found}{after.partition('/')[0]}" if found else ""


def _find_names(files: HostFiles, container: str) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            [
                *_read_docker(files, container),
                *_read_podman(files, container),
                *_read_kubernetes(files, container),
            ]
        )
    )


def _read_docker(files: HostFiles, container: str) -> Iterable[str]:
    try:
        settings = json.loads(files.read_bytes(f"{_DOCKER}/{container}/config.v2.json"))
        return [settings["Name"].removeprefix("/")]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []


def _read_podman(files: HostFiles, container: str) -> Iterable[str]:
    try:
        rows = json.loads(files.read_bytes(_PODMAN))
        return [str(name) for row in rows if row["id"] == container for name in row["names"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _read_kubernetes(files: HostFiles, container: str) -> Iterable[str]:
    """Names of container, pod, and both, from the log's name: ``POD_NAMESPACE_NAME-ID.log``."""
    try:
        logs = files.list_dir(_KUBERNETES)
    except OSError:
        return []
    found = [match for log in logs if (match := _LOG_NAME.fullmatch(log))]
    return [
        name
        for match in found
        if match["id"] == container
        for name in (match["name"], match["pod"], f"{match['pod']}/{match['name']}")
    ]
