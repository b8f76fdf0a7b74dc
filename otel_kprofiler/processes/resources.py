"""Finds each sample's Resource, which describes the process, host and service."""

import platform
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from otel_kprofiler.bpf import ThreadContexts
from otel_kprofiler.clock import Clock
from otel_kprofiler.host import TICK_NS, HostFiles, read_start_ticks, read_stat
from otel_kprofiler.model import (
    OFF_CPU,
    Attributes,
    AttributeValue,
    LabelSet,
    ProcessKey,
    RawSample,
    Resource,
    SpanLink,
)
from otel_kprofiler.otlp import ENDED_PROCESSES, KERNEL_THREAD, SCHEMA_URL, UNIT, USER_UNIT
from otel_kprofiler.processes.contexts import ProcessContexts
from otel_kprofiler.processes.reader import ProcessReader, Reading
from otel_kprofiler.processes.shared_resources import SharedResources
from otel_kprofiler.processes.thread_contexts import decode_context, name_root
from otel_kprofiler.text import decode_name

_Place = tuple[int, int | None, int, int | None, int]
"""The fields of a :class:`ProcessKey`, which is slower to create, and a cgroup id."""
_IDLE: Final = "swapper"  # the idle tasks on all CPUs, which /proc does not list
_SERVICE: Final = ".service"
_SOURCES: Final[Mapping[str, Sequence[str]]] = {
    "container": ("k8s.container.name", "container.name"),
    "unit": (USER_UNIT, UNIT),
    "executable": (KERNEL_THREAD, "process.executable.name"),
}
_OWNER: Final = ("process.owner", "process.user.id")
_WORKER: Final = re.compile(rb"(kworker/\w+:\w+)[-+].*", re.DOTALL)
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm32"}


def read_host_attributes(files: HostFiles) -> dict[str, AttributeValue]:
    """Read the attributes of this host (``host.*`` and ``os.*`` in the semantic conventions)."""
    uname = platform.uname()
    attributes: dict[str, AttributeValue] = {
        "host.name": uname.node,
        "host.arch": _ARCHITECTURES.get(uname.machine, uname.machine),
        "os.type": "linux",
        "os.version": uname.release,
    }
    try:
        machine_id = files.read_bytes("/etc/machine-id").decode("ascii", "replace").strip()
    except OSError:
        machine_id = ""
    if machine_id:
        attributes["host.id"] = machine_id
    return attributes


def format_time(unix_ns: int) -> str:
    """Format a Unix time as ISO 8601 in UTC with milliseconds."""
    unix_ms = unix_ns // 1_000_000
    return f"{_format_second(unix_ms // 1000)}.{unix_ms % 1000:03}Z"


@lru_cache(64)
def _format_second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat().removesuffix("+00:00")


_SAMPLED: Final = 1  # a bit in the W3C trace flags

SERVICE_SOURCES: Final = ("container", "unit", "executable")
"""Sources of a service name, if neither the process context nor the environment sets one."""


def find_service_name(attributes: Attributes, sources: Sequence[str]) -> str:
    """Returns a service's name from the first source that has one; empty if no source has one.

    ``container`` is the container's name in the pod, Docker or podman. ``unit`` is the systemd
    service; user services take precedence over system services. ``executable`` is the file name, or
    a kernel thread's name in brackets.
    """
    for source in sources:
        for key in _SOURCES[source]:
            name = str(attributes.get(key, ""))
            if source == "unit":
                name = name.removesuffix(_SERVICE) if name.endswith(_SERVICE) else ""
            if key == KERNEL_THREAD and name:
                name = f"[{name}]"
            if name:
                return name
    return ""


class _Process:
    """A process in a cgroup; ``own`` contains its attributes, except for published attributes.

    ``tried`` is the ``stack_start`` of the last failed attempt to read the program; None if the
    program is known.
    """

    __slots__ = ("key", "own", "places", "resource", "tried")

    def __init__(self, key: ProcessKey, own: Attributes, resource: Resource) -> None:
        self.key, self.own, self.resource = key, own, resource
        self.places = 0
        self.tried: int | None = None


