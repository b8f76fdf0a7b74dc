"""Lists processes and their descendants, from ``/proc``."""

from collections.abc import Iterable, Mapping

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.process_stat import ProcessStat, parse_stat


def read_process(files: HostFiles, pid: int) -> ProcessStat | None:
    """Read the status of a process; None if it is missing or all of its threads have exited."""
    try:
        stat = parse_stat(files.read_bytes(f"/proc/{pid}/stat"))
        if stat.has_ended and len(files.list_dir(f"/proc/{pid}/task")) < 2:
            return None
    except (OSError, ValueError):
        return None
    return stat


def read_processes(files: HostFiles) -> dict[int, ProcessStat]:
    """Read the status of all visible processes, which may start or exit during the scan."""
    pids = [int(name) for name in files.list_dir("/proc") if name.isdecimal()]
    return {pid: process for pid in pids if (process := read_process(files, pid))}


def find_descendants(processes: Mapping[int, ProcessStat], roots: Iterable[int]) -> set[int]:
    """Returns all descendants of ``roots``, excluding the roots themselves."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    rest = list(roots)
    seen, descendants = set(rest), set[int]()
    while rest:
        new = [pid for pid in children.get(rest.pop(), ()) if pid not in seen]
        seen.update(new)
        descendants.update(new)
        rest += new
    return descendants
