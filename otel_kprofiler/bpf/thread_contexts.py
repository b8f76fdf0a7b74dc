"""Registers processes that publish thread contexts (OTEP 4947), and parses the contexts."""

import enum
import platform
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from otel_kprofiler.bpf.btf import KernelTypes
from otel_kprofiler.bpf.map_calls import delete_from_map, update_map
from otel_kprofiler.forks import LockedForForks, ProcessLock
from otel_kprofiler.model import SpanLink

MAX_CONTEXT_PROCESSES: Final = 4096
_SLOTS: Final = 32768
SLOT_WORDS: Final = _SLOTS // 64
_PLACE: Final = struct.Struct("=14Q")  # struct context_place
PLACE_BYTES: Final = _PLACE.size
# struct context_head, as specified: trace id, span id, valid, flags, size
_HEAD: Final = struct.Struct("=16s8sBBH")
IS_GO: Final = 2
"""Value of ``valid`` if the attributes are labels, which have names instead of key indices."""
_NO_TRACE: Final = bytes(16)
_NO_SPAN: Final = bytes(8)
_WORD: Final = (1 << 64) - 1
TRACE_LABEL: Final = b"trace_id"
SPAN_LABEL: Final = b"span_id"
"""Names of the labels that hold a goroutine's trace id and span id, in lower-case hexadecimal
digits (OpenTelemetry's "Trace Context in non-OTLP Log Formats")."""
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16
_HEX: Final = frozenset(b"0123456789abcdef")


class ContextKind(enum.IntEnum):
    """Type of the variable from which a thread's context is found (``enum context_kind``)."""

    POINTER = 0
    """``otel_thread_ctx_v1``: a pointer to the record."""
    IN_V8 = 1
    """``otel_thread_ctx_nodejs_v1``: a struct. A V8 internal field points to the record."""
    WRAPPED_IN_V8 = 2
    """Like ``IN_V8``, but the internal field points to an object that points to the record."""
    GO_LABELS = 3
    """Go's variable ``g``, with labels as a slice (since Go 1.24)."""
    GO_LABEL_MAP = 4
    """Go's variable ``g``, with labels as a map (before Go 1.24)."""


class GoOffsets(NamedTuple):
    """Offsets in bytes of ``g.m``, ``m.curg`` and ``g.labels`` in Go's runtime."""

    m: int
    curg: int
    labels: int


class ContextPlace(NamedTuple):
    """Location of the variable that leads to a thread's context (``struct context_place``).

    Attributes:
        offset: offset in bytes from the thread pointer, or in the module's TLS block.
        module: module id in the dynamic thread vector (DTV); 0 if ``offset`` is relative to the
            thread pointer.
        generation: lowest generation at which a DTV contains the module; 0 disables the check.
        stride: size of a DTV entry, in bytes.
        length_at: byte offset of the DTV's length from the DTV's address.
        vector_at: byte offset of the DTV pointer from the thread pointer.
        wrap_at: byte offset of the record pointer in the wrapping object, for ``WRAPPED_IN_V8``.
        go: struct offsets in Go's runtime, for ``GO_LABELS`` and ``GO_LABEL_MAP``.
    """

    offset: int
    module: int = 0
    generation: int = 0
    stride: int = 0
    length_at: int = 0
    vector_at: int = 0
    kind: ContextKind = ContextKind.POINTER
    wrap_at: int = 0
    go: GoOffsets = GoOffsets(0, 0, 0)


def find_thread_pointer(types: KernelTypes) -> int | None:
    """Returns the offset of the user thread pointer in ``task_struct``; None if not found."""
    if platform.machine() == "aarch64":
        return types.offset("task_struct", "thread", "uw", "tp_value")
    return types.offset("task_struct", "thread", "fsbase")


