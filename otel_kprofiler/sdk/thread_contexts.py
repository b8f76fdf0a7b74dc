"""Publishes thread contexts (OTEP 4947): for each thread, a record of its current span.

A C library writes the records. The library is called when OpenTelemetry's context variable
changes (``ContextVar.set``, ``ContextVar.reset``), when a thread enters or leaves a
``contextvars.Context``, and after greenlet switches (by greenlet's trace function).

From CPython 3.14 on, a context watcher in the interpreter reports when a context is entered or
left. In CPython versions before 3.14, the library replaces ``Context.run``, which event loops and
executors call. If C code enters a context directly, the library notices only if a shared library
imports ``PyContext_Enter`` (``imports.c``). If the calling code is linked into the interpreter,
spans attached in a directly entered context are not published.
"""

import asyncio
import contextvars
import gc
import logging
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.trace import NonRecordingSpan
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler.errors import HostError
from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.model import Attributes, LabelSet
from otel_kprofiler.otlp import LOCAL_ROOT
from otel_kprofiler.processes import KEY_MAP, SCHEMA
from otel_kprofiler.sdk.label_sets import KEY, process_labels
from otel_kprofiler.sdk.local_roots import process_roots, watch_provider
from otel_kprofiler.sdk.object_layout import find_context_offset, find_entered_offset
from otel_kprofiler.sdk.process_context import publish_thread_keys
from otel_kprofiler.sdk.refusals import refuse_subinterpreters
from otel_kprofiler.sdk.resource import find_resource, plain_attributes
from otel_kprofiler.thread_record import load

_VERSION: Final = "tlsdesc_v1_dev"
_MAX_NAMES: Final = 256
_MAX_ENDPOINTS: Final = 1024
"""Maximum number of encoded endpoint names kept. A service may have more endpoints if their names
contain ids."""
_MAX_VALUE_BYTES: Final = 255
_MAX_BYTES: Final = 612  # MAX_ATTRIBUTES in record.c

_log = logging.getLogger(__name__)


class _Attributes:
    """Encodes label sets, and assigns a number to each label name. Not thread-safe."""

    def __init__(self, announce: Callable[[tuple[str, ...]], None]) -> None:
        self._announce = announce
        self._numbers: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the label names in order of their numbers; a name's number never changes."""
        return tuple(self._numbers)

    def encode(self, labels: LabelSet) -> bytes:
        """Returns labels as a record's attributes, omitting labels beyond the limits."""
        encoded = bytearray()
        count = len(self._numbers)
        for name, value in labels:
            if name not in self._numbers and len(self._numbers) == _MAX_NAMES:
                continue
            data = value.encode(errors="replace")[:_MAX_VALUE_BYTES]
            data = data.decode(errors="ignore").encode()  # drops a truncated last character
            if len(encoded) + 2 + len(data) <= _MAX_BYTES:
                number = self._numbers.setdefault(name, len(self._numbers))
                encoded += bytes((number, len(data))) + data
        if len(self._numbers) > count:
            self._announce(self.names)
        return bytes(encoded)


