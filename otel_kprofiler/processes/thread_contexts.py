"""Tracks processes that publish thread contexts (OTEP 4947), and decodes the contexts.

A process announces thread contexts in its process context: ``threadlocal.schema_version``, and
``threadlocal.attribute_key_map``, an append-only list of attribute names. In Node.js, the process
context may also describe the layout of V8's and the writer's objects (:func:`find_variable`).
"""

import logging
import os
import platform
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from otel_kprofiler.bpf import (
    IS_GO,
    SPAN_LABEL,
    TRACE_LABEL,
    ContextKind,
    ContextPlace,
    ThreadContexts,
    split_named,
)
from otel_kprofiler.elf import Read
from otel_kprofiler.host import HostFiles, parse_mappings, read_limited, read_maps
from otel_kprofiler.model import (
    MAX_LABEL_NAME_CHARS,
    MAX_LABEL_VALUE_CHARS,
    MAX_LABELS,
    AttributeValue,
    LabelSet,
    ProcessKey,
    SpanLink,
)
from otel_kprofiler.otlp import LOCAL_ROOT, SAMPLE_ATTRIBUTES, describe_request
from otel_kprofiler.processes.goroutines import UnsupportedGoError, find_goroutines
from otel_kprofiler.processes.search_time import SearchTime
from otel_kprofiler.processes.thread_pointer import (
    NODEJS_VARIABLE,
    VARIABLE,
    LoadedObject,
    find_context_place,
    find_objects,
    parse_headers_address,
)
from otel_kprofiler.processes.unread_contexts import UnreadContexts

SCHEMA: Final = "threadlocal.schema_version"
KEY_MAP: Final = "threadlocal.attribute_key_map"
NODEJS_SCHEMA: Final = "nodejs_v1_dev"
GO_SCHEMA: Final = "go_pprof_labels_v1"
SCHEMAS: Final = ("tlsdesc_v1_dev", "tls_v1", NODEJS_SCHEMA)
"""Supported schema versions of thread contexts."""
WRAP_OFFSET: Final = "threadlocal.native_wrap_fields_offset"
"""Attribute: the offset of the record pointer in the wrapper object that V8's slot points to. If
the attribute is absent, V8's slot points to the record itself."""
V8_LAYOUT: Final = {
    "threadlocal.tagged_size": (8,),
    "threadlocal.js_map_table_offset": (24,),
    "threadlocal.ordered_hash_map_header_size": (16,),
    "threadlocal.wrapped_object_offset": (24, 32),
}
"""Supported values of the V8 properties that some Node.js writers publish (v8_context.bpf.h)."""
ANNOUNCED: Final = (SCHEMA, KEY_MAP, WRAP_OFFSET, *V8_LAYOUT)
"""Attributes in a process context that :class:`PublishedThreads` reads."""
_MAX_WRAP_OFFSET: Final = 4096
TRACE_FLAGS: Final = "trace_flags"
"""Attribute on samples with a span: the W3C trace flags in hexadecimal, ``01`` if sampled."""
MAX_KEYS: Final = 256
_MAX_AUXV_BYTES: Final = 4096
_MAX_MAPS: Final = 1024
_MAX_SEARCHED: Final = 8192
_OWNER: Final = 3  # index of the user id in a ProcessKey; key maps are stored without it
_AGAIN_S: Final = 10.0
_MAX_CPU_S: Final = 0.2
_MAX_BLOCKED_S: Final = 2.0
"""Time limits on the search of one process, which delays the search of other processes. The limits
are sufficient for large programs, and for memory that is slow to read."""
_CPU_SHARE: Final = 200
_SHARE: Final = 20
"""Minimum pause after a search, as multiples of the search's CPU time and elapsed time."""

_log = logging.getLogger(__name__)

KeyMap = tuple[str, ...]


class _Variable(NamedTuple):
    """The thread-local variable for thread contexts; see :class:`ContextPlace` for ``wrap_at``."""

    name: bytes
    kind: ContextKind = ContextKind.POINTER
    wrap_at: int = 0


def find_variable(extra: Mapping[str, AttributeValue]) -> _Variable | None:
    """Returns the variable that holds thread contexts; None if the layout is unsupported."""
    schema = extra.get(SCHEMA)
    if schema != NODEJS_SCHEMA:
        return _Variable(VARIABLE) if schema in SCHEMAS else None
    if any(extra.get(name, values[0]) not in values for name, values in V8_LAYOUT.items()):
        return None
    wrap_at = extra.get(WRAP_OFFSET)
    if wrap_at is None:
        return _Variable(NODEJS_VARIABLE, ContextKind.IN_V8)
    if not isinstance(wrap_at, int) or not 0 <= wrap_at <= _MAX_WRAP_OFFSET:
        return None
    return _Variable(NODEJS_VARIABLE, ContextKind.WRAPPED_IN_V8, wrap_at)


