"""The running containers of this host, with the names that their runtimes keep in files."""

from __future__ import annotations

from typing import Final, NamedTuple

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.cgroup_names import parse_cgroup, parse_unified_path
from otel_kprofiler.host.container_names import read_pod_names, read_runtime_name

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
        """Returns whether ``text`` is one of the names, or the beginning of the id."""
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
    in_pods = read_pod_names(files) if pids else {}
    names = {
        one: in_pods[one].all if one in in_pods else (read_runtime_name(files, one),)
        for one in pids
    }
    return [
        Container(one, tuple(filter(None, names[one])), cgroups[one], tuple(pids[one]))
        for one in sorted(pids)
    ]


def _cut_cgroup(text: bytes, container: str) -> str:
    """The path of a container's cgroup of version 2, without what is below it.

    Empty if a cgroup namespace hides where it begins.
    """
    path = parse_unified_path(text)
    if path.startswith("/.."):
        return ""
    before, found, after = path.rpartition(container)
    return f"{before}{found}{after.partition('/')[0]}" if found else ""
