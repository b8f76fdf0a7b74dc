"""Reads attributes of processes from ``/proc``."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from otel_kprofiler.host import TICK_NS, HostFiles, ProcessStat, read_owner, read_stat
from otel_kprofiler.model import Attributes, AttributeValue, ProcessKey, RawSample
from otel_kprofiler.otlp import KERNEL_THREAD, PROGRAM
from otel_kprofiler.processes.owners import Owners
from otel_kprofiler.processes.places import Places
from otel_kprofiler.processes.programs import read_program
from otel_kprofiler.text import decode_name, escape_surrogates

_DELETED: Final = " (deleted)"
_MOST_PROGRAMS: Final = 1024


class Reading(NamedTuple):
    """A process's attributes; ``is_sure`` means that they belong to the sampled program."""

    attributes: dict[str, AttributeValue]
    is_sure: bool


class ProcessReader:
    """Reads a process's executable, owner, parent, container and systemd unit. Not thread-safe.

    ``reads_arguments`` states whether to read command lines, which show the programs that
    interpreters run. Reading a command line can block.
    """

    def __init__(self, files: HostFiles, *, reads_arguments: bool = True) -> None:
        self._files = files
        self._reads_arguments = reads_arguments
        self._owners = Owners(files)
        self._places = Places(files)
        self._programs: OrderedDict[tuple[int, int], tuple[bytes, Mapping[str, AttributeValue]]] = (
            OrderedDict()
        )

    def read(self, key: ProcessKey, sample: RawSample | None) -> Reading | None:
        """Returns a process's attributes; None if the process has exited or its pid was reused.

        ``sample`` is a sample from the process; None to accept any program that the process runs.
        """
        try:
            attributes = self._places.read(key.tgid, sample.cgroup_id if sample else 0)
        except OSError:
            return None
        owner = read_owner(self._files, key.tgid) if key.owner is None else key.owner
        program = self._read_program(key.tgid)
        # The stat file is read last. The data above belongs to the sampled process only if the pid
        # still has the same start time (in ticks, the resolution of /proc). The data belongs to the
        # sampled program only if the stack start is also the same.
        stat = read_stat(self._files, key.tgid)
        if stat is None or key.start_time_ns is None:
            return None
        if stat.start_ticks != key.start_time_ns // TICK_NS:
            return None
        if stat.is_kernel_thread:
            # Group kernel threads by the name before the slash: kworker for kworker/0:1.
            comm = decode_name(stat.name)
            name = comm.partition("/")[0] or comm
            return Reading(attributes | {KERNEL_THREAD: name}, is_sure=True)
        attributes["process.parent_pid"] = stat.parent
        attributes |= self.describe_owner(owner, attributes)
        is_sure = sample is None or _is_of(stat, sample)
        if is_sure:
            attributes |= program
            self._keep(sample, stat, program)
        return Reading(attributes, is_sure)

    def find(self, sample: RawSample) -> dict[str, AttributeValue]:
        """Returns the attributes of an exited process, derived from its cgroup v2 id and user."""
        attributes = self._places.find(sample.cgroup_id)
        owner = sample.owner if sample.stack_start else None  # kernel threads belong to no user
        return attributes | self.describe_owner(owner, attributes)

    def find_program(self, sample: RawSample) -> Mapping[str, AttributeValue]:
        """Returns the sampled program's attributes, read from any process that ran the program.

        Between fork and execve(2), a child runs its parent's program, often too briefly to be read.
        """
        comm, program = self._programs.get(_identify(sample), (b"", {}))
        return program if sample.tid != sample.tgid or sample.comm == comm else {}

    def describe_owner(self, uid: int | None, attributes: Attributes) -> dict[str, AttributeValue]:
        """Returns attributes for a process's user; empty if ``uid`` is None."""
        if uid is None:
            return {}
        # A container's image defines its user names. On the host, the uid may be another user's.
        owner = self._owners.find(uid) if not uid or "container.id" not in attributes else ""
        return {"process.owner": owner} if owner else {"process.user.id": uid}

    def _read_program(self, pid: int) -> dict[str, AttributeValue]:
        try:
            link = self._files.read_link(f"/proc/{pid}/exe")
        except OSError:
            return {}  # a kernel thread, or no permission
        path = escape_surrogates(link.removesuffix(_DELETED))
        name = path.rpartition("/")[2]
        attributes: dict[str, AttributeValue] = {
            "process.executable.path": path,
            "process.executable.name": name,
        }
        program = read_program(self._files, pid, name) if self._reads_arguments else ""
        return attributes | {PROGRAM: program} if program else attributes

    def _keep(
        self, sample: RawSample | None, stat: ProcessStat, program: Mapping[str, AttributeValue]
    ) -> None:
        if sample is None or not sample.stack_start or not program:
            return
        self._programs[_identify(sample)] = stat.name, program
        if len(self._programs) > _MOST_PROGRAMS:
            self._programs.popitem(last=False)

    def name(self, attributes: Attributes) -> Mapping[str, AttributeValue]:
        """Returns the names, if known, of the container whose id is in ``attributes``."""
        return self._places.name(attributes)


def _identify(sample: RawSample) -> tuple[int, int]:
    """Returns the identity of a sample's program, which forked children share with their parent."""
    return sample.exec_id, sample.stack_start


def _is_of(stat: ProcessStat, sample: RawSample) -> bool:
    if sample.owner is None:
        return True  # the sample does not identify its program
    if stat.stack_start:
        return stat.stack_start == sample.stack_start
    return sample.tid != sample.tgid or stat.name == sample.comm