class ProcessResources:
    """Finds the Resource of each process, reading ``/proc`` when a process is first seen.

    Processes are identified by :class:`ProcessKey`, so a new Resource is assigned to a reused pid,
    and to a process that executes another program, changes its user, or moves to another container.
    If a process exits or executes another program before it can be read, its Resource is derived
    from its sample, and from other processes that ran the same program. Resources are kept in an
    LRU cache. Not thread-safe.

    Args:
        clock: converts start times to ``process.creation.time``. The clock's offset is read only
            once, so that creation times do not change when the clock is adjusted.
        base: the attributes in every Resource: the host's and the configured attributes.
        attributes_of: the complete attributes of processes whose attributes are not read from
            ``/proc``.
        capacity: the maximum number of Resources kept. A Resource uses about 1.5 kB.
        on_new: called with a process and its Resource when the process is first seen, and when its
            Resource changes.
        contexts: reads the attributes that processes publish, such as service.name; closed when
            this object is closed. Configured and observed attributes take precedence.
        service_sources: the sources for :func:`find_service_name`, used for processes that do not
            publish a service name.
        reads_threads: whether :meth:`follow_threads` has an effect.
        links_unsampled: whether :meth:`decode_context` keeps links to unsampled spans in processes
            whose Resource was set by :meth:`fix`.
    """

    def __init__(
        self,
        files: HostFiles,
        clock: Clock,
        base: Attributes,
        *,
        attributes_of: Mapping[ProcessKey, Attributes] | None = None,
        capacity: int = 2048,
        on_new: Callable[[ProcessKey, Resource], None] | None = None,
        contexts: ProcessContexts | None = None,
        service_sources: Sequence[str] = (),
        reads_threads: bool = True,
        links_unsampled: bool = True,
    ) -> None:
        self._files = files
        self._boot_unix_ns = clock.to_unix_ns(0)
        self._base = dict(base)
        self._capacity = capacity
        self._on_new = on_new
        self._known = attributes_of or {}
        self._service_sources = tuple(service_sources)
        self._resources: OrderedDict[_Place, _Process] = OrderedDict()
        self._checked: dict[int, ProcessKey] = {}
        self._contexts = contexts
        self._reads_threads = reads_threads
        self._links_unsampled = links_unsampled
        self._latest: dict[ProcessKey, _Process] = {}
        self._newest: dict[tuple[int, int | None], _Process] = {}  # by pid and uid
        self._running: dict[Resource, _Process] = {}  # processes whose attributes may change
        self._fixed: dict[int, dict[int | None, Resource]] = {}  # by pid and uid
        self._ended: Resource | None = None
        # Reading command lines can block, so they are read by the thread that reads contexts.
        self._reader = ProcessReader(files, reads_arguments=contexts is None)
        self._shared = SharedResources(self._reader, self._make)

    def fix(self, pid: int, resource: Resource) -> None:
        """Set the Resource of a process permanently, except for the user, which may change."""
        self._fixed[pid] = {None: resource}

    def describe(self, pid: int) -> Attributes:
        """Reads the attributes of a running process from ``/proc``."""
        key = self._key_from_proc(pid)
        reading = self._reader.read(key, None)
        return {**self._identity(key), **(reading.attributes if reading else {})}

    def get(self, sample: RawSample) -> Resource:
        """Returns the Resource for the sample's process."""
        resource = self.find(sample)
        if resource is not None:
            return resource
        place = self._place(sample)
        key = ProcessKey(*place[:4])
        process = self._resources[place] = self._find(key, sample)
        self._newest[key.process] = process
        process.places += 1
        if len(self._resources) > self._capacity:
            self._forget(self._resources.popitem(last=False)[1])
        return process.resource

    def find(self, sample: RawSample) -> Resource | None:
        """Returns the cached Resource for the sample's process; None if it is not cached."""
        if self._fixed and (fixed := self._fixed.get(sample.tgid)):
            return fixed.get(sample.owner) or self._fix_owner(fixed, sample.owner)
        place = self._place(sample)
        process = self._resources.get(place)
        if process is None:
            return None
        self._resources.move_to_end(place)
        if process.tried is not None and sample.stack_start not in (0, process.tried):
            self._read_again(process, sample)
        return process.resource

    def find_newest(self, sample: RawSample) -> Resource | None:
        """Returns the process's latest Resource, regardless of the program; None if absent."""
        newest = self._newest.get(sample.process.process)
        return newest.resource if newest else None

    def get_shared(self, sample: RawSample) -> Resource:
        """Returns a Resource shared by unread processes; see :class:`SharedResources`."""
        return self._shared.get(sample)

    def _make(self, attributes: Attributes) -> Resource:
        return Resource(self._complete({**self._base, **attributes}, {}), SCHEMA_URL)

    def _place(self, sample: RawSample) -> _Place:
        tgid, start_ns = sample.tgid, sample.start_time_ns
        if start_ns is None and tgid:
            return *self._key_from_proc(tgid), sample.cgroup_id
        return tgid, start_ns, sample.exec_id, sample.owner, sample.cgroup_id

    def get_of(self, process: ProcessKey, *, has_ended: bool = False) -> Resource:
        """Returns the Resource of a process, even if the process has not been sampled.

        If the key has no ``owner``, returns the process's latest Resource. Processes that exit
        before they have a Resource share one, because hundreds of processes may exit per second.
        """
        latest = self._latest.get(process)
        if latest is None and process.owner is None:
            latest = self._newest.get(process.process)
        if latest is not None:
            return latest.resource
        tgid, start_ns = process.process
        if has_ended and process not in self._known and tgid not in self._fixed:
            if self._ended is None:
                self._ended = self._make({ENDED_PROCESSES: True})
            return self._ended
        comm = b""
        stat = read_stat(self._files, tgid) if tgid and start_ns is not None else None
        if stat and start_ns is not None and stat.start_ticks == start_ns // TICK_NS:
            # /proc appends the current work item: kworker/0:1-events
            comm = _WORKER.sub(rb"\1", stat.name)
        tid = tgid if comm or not tgid else 0  # 0 if the process's name is unknown
        sample = RawSample(OFF_CPU, 0, 0, 0, tgid, tid, start_ns, 0, comm, (), (), None)
        return self.get(sample._replace(exec_id=process.exec_id, owner=process.owner))

    def _find(self, key: ProcessKey, sample: RawSample) -> _Process:
        attributes = self._known.get(key)
        if attributes is not None:
            return self._latest.get(key) or self._add(key, attributes)
        latest = self._latest.get(key) or self._latest.get(ProcessKey(*key.process))
        reading = self._reader.read(key, sample) if key.tgid else None
        if reading is None and latest is not None and latest.key == key:
            return latest
        process_attributes = {**self._base, **self._attributes(key, sample, reading)}
        if latest is not None and latest.own == process_attributes:
            return latest
        process = self._add(key, process_attributes)
        if reading is not None:
            self._running[process.resource] = process
            if not reading.is_sure:
                process.tried = sample.stack_start
            elif self._contexts:
                self._contexts.expect(key, sample.stack_start)
        return process

    def _read_again(self, process: _Process, sample: RawSample) -> None:
        reading = self._reader.read(process.key, sample)
        if reading is None or not reading.is_sure:
            process.tried = sample.stack_start
            return
        process.tried = None
        process.own = {**self._base, **self._attributes(process.key, sample, reading)}
        if self._contexts:
            self._contexts.expect(process.key, sample.stack_start)

    def _fix_owner(self, fixed: dict[int | None, Resource], owner: int | None) -> Resource:
        resource = fixed[None]
        last = {name: resource.attributes[name] for name in _OWNER if name in resource.attributes}
        now = self._reader.describe_owner(owner, resource.attributes)
        if last and last != now:
            rest = {name: value for name, value in resource.attributes.items() if name not in last}
            resource = Resource({**rest, **now}, resource.schema_url)
        fixed[owner] = resource
        return resource

    def _add(self, key: ProcessKey, attributes: Attributes) -> _Process:
        resource = Resource(self._complete(attributes, {}), SCHEMA_URL)
        process = self._latest[key] = _Process(key, attributes, resource)
        if self._on_new:
            self._on_new(key, resource)
        return process

    def _forget(self, process: _Process) -> None:
        process.places -= 1
        if not process.places:
            self._running.pop(process.resource, None)
            if self._latest.get(process.key) is process:
                del self._latest[process.key]
            if self._newest.get(process.key.process) is process:
                del self._newest[process.key.process]

    def _complete(self, attributes: Attributes, published: Attributes) -> Attributes:
        merged = {**published, **attributes} if published else attributes
        if "service.name" in merged:
            return merged
        name = find_service_name(attributes, self._service_sources)
        return {**merged, "service.name": name} if name else merged

    def renew(self, resources: Collection[Resource]) -> Mapping[Resource, Resource]:
        """Maps each changed Resource of a window to its replacement.

        A Resource changes when its process publishes, updates or removes a context, or its
        container's names become known. A shared Resource also changes once its cgroup is known.
        """
        running = {
            old: running_process for old in resources if (running_process := self._running.get(old))
        }
        contexts = self._contexts
        asked = {process.key for process in running.values() if process.tried is None}
        published = contexts.look(asked) if contexts else {}
        renewed = {}
        for old, process in running.items():
            if "container.id" in process.own:
                named = self._reader.name(process.own)
                if not named.items() <= process.own.items():
                    process.own = {**named, **process.own}
            attributes = self._complete(process.own, published.get(process.key, {}))
            if attributes != old.attributes:
                del self._running[old]
                renewed[old] = process.resource = Resource(attributes, SCHEMA_URL)
                self._running[process.resource] = process
                if self._on_new:
                    self._on_new(process.key, process.resource)
        return renewed | self._shared.renew(resources)

    @property
    def common(self) -> Collection[str]:
        """Returns the names of the attributes on every Resource: host and configured attributes."""
        return self._base.keys()

    def rebase(self, base: Attributes, service_sources: Sequence[str] = ()) -> None:
        """Replace the attributes common to all Resources, and the sources of service names."""
        self._base = dict(base)
        self._service_sources = tuple(service_sources)
        for cache in (self._resources, self._latest, self._newest, self._running):
            cache.clear()
        self._shared.clear()
        self._ended = None

    def close(self) -> None:
        """Stop reading process contexts."""
        if self._contexts:
            self._contexts.close()

    def remarks(self) -> list[str]:
        """Returns the reasons why contexts are not read, one report line per reason."""
        return self._contexts.unread.remarks() if self._contexts else []

    def count_unread(self) -> dict[str, int]:
        """Counts the processes whose contexts are not read, by reason. Thread-safe."""
        return self._contexts.unread.as_dict() if self._contexts else {}

    def follow_threads(self, reader: ThreadContexts) -> None:
        """Read the thread contexts of processes that publish them; call before the first sample."""
        if self._contexts and self._reads_threads:
            self._contexts.follow_threads(reader)

    def decode_context(
        self, key: ProcessKey, context: bytes, link: SpanLink | None
    ) -> tuple[SpanLink | None, LabelSet]:
        """Decodes the attributes in a sample's thread context, except those with unknown names.

        Returns the link with its local root span's name, and the other attributes as labels.
        """
        if key.tgid in self._fixed and not (self._links_unsampled or context[1] & _SAMPLED):
            link = None
        if not self._contexts:
            return link, decode_context(context, (), has_span=link is not None)
        return name_root(link, self._contexts.decode(key, context, has_span=link is not None))

    def next_window(self) -> None:
        """Clear the cached process start times, used for samples without a start time."""
        self._checked.clear()

    def _key_from_proc(self, tgid: int) -> ProcessKey:
        key = self._checked.get(tgid)
        if key is None:
            ticks = read_start_ticks(self._files, tgid)
            start_ns = None if ticks is None else ticks * TICK_NS
            key = self._checked[tgid] = ProcessKey(tgid, start_ns)
        return key

    def _attributes(
        self, key: ProcessKey, sample: RawSample, reading: Reading | None
    ) -> dict[str, AttributeValue]:
        attributes = {**self._identity(key), **(reading.attributes if reading else {})}
        if reading is None and key.tgid:
            attributes |= self._reader.find(sample)
        if key.tgid and not (reading and reading.is_sure):
            attributes |= self._reader.find_program(sample)
        if "process.executable.name" not in attributes and sample.tid == sample.tgid:
            # The process has exited, or has no executable: a kernel thread, or the idle task.
            comm = decode_name(sample.comm)
            attributes["process.executable.name"] = comm if key.tgid else _IDLE
        if not key.tgid:
            attributes[KERNEL_THREAD] = _IDLE
        return attributes

    def _identity(self, key: ProcessKey) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {"process.pid": key.tgid}
        if key.start_time_ns is not None:
            started = format_time(self._boot_unix_ns + key.start_time_ns)
            attributes["process.creation.time"] = started
        return attributes
