"""Resources: which process a sample belongs to, and on which host."""

from __future__ import annotations

import platform
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import HostFiles
from otel_kprofiler.model import Attributes, AttributeValue, ProcessKey, RawSample, Resource
from otel_kprofiler.processes.contexts import ProcessContexts
from otel_kprofiler.processes.start_time import TICK_NS, read_start_ticks
from otel_kprofiler.text import escape_surrogates

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the semantic conventions that attribute names here follow."""

# The forms that opentelemetry-ebpf-profiler looks for: a plain id, and that of AWS ECS.
_CONTAINER_ID: Final = re.compile(rb"(?:^|[^0-9a-f])([0-9a-f]{64}|[0-9a-f]{32}-\d{8,})(?![0-9a-f])")

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm32"}


def read_host_attributes(files: HostFiles) -> dict[str, AttributeValue]:
    """Attributes of this host by OpenTelemetry's semantic conventions (``host.*``, ``os.*``)."""
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


def parse_container_id(cgroup: bytes) -> str | None:
    """Container id from ``/proc/PID/cgroup``, None outside of containers."""
    matches = _CONTAINER_ID.findall(cgroup)
    return matches[-1].decode("ascii") if matches else None


def format_time(unix_ns: int) -> str:
    """ISO 8601 in UTC with milliseconds."""
    moment = datetime.fromtimestamp(unix_ns // 1_000_000 / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class ProcessResources:
    """One Resource for each process, looked up in ``/proc`` when it is first seen.

    A process is (pid, start time), so that two users of one pid never share a Resource. A
    process that is gone before it can be looked at keeps a Resource of its own with what the
    sample knows. Belongs to one thread; bounded by ``capacity``, least recently used first.

    Args:
        files: the host's files.
        clock: for ``process.creation.time``; the offset of this moment is kept, so that the
            creation time of a process does not change when clocks are synchronised again.
        base: attributes that every Resource has: the host's and the configured ones.
        known: Resources that are known beforehand, with all of their attributes.
        capacity: Resources kept; each takes some 1.5 kB.
        on_new: told of each process and its Resource when it is first seen, and when it changes.
        contexts: what processes publish about themselves (service.name, …); closed with this.
            It never wins over what is configured or found out.
    """

    def __init__(
        self,
        files: HostFiles,
        clock: Clock,
        base: Attributes,
        *,
        known: Mapping[ProcessKey, Attributes] | None = None,
        capacity: int = 2048,
        on_new: Callable[[ProcessKey, Resource], None] | None = None,
        contexts: ProcessContexts | None = None,
    ) -> None:
        self._files = files
        self._boot_unix_ns = clock.to_unix_ns(0)
        self._base = dict(base)
        self._capacity = capacity
        self._on_new = on_new
        self._known = known or {}
        self._resources: OrderedDict[ProcessKey, Resource] = OrderedDict()
        self._checked: dict[int, ProcessKey] = {}
        self._contexts = contexts
        self._keys: dict[Resource, ProcessKey] = {}
        self._own: dict[ProcessKey, Attributes] = {}  # without what the process published
        self._fixed: dict[int, Resource] = {}

    def fix(self, pid: int, resource: Resource) -> None:
        """Give a process that will not end before the profiler its Resource."""
        self._fixed[pid] = resource

    def describe(self, pid: int) -> Attributes:
        """What ``/proc`` tells of a process that runs."""
        key = self._key_from_proc(pid)
        return {**self._identity(key), **(self._read_process(key) or {})}

    def get(self, sample: RawSample) -> Resource:
        """The Resource of the sample's process."""
        if self._fixed and (fixed := self._fixed.get(sample.tgid)):
            return fixed
        key = ProcessKey(sample.tgid, sample.start_time_ns)
        if sample.start_time_ns is None and sample.tgid:
            key = self._key_from_proc(sample.tgid)
        resource = self._resources.get(key)
        if resource is not None:
            self._resources.move_to_end(key)
            return resource
        attributes = self._known.get(key)
        if attributes is None:
            found = self._read_process(key) if key.tgid else None
            attributes = {**self._base, **self._attributes(key, sample, found or {})}
            if self._contexts and found is not None:
                self._contexts.expect(key)
                self._own[key] = attributes
        resource = self._set(key, attributes)
        if len(self._resources) > self._capacity:
            oldest, dropped = self._resources.popitem(last=False)
            self._keys.pop(dropped, None)
            self._own.pop(oldest, None)
        return resource

    def renew(self, resources: Collection[Resource]) -> Mapping[Resource, Resource]:
        """Those of the Resources of a window that have changed, with their successors.

        A Resource changes when its process publishes a context, changes or removes it.
        """
        if not self._contexts:
            return {}
        keys = {key: old for old in resources if (key := self._keys.get(old)) in self._own}
        published = self._contexts.look(keys.keys())
        renewed = {}
        for key, old in keys.items():
            attributes = {**published.get(key, {}), **self._own[key]}
            if attributes != old.attributes:
                del self._keys[old]
                renewed[old] = self._set(key, attributes)
        return renewed

    def rebase(self, base: Attributes) -> None:
        """Give every Resource other common attributes from now on."""
        self._base = dict(base)
        for known in (self._resources, self._keys, self._own):
            known.clear()

    def close(self) -> None:
        """Look nothing up any more."""
        if self._contexts:
            self._contexts.close()

    def _set(self, key: ProcessKey, attributes: Attributes) -> Resource:
        resource = self._resources[key] = Resource(attributes, SCHEMA_URL)
        if key in self._own:
            self._keys[resource] = key
        if self._on_new:
            self._on_new(key, resource)
        return resource

    def next_window(self) -> None:
        """Forget which pids were checked, where the sample does not know the start time."""
        self._checked.clear()

    def _key_from_proc(self, tgid: int) -> ProcessKey:
        key = self._checked.get(tgid)
        if key is None:
            start = self._find_start_ns(tgid)
            key = self._checked[tgid] = ProcessKey(tgid, start)
        return key

    def _find_start_ns(self, tgid: int) -> int | None:
        ticks = read_start_ticks(self._files, tgid)
        return None if ticks is None else ticks * TICK_NS

    def _attributes(
        self, key: ProcessKey, sample: RawSample, found: Attributes
    ) -> dict[str, AttributeValue]:
        attributes = {**self._identity(key), **found}
        if "process.executable.name" not in attributes and sample.tid == sample.tgid:
            # What is left of a process that has gone; kernel threads and the idle task have
            # no executable either.
            comm = sample.comm.decode("utf-8", "replace")
            attributes["process.executable.name"] = comm if key.tgid else "swapper"
        return attributes

    def _identity(self, key: ProcessKey) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {"process.pid": key.tgid}
        if key.start_time_ns is not None:
            started = format_time(self._boot_unix_ns + key.start_time_ns)
            attributes["process.creation.time"] = started
        return attributes

    def _read_process(self, key: ProcessKey) -> dict[str, AttributeValue] | None:
        """What ``/proc`` tells; None if the process is gone or its pid has another user."""
        attributes: dict[str, AttributeValue] = {}
        try:
            container = parse_container_id(self._files.read_bytes(f"/proc/{key.tgid}/cgroup"))
        except OSError:
            return None
        if container:
            attributes["container.id"] = container
        try:
            link = self._files.read_link(f"/proc/{key.tgid}/exe")
            path = escape_surrogates(link.removesuffix(" (deleted)"))
            attributes["process.executable.path"] = path
            attributes["process.executable.name"] = path.rpartition("/")[2]
        except OSError:
            pass  # a kernel thread, or a process that this one may not look into
        # Looked at last: what was read above belongs to the sampled process only if the pid
        # still has its start time, to the tick that /proc shows.
        known_ns = key.start_time_ns
        if known_ns is None or self._find_start_ns(key.tgid) != known_ns // TICK_NS * TICK_NS:
            return None
        return attributes