def read_key_map(extra: Mapping[str, AttributeValue]) -> KeyMap | None:
    """Returns the attribute names by number; None if the thread contexts are not supported.

    Names that are too long for labels, and names reserved for sample attributes other than the
    local root, are replaced with empty strings.
    """
    if extra.get(SCHEMA) not in SCHEMAS:
        return None
    given = extra.get(KEY_MAP, ())
    if not isinstance(given, tuple):
        return ()
    return tuple([_check_name(name) for name in given[:MAX_KEYS]])


def _check_name(name: object) -> str:
    if not isinstance(name, str) or len(name) > MAX_LABEL_NAME_CHARS:
        return ""
    if name == LOCAL_ROOT:
        return name
    is_ours = name in SAMPLE_ATTRIBUTES or name == TRACE_FLAGS
    return "" if is_ours or name.startswith("otel_kprofiler.") else name


def decode_context(context: bytes, names: KeyMap, *, has_span: bool) -> LabelSet:
    """Decodes the attributes in a sample's thread context; see :class:`RawSample`.

    If a key occurs several times, its last entry is used. The local root span's name and the first
    16 other attributes are kept, and values are truncated to 200 characters. Decoding stops at a
    truncated entry. ``names`` are the process's attribute names by number, and are not used for
    goroutine labels. ``has_span`` states whether the trace flags belong to a span.
    """
    if context[0] == IS_GO:
        return _decode_named(context, has_span=has_span)
    labels: dict[str, str] = {}
    at = 2
    while at + 2 <= len(context):
        number, size = context[at], context[at + 1]
        end = at + 2 + size
        if end > len(context):
            break
        name = names[number] if number < len(names) else ""
        if name and (name == LOCAL_ROOT or name in labels or len(labels) < MAX_LABELS):
            text = context[at + 2 : end].decode("utf-8", "replace")
            labels[name] = text[:MAX_LABEL_VALUE_CHARS]
        at = end
    if has_span:
        labels[TRACE_FLAGS] = f"{context[1]:02x}"
    return tuple(sorted(labels.items()))


def _decode_named(context: bytes, *, has_span: bool) -> LabelSet:
    """Decodes the labels of a goroutine, except the span's ids."""
    labels: dict[str, str] = {}
    for key, value in split_named(context[2:]):
        name = _check_name(key.decode("utf-8", "replace"))
        if not name or (has_span and key in {TRACE_LABEL, SPAN_LABEL}):
            continue
        if name == LOCAL_ROOT or name in labels or len(labels) < MAX_LABELS:
            labels[name] = value.decode("utf-8", "replace")[:MAX_LABEL_VALUE_CHARS]
    return tuple(sorted(labels.items()))


def name_root(link: SpanLink | None, labels: LabelSet) -> tuple[SpanLink | None, LabelSet]:
    """Adds the local root span's name to a link, using the attributes in a thread context.

    The name is the value of the local root attribute. If this attribute is missing, the name
    consists of the request's method and route. Returns the named link, and all attributes except
    the local root attribute.
    """
    named = dict(labels)
    root = named.pop(LOCAL_ROOT, "") or describe_request(named.get)[:MAX_LABEL_VALUE_CHARS]
    return link and link._replace(local_root=root or link.local_root), tuple(named.items())


class SearchTooLongError(Exception):
    """Raised if the search for a process's thread-local variable takes too long."""


_POINTER: Final = _Variable(VARIABLE)


def find_place(
    files: HostFiles, pid: int, memory: int, variable: _Variable = _POINTER
) -> ContextPlace | None:
    """Locates a process's thread-local ``variable``; None if it is absent, or not resolved yet.

    ``memory`` is a descriptor of ``/proc/PID/mem``. Raises ``OSError`` if the process has exited.
    """
    place = find_context_place(
        _limit_reads(memory),
        _list_objects(files, pid),
        _read_headers_address(files, pid),
        variable.name,
        platform.machine(),
    )
    return place and place._replace(kind=variable.kind, wrap_at=variable.wrap_at)


def _list_objects(files: HostFiles, pid: int) -> list[LoadedObject]:
    return find_objects(parse_mappings(read_maps(files, pid)))


def _read_headers_address(files: HostFiles, pid: int) -> int:
    return parse_headers_address(read_limited(files, f"/proc/{pid}/auxv", _MAX_AUXV_BYTES))


def _limit_reads(memory: int) -> Read:
    """Returns a time-limited memory reader."""
    search = SearchTime(_MAX_CPU_S, _MAX_BLOCKED_S)

    def read(address: int, size: int) -> bytes:
        if search.is_over():
            raise SearchTooLongError("searching the process is taking too long")
        if not 0 <= address < 1 << 63:
            raise OSError(f"{address:#x} is not a user-space address")
        data = os.pread(memory, size, address)
        if len(data) != size:
            raise OSError(f"read only {len(data)} of {size} bytes at {address:#x}")
        return data

    return read


