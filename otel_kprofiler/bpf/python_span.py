"""Locates a thread's current span in the interpreter's objects, for the sampler."""

import struct
from typing import Final, NamedTuple

from otel_kprofiler.bpf.map_calls import update_map

MAX_SPAN_CLASSES: Final = 4
VALUES_BY_POINTER: Final = 0
VALUES_TAGGED: Final = 1
VALUES_INLINE: Final = 2


class SpanClass(NamedTuple):
    """A class whose instances are spans (``struct span_class``).

    Attributes:
        type: address of the class object.
        place: index of the span-context attribute in the class's shared keys.
        keys: address of the class's shared keys (``ht_cached_keys``).
    """

    type: int
    place: int
    keys: int


class SpanPath(NamedTuple):
    """The path from a thread state to the thread's current span (``struct span_path``).

    Types, keys and names are addresses of Python objects. Offsets are in bytes.

    Attributes:
        tgid: id of this process, in the pid namespace that samples use.
        oldest_thread: address of the last thread state in the interpreter's list.
        tid_at: offset of the thread id in a thread state.
        context_at: offset of the current context in a thread state.
        context_type: type of the current context, ``contextvars.Context``.
        hamt_type: type of a context's mapping, which is a HAMT.
        bitmap_type: type of HAMT nodes with up to 16 entries.
        array_type: type of HAMT nodes with more than 16 entries.
        collision_type: type of HAMT nodes for keys with equal hashes.
        variable: context variable that holds OpenTelemetry's ``Context``.
        variable_hash: 32-bit hash of ``variable``, as used in a HAMT.
        otel_context_type: OpenTelemetry's ``Context`` class, a subclass of ``dict``.
        span_key: key for the current span in OpenTelemetry's ``Context``.
        span_key_hash: 64-bit hash of ``span_key``.
        labels_key: key under which OpenTelemetry's ``Context`` stores the number of the current
            label set.
        attribute: name of the Python attribute that holds a span's span context.
        values_style: where instance attributes are stored, one of ``VALUES_…``.
        classes: span classes encountered so far, up to :data:`MAX_SPAN_CLASSES`.
    """

    tgid: int
    oldest_thread: int
    tid_at: int
    context_at: int
    context_type: int
    hamt_type: int
    bitmap_type: int
    array_type: int
    collision_type: int
    variable: int
    variable_hash: int
    otel_context_type: int
    span_key: int
    span_key_hash: int
    labels_key: int
    labels_key_hash: int
    dict_type: int
    attribute: int
    attribute_hash: int
    values_style: int
    classes: tuple[SpanClass, ...]


_SCALARS: Final = len(SpanPath._fields) - 1
_PATH: Final = struct.Struct(f"={_SCALARS + len(SpanClass._fields) * MAX_SPAN_CLASSES}Q")
_FIRST: Final = bytes(4)


def pack_span_path(path: SpanPath) -> bytes:
    """Packs a path as a ``struct span_path``.

    Raises ``ValueError`` if there are too many classes.
    """
    if len(path.classes) > MAX_SPAN_CLASSES:
        raise ValueError(f"there are more than {MAX_SPAN_CLASSES} span classes")
    words = [word for span_class in path.classes for word in span_class]
    words += [0] * (len(SpanClass._fields) * MAX_SPAN_CLASSES - len(words))
    return _PATH.pack(*path[:_SCALARS], *words)


def set_span_path(map_fd: int, path: SpanPath) -> None:
    """Make the BPF program find spans via ``path``, not via thread slots. Raises ``OSError``."""
    update_map(map_fd, _FIRST, pack_span_path(path))
