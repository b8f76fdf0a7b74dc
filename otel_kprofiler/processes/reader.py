"""Attributes of processes from ``/proc``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from otel_kprofiler.host import TICK_NS, HostFiles, read_stat
from otel_kprofiler.model import Attributes, AttributeValue, ProcessKey
from otel_kprofiler.otlp import KERNEL_THREAD
from otel_kprofiler.processes.owners import Owners
from otel_kprofiler.processes.places import Places
from otel_kprofiler.text import decode_name, escape_surrogates

_DELETED: Final = " (deleted)"


class ProcessReader:
    """Reads what a process is: its file, owner, parent, container and unit. Not thread-safe.

    Args:
        files: the host's files.
        monotonic: the clock, in seconds.
    """

    def __init__(self, files: HostFiles, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._owners = Owners(files, monotonic)
        self._places = Places(files, monotonic)

    def read(self, key: ProcessKey, cgroup_id: int) -> dict[str, AttributeValue] | None:
        """Attributes of a process; None if it has exited or its pid was reused.

        Args:
            key: the process.
            cgroup_id: the cgroup of version 2 that its sample was taken in; 0: unknown.
        """
        try:
            attributes = self._places.read(key.tgid, cgroup_id)
        except OSError:
            return None
        uid = self._owners.find_owner(key.tgid)
        try:
            link = self._files.read_link(f"/proc/{key.tgid}/exe")
            path = escape_surrogates(link.removesuffix(_DELETED))
            attributes["process.executable.path"] = path
            attributes["process.executable.name"] = path.rpartition("/")[2]
        except OSError:
            pass  # a kernel thread, or no permission
        # Read last: the data above is of the sampled process only if the pid still has its start
        # time, to the tick that /proc shows.
        stat = read_stat(self._files, key.tgid)
        if stat is None or key.start_time_ns is None:
            return None
        if stat.start_ticks != key.start_time_ns // TICK_NS:
            return None
        if stat.is_kernel_thread:
            return attributes | {KERNEL_THREAD: group_kernel_thread(decode_name(stat.name))}
        attributes["process.parent_pid"] = stat.parent
        if uid is not None:
            # Names of users in a container are those of its image; the host's would mislead.
            owner = self._owners.find(uid) if not uid or "container.id" not in attributes else ""
            attributes |= {"process.owner": owner} if owner else {"process.user.id": uid}
        return attributes

    def find(self, cgroup_id: int) -> dict[str, AttributeValue]:
        """Attributes of a process that has exited, by the cgroup of version 2 that it was in."""
        return self._places.find(cgroup_id)

    def name(self, attributes: Attributes) -> Mapping[str, AttributeValue]:
        """Names of the container in these attributes, if they are known by now."""
        return self._places.name(attributes)


def group_kernel_thread(comm: str) -> str:
    """What kernel threads of one purpose have in common: ``kworker`` of ``kworker/0:1``."""
    return comm.partition("/")[0] or comm
