"""Where the sampler finds the current span of a thread in the interpreter's own objects."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from otel_kprofiler.bpf.map_calls import update_map

MAX_SPAN_CLASSES: Final = 4
VALUES_BY_POINTER: Final = 0
VALUES_TAGGED: Final = 1
VALUES_INLINE: Final = 2


class SpanClass(NamedTuple):
    """A class of spans (``struct span_class``).

    Attributes:
        type: address of the class.
        place: of the span context among the attributes that its instances share.
        keys: address of the table of these attributes (``ht_cached_keys``).
    """

    type: int
    place: int
    keys: int


class SpanPath(NamedTuple):
    """The way from a thread to its current span (``struct span_path``).

    Types and keys are identified by address. Offsets are in bytes.

    Attributes:
        tgid: this process, in the pid namespace of the samples' ids.
        oldest_thread: address of the thread state at the end of the interpreter's list.
        tid_at: offset of the thread id in a thread state.
        context_at: offset of the current context, likewise.
        context_type: ``contextvars.Context``.
        hamt_type: type of a context's mapping, of which the next three are the nodes.
        bitmap_type: with up to 16 entries.
        array_type: with more.
        collision_type: of keys whose hashes are equal.
        variable: OpenTelemetry's context variable.
        variable_hash: its hash in a HAMT, 32 bits.
        otel_context_type: OpenTelemetry's ``Context``, a dictionary.
        span_key: key of the current span in it.
        span_key_hash: its hash, 64 bits.
        labels_key: key of the number of the labels there.
        labels_key_hash: its hash.
        dict_type: ``dict``.
        attribute: name of the span context in spans.
        attribute_hash: its hash.
        values_style: where instances keep their attributes, one of ``VALUES_…``.
        classes: known classes of spans, up to :data:`MAX_SPAN_CLASSES`.
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
    """The struct as the program reads it.

    Raises:
        ValueError: there are too many classes.
    """
    if len(path.classes) > MAX_SPAN_CLASSES:
        raise ValueError(f"more than {MAX_SPAN_CLASSES} classes of spans")
    words = [word for span_class in path.classes for word in span_class]
    words += [0] * (len(SpanClass._fields) * MAX_SPAN_CLASSES - len(words))
    return _PATH.pack(*path[:_SCALARS], *words)


def set_span_path(map_fd: int, path: SpanPath) -> None:
    """Let the program follow this path instead of the slots of threads.

    Raises:
        OSError: the kernel refused.
    """
    update_map(map_fd, _FIRST, pack_span_path(path))