class _Writer:
    """Writes this process's thread contexts, unless ``problem`` prevents writing. Thread-safe."""

    def __init__(self) -> None:
        self.problem = ""
        self._lock = ProcessLock()
        self._library: Any = None
        self._attributes = _Attributes(self._announce)
        self._encoded: dict[int, bytes] = {}
        self._of_spans: dict[int, bytes] = {}
        self._endpoints: dict[str, bytes] = {}
        self._published = False

    def start(self, resource: Attributes | None, *, endpoints: bool) -> None:
        with self._lock:
            if self._library is None:
                self._install()
            if endpoints:
                watch_provider()
                process_roots.follow(self._encode_endpoint, self._of_spans)
            if resource is None:
                service = find_resource()
                resource = plain_attributes(service.attributes) if service else {}
            publish_thread_keys(_keys(self._attributes.names), resource)
            self._published = True
            self.problem = ""

    def write(self) -> None:
        with self._lock:
            if self._library is None:
                self._install()

    def stop(self) -> None:
        with self._lock:
            if self._published:
                publish_thread_keys(None)
            self._published = False

    def count_failures(self) -> int:
        return int(self._library.count_failures()) if self._library else 0

    def as_dict(self) -> dict[str, object]:
        return {
            "published": self._published,
            "problem": self.problem,
            "failures": self.count_failures(),
        }

    def _install(self) -> None:
        refuse_subinterpreters()
        runtime = otel_context._RUNTIME_CONTEXT  # noqa: SLF001
        variable = getattr(runtime, "_current_context", None)
        if not isinstance(variable, contextvars.ContextVar):
            raise HostError(
                f"cannot publish the current span of each thread: the runtime context "
                f"{type(runtime).__name__} is not OpenTelemetry's default",
                hint="unset OTEL_PYTHON_CONTEXT",
            )
        has_watcher = sys.version_info >= (3, 14)
        offsets = (0, 0) if has_watcher else (find_context_offset(), find_entered_offset())
        if None in offsets:
            raise HostError(
                "cannot publish the current span of each thread: this interpreter is not CPython"
            )
        try:
            library = load()
        except ImportError as error:
            raise HostError(
                "cannot publish the current span of each thread: no library for "
                f"{platform.machine()} and {platform.python_implementation()} "
                f"{platform.python_version()} ({error})",
                hint="run CPython 3.11 or later with the GIL, on x86-64 or arm64",
            ) from error
        classes = frozenset({NonRecordingSpan, getattr(sdk_trace, "_Span", NonRecordingSpan)})
        try:
            library.install(
                variable, _SPAN_KEY, KEY, self._encoded, self._of_spans, classes,
                _is_outside_of_loops(), *offsets, sys.modules,
                _methods(contextvars.ContextVar), _methods(contextvars.Context),
            )  # fmt: skip
        except (LookupError, RuntimeError) as error:
            raise HostError(
                f"cannot publish the current span of each thread: {error}",
                hint="run CPython 3.11 to 3.14, with at most seven other context watchers",
            ) from error
        self._library = library
        process_labels.follow(self._encode, self._encoded)

    def _encode(self, labels: LabelSet) -> bytes:
        with self._lock:
            return self._attributes.encode(labels)

    def _encode_endpoint(self, name: str) -> bytes:
        encoded = self._endpoints.get(name)
        if encoded is None:
            if len(self._endpoints) >= _MAX_ENDPOINTS:
                self._endpoints.clear()
            encoded = self._endpoints[name] = self._encode(((LOCAL_ROOT, name),))
        return encoded

    def _announce(self, names: tuple[str, ...]) -> None:
        if self._published:
            publish_thread_keys(_keys(names))


def _keys(names: tuple[str, ...]) -> Attributes:
    return {SCHEMA: _VERSION, KEY_MAP: names}


def _methods(kind: type) -> dict[str, Any]:
    """Returns the dictionary that backs a type's read-only ``__dict__``."""
    (methods,) = gc.get_referents(kind.__dict__)
    if not isinstance(methods, dict):
        raise HostError(
            "cannot publish the current span of each thread: this interpreter is not CPython"
        )
    return methods


def _is_outside_of_loops() -> bool:
    """Returns whether this thread is not running an event loop, which enters a context per task."""
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 - returns None outside of loops
        return False
    trio: Any = sys.modules.get("trio")
    if trio is None:
        return True
    try:
        trio.lowlevel.current_trio_token()
    except RuntimeError:
        return True
    return False


_writer: Final = _Writer()


def start_thread_contexts(resource: Mapping[str, Any] | None = None) -> None:
    """Publish the current span of each thread, without privileges. Thread-safe.

    A process context is published as well, unless this process already has one. A record contains
    the trace id, the span id, the trace flags, the labels (:func:`otel_kprofiler.labels`) and the
    name of the local root (:class:`otel_kprofiler.sdk.LocalRootSpanProcessor`, which is added to
    the global TracerProvider). The attributes in a record occupy at most 612 bytes. For a thread
    that is already in a span, publishing starts when its current span next changes. Forked children
    publish their own records and process context.

    Args:
        resource: attributes for a new process context; by default, those of the service's Resource.

    Raises:
        HostError: this interpreter or processor is not supported, no context watcher is free
            (CPython 3.14 has eight), OpenTelemetry's runtime context has been replaced, or the
            process context cannot be published.
    """
    _writer.start(resource, endpoints=True)


def publish_threads(*, endpoints: bool) -> None:
    """Publish thread contexts (with root names if ``endpoints``), and log failures. Thread-safe."""
    try:
        _writer.start(None, endpoints=endpoints)
    except HostError as error:
        if _writer.problem != error.message:
            _log.info("%s", error.with_fix())
        _writer.problem = error.message


def write_records() -> str:
    """Write thread contexts without announcing them; return the reason for a failure, or "".

    Thread-safe.
    """
    try:
        _writer.write()
    except HostError as error:
        return error.with_fix()
    return ""


def describe_threads() -> dict[str, object]:
    """Returns ``published``, ``problem`` and ``failures`` (failed span reads). Thread-safe."""
    return _writer.as_dict()


def stop_thread_contexts() -> None:
    """Withdraw the announcement of thread contexts, so that readers ignore them. Thread-safe.

    The hooks remain installed, so that the records are correct if they are announced again later.
    """
    _writer.stop()