def parse_thread_context(record: bytes) -> tuple[SpanLink | None, bytes]:
    """Parses the span, flags and attributes of a thread context.

    Returns the span, if any, and the attributes with a two-byte prefix: ``valid`` and the trace
    flags. If ``valid`` is :data:`IS_GO`, the attributes include their names (:func:`split_named`).
    Raises ``ValueError`` if the record is too short.
    """
    if len(record) < _HEAD.size:
        raise ValueError(f"a thread context has an invalid size of {len(record)} bytes")
    trace_id, span_id, valid, flags, _ = _HEAD.unpack_from(record)
    attributes = record[_HEAD.size :]
    if valid == IS_GO:
        trace_id, span_id = _parse_ids(dict(split_named(attributes)))
    link = None
    if trace_id != _NO_TRACE and span_id != _NO_SPAN:
        link = SpanLink(trace_id, span_id)
    return link, bytes((valid, flags)) + attributes


def split_named(attributes: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the names and values of labels, up to the first truncated label.

    A label consists of two one-byte lengths, a name and a value.
    """
    at = 0
    while at + 2 <= len(attributes):
        value = at + 2 + attributes[at]
        end = value + attributes[at + 1]
        if end > len(attributes):
            return
        yield attributes[at + 2 : value], attributes[value:end]
        at = end


def _parse_ids(labels: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """Returns the trace id and span id in labels; both zeros unless both labels are valid."""
    trace, span = labels.get(TRACE_LABEL, b""), labels.get(SPAN_LABEL, b"")
    if (
        len(trace) != _TRACE_DIGITS
        or len(span) != _SPAN_DIGITS
        or not _HEX.issuperset(trace + span)
    ):
        return _NO_TRACE, _NO_SPAN
    return bytes.fromhex(trace.decode()), bytes.fromhex(span.decode())


class ThreadContexts(LockedForForks):
    """The map of processes whose thread contexts are read. Thread-safe.

    Args:
        map_fd: descriptor of the map, closed by the caller; None if no process can be registered.
        slots_fd: descriptor of the bit map indexed by process ids' low bits; closed by the caller.
    """

    def __init__(self, map_fd: int | None, slots_fd: int = -1) -> None:
        self._map_fd = map_fd
        self._slots_fd = slots_fd
        self._registered: dict[int, None] = {}  # oldest first
        self._lock = ProcessLock()

    def register(
        self, tgid: int, start_time_ns: int, stack_start: int, place: ContextPlace
    ) -> None:
        """Start reading a process's thread contexts. Raises ``OSError``.

        The registration no longer applies once the id is reused or the process executes another
        program. If too many processes are registered, the oldest registration is released. The
        process id, start time and stack start (0 if missing) must equal the values in samples.
        """
        with self._lock:
            if self._map_fd is None:
                return
            self._registered.pop(tgid, None)
            while len(self._registered) >= MAX_CONTEXT_PROCESSES:
                self._delete(next(iter(self._registered)))
            value = _PLACE.pack(
                start_time_ns,
                stack_start,
                place.offset & _WORD,
                place.module,
                place.generation,
                place.length_at & _WORD,
                -place.length_at & _WORD,
                place.module * place.stride - place.length_at,
                place.kind,
                place.wrap_at,
                place.vector_at & _WORD,
                *place.go,
            )
            update_map(self._map_fd, tgid.to_bytes(4, "little"), value)
            self._registered[tgid] = None
            self._mark(tgid)

    def release(self, tgid: int) -> bool:
        """Stop reading a process's thread contexts, and return whether it was registered."""
        with self._lock:
            if tgid not in self._registered:
                return False
            self._delete(tgid)
            return True

    def _delete(self, tgid: int) -> None:
        del self._registered[tgid]
        if self._map_fd is not None:
            delete_from_map(self._map_fd, tgid.to_bytes(4, "little"))
            self._mark(tgid)

    def _mark(self, tgid: int) -> None:
        """Update the slot-map word that contains a process's bit."""
        word = tgid % _SLOTS // 64
        bits = sum({1 << key % 64 for key in self._registered if key % _SLOTS // 64 == word})
        update_map(self._slots_fd, word.to_bytes(4, "little"), bits.to_bytes(8, "little"))

    def close(self) -> None:
        """Reject further processes. Idempotent."""
        with self._lock:
            self._map_fd = None
