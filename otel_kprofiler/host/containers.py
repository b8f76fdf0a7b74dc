"""Finds the running containers on this host, and reads their names from the runtimes' files."""

from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.cgroup_names import parse_cgroup, parse_unified_path
from otel_kprofiler.host.container_names import read_pod_names, read_runtime_name

_SHORTEST_ID: Final = 4


class Container(NamedTuple):
    """A running container.

    Attributes:
        names: all of the container's names; empty if the runtime's files cannot be read.
        cgroup: path in the cgroup v2 hierarchy; empty if unknown.
    """

    id: str
    names: tuple[str, ...]
    cgroup: str
    pids: tuple[int, ...]

    def is_called(self, text: str) -> bool:
        """Returns whether ``text`` is a name of the container, or a prefix of its id."""
        return text in self.names or (len(text) >= _SHORTEST_ID and self.id.startswith(text))


def find_containers(files: HostFiles) -> list[Container]:
    """Returns all containers with a running process, sorted by id."""
    pids: dict[str, list[int]] = {}
    cgroups: dict[str, str] = {}
    for entry in files.list_dir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            text = files.read_bytes(f"/proc/{entry}/cgroup")
        except OSError:
            continue  # the process has exited
        container = parse_cgroup(text).container
        if container:
            pids.setdefault(container, []).append(int(entry))
            cgroups[container] = cgroups.get(container) or _cut_cgroup(text, container)
    in_pods = read_pod_names(files) if pids else {}

    def find_names(container: str) -> tuple[str, ...]:
        if container in in_pods:
            return in_pods[container].all
        name = read_runtime_name(files, container)
        return (name,) if name else ()

    return [Container(key, find_names(key), cgroups[key], tuple(pids[key])) for key in sorted(pids)]


def _cut_cgroup(text: bytes, container: str) -> str:
    """Returns the cgroup v2 path of the container itself; empty if a namespace hides the path."""
    path = parse_unified_path(text)
    if path.startswith("/.."):
        return ""
    prefix, separator, suffix = path.rpartition(container)
    return f"{prefix}{separator}{suffix.partition('/')[0]}" if separator else ""