class PublishedThreads:
    """Registers the processes that publish thread contexts.

    Thread-safe, except for concurrent calls for the same process. ``unread`` counts the Go programs
    whose labels cannot be located.
    """

    def __init__(
        self, files: HostFiles, reader: ThreadContexts, unread: UnreadContexts | None = None
    ) -> None:
        self._files = files
        self._reader = reader
        self._registered: dict[int, ProcessKey] = {}
        self._not_before: dict[ProcessKey, float] = {}
        self._names: OrderedDict[tuple[object, ...], KeyMap] = OrderedDict()
        self._failed = False
        self._unread = unread or UnreadContexts(files)
        self._goroutines: OrderedDict[ProcessKey, ContextPlace | None] = OrderedDict()

    def update(
        self, key: ProcessKey, stack_start: int, extra: Mapping[str, AttributeValue], memory: int
    ) -> None:
        """Register a process if it publishes thread contexts.

        Registered processes are searched again periodically, because libraries that define the
        thread context variable may be loaded or unloaded later. ``stack_start`` is from
        ``/proc/PID/stat``. ``memory`` is a descriptor of ``/proc/PID/mem``. Raises ``OSError`` if
        the process has exited.
        """
        if extra.get(SCHEMA) in {None, GO_SCHEMA} and key.start_time_ns is not None:
            self._update_goroutines(key, key.start_time_ns, stack_start, memory)
            return
        names, variable = read_key_map(extra), find_variable(extra)
        if names is None or variable is None or key.start_time_ns is None:
            self.release(key)
            return
        self._keep(key, names)
        if time.monotonic() < self._not_before.get(key, 0):
            return
        started, started_cpu = time.monotonic(), time.thread_time()
        try:
            place = find_place(self._files, key.tgid, memory, variable)
        except SearchTooLongError:  # the result of an earlier search remains valid
            place = None
        else:
            if place is None:
                self.release(key)
            else:
                self._register(key, key.start_time_ns, stack_start, place)
        if len(self._not_before) > _MAX_MAPS:
            self._not_before.clear()
        now = time.monotonic()
        cpu_s = time.thread_time() - started_cpu
        wait = max(cpu_s * _CPU_SHARE, (now - started) * _SHARE, _AGAIN_S if place else 0)
        self._not_before[key] = now + wait

    def _update_goroutines(
        self, key: ProcessKey, start_time_ns: int, stack_start: int, memory: int
    ) -> None:
        if key not in self._goroutines:
            self._goroutines[key] = self._find_goroutines(key.tgid, memory)
            if len(self._goroutines) > _MAX_SEARCHED:
                self._goroutines.popitem(last=False)
        place = self._goroutines[key]
        if place is None:
            self.release(key)
        else:
            self._register(key, start_time_ns, stack_start, place)

    def _find_goroutines(self, pid: int, memory: int) -> ContextPlace | None:
        try:
            headers_at = _read_headers_address(self._files, pid)
            return find_goroutines(
                _limit_reads(memory), headers_at, partial(_list_objects, self._files, pid)
            )
        except OSError:
            return None
        except (UnsupportedGoError, SearchTooLongError) as error:
            self._unread.count(pid, "goroutine labels", str(error))
            return None

    def _register(
        self, key: ProcessKey, start_time_ns: int, stack_start: int, place: ContextPlace
    ) -> None:
        try:
            self._reader.register(key.tgid, start_time_ns, stack_start, place)
        except OSError as error:
            if not self._failed:
                _log.warning("cannot read the thread contexts of process %d: %s", key.tgid, error)
            self._failed = True
            return
        if key.tgid not in self._registered:
            _log.debug("found the thread contexts of process %d: %s", key.tgid, place)
        self._registered[key.tgid] = key

    def _keep(self, key: ProcessKey, names: KeyMap) -> None:
        self._names[key[:_OWNER]] = names
        self._names.move_to_end(key[:_OWNER])
        if len(self._names) > _MAX_MAPS:
            self._names.popitem(last=False)

    def release(self, key: ProcessKey) -> None:
        """Stop reading the thread contexts of a process.

        Samples taken earlier can still be decoded.
        """
        if self._registered.get(key.tgid) == key:
            del self._registered[key.tgid]
            self._not_before.pop(key, None)
            self._reader.release(key.tgid)

    def decode(self, key: ProcessKey, context: bytes, *, has_span: bool) -> LabelSet:
        """Decodes a sample's attributes, using the latest names that its process published."""
        names = self._names.get(key[:_OWNER])
        if names is None:  # a process known only from wait totals, which lack exec_id
            names = self._names.get(ProcessKey(*key.process)[:_OWNER], ())
        return decode_context(context, names, has_span=has_span)
