"""Resources: the process and the host of a sample."""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import TICK_NS, HostFiles, parse_cgroup, read_start_ticks
from otel_kprofiler.model import Attributes, AttributeValue, ProcessKey, RawSample, Resource
from otel_kprofiler.processes.contexts import ProcessContexts
from otel_kprofiler.text import decode_name, escape_surrogates

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the semantic conventions for the attribute names."""

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm32"}


def read_host_attributes(files: HostFiles) -> dict[str, AttributeValue]:
    """Read the attributes of this host (``host.*`` and ``os.*`` of the semantic conventions)."""
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
    moment = datetime.fromtimestamp(unix_ns // 1_000_000 / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class ProcessResources:
    """One Resource per process, read from ``/proc`` when the process is first seen.

    A process is (pid, start time), so a reused pid gets a new Resource. A process that exits
    before it can be read gets a Resource with what its sample contains. Not thread-safe; an LRU
    cache of ``capacity`` entries.

    Args:
        files: the host's files.
        clock: for ``process.creation.time``; its current offset is kept, so that creation times
            do not change when clocks are synchronised again.
        base: attributes of every Resource: the host's and the configured ones.
        known: Resources known in advance, with all their attributes.
        capacity: number of Resources kept; each takes some 1.5 kB.
        on_new: called with a process and its Resource when first seen and on changes.
        contexts: what processes publish about themselves (service.name, …); closed with this
            object. Configured and observed attributes take precedence.
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
        self._own: dict[ProcessKey, Attributes] = {}  # without published attributes
        self._fixed: dict[int, Resource] = {}

    def fix(self, pid: int, resource: Resource) -> None:
        """Set the Resource of a process that outlives the profiler."""
        self._fixed[pid] = resource

    def describe(self, pid: int) -> Attributes:
        """Attributes of a running process from ``/proc``."""
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
        """The Resources of a window that have changed, with their replacements.

        A Resource changes when its process publishes, updates or removes a context.
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

    @property
    def common(self) -> Collection[str]:
        """Names of the attributes that all Resources have: the host's and the configured ones."""
        return self._base.keys()

    def rebase(self, base: Attributes) -> None:
        """Replace the common attributes of all Resources from now on."""
        self._base = dict(base)
        for known in (self._resources, self._keys, self._own):
            known.clear()

    def close(self) -> None:
        """Stop reading process contexts."""
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
        """Check pids again whose samples lack a start time."""
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
            # The process exited, or is a kernel thread or the idle task without an executable.
            comm = decode_name(sample.comm)
            attributes["process.executable.name"] = comm if key.tgid else "swapper"
        return attributes

    def _identity(self, key: ProcessKey) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {"process.pid": key.tgid}
        if key.start_time_ns is not None:
            started = format_time(self._boot_unix_ns + key.start_time_ns)
            attributes["process.creation.time"] = started
        return attributes

    def _read_process(self, key: ProcessKey) -> dict[str, AttributeValue] | None:
        """Attributes from ``/proc``; None if the process exited or its pid was reused."""
        attributes: dict[str, AttributeValue] = {}
        try:
            names = parse_cgroup(self._files.read_bytes(f"/proc/{key.tgid}/cgroup"))
        except OSError:
            return None
        if names.container:
            attributes["container.id"] = names.container
        if names.pod and names.container:
            attributes["k8s.pod.uid"] = names.pod
        try:
            link = self._files.read_link(f"/proc/{key.tgid}/exe")
            path = escape_surrogates(link.removesuffix(" (deleted)"))
            attributes["process.executable.path"] = path
            attributes["process.executable.name"] = path.rpartition("/")[2]
        except OSError:
            pass  # a kernel thread, or no permission
        # Checked last: the data above is of the sampled process only if the pid still has its
        # start time, to the tick that /proc shows.
        known_ns = key.start_time_ns
        if known_ns is None or self._find_start_ns(key.tgid) != known_ns // TICK_NS * TICK_NS:
            return None
        return attributes
