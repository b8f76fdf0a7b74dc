"""Lists processes and their descendants, from ``/proc``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.process_stat import ProcessStat, parse_stat


def read_process(files: HostFiles, pid: int) -> ProcessStat | None:
    """A running process; None if there is none, or all of its threads have ended."""
    try:
        found = parse_stat(files.read_bytes(f"/proc/{pid}/stat"))
        if found.has_ended and len(files.list_dir(f"/proc/{pid}/task")) < 2:
            return None
    except (OSError, ValueError):
        return None
    return found


def read_processes(files: HostFiles) -> dict[int, ProcessStat]:
    """All running processes that can be seen; they may come and go meanwhile."""
    pids = [int(name) for name in files.list_dir("/proc") if name.isdecimal()]
    return {pid: found for pid in pids if (found := read_process(files, pid))}


def find_descendants(processes: Mapping[int, ProcessStat], roots: Iterable[int]) -> set[int]:
    """Children of ``roots``, their children and so on; without the roots themselves."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    rest = list(roots)
    known, found = set(rest), set[int]()
    while rest:
        new = [pid for pid in children.get(rest.pop(), ()) if pid not in known]
        known.update(new)
        found.update(new)
        rest += new
    return found
