"""Calls bpf(2) to create and change maps."""

import ctypes
import mmap
from typing import Final, NamedTuple

from otel_kprofiler.bpf.call import bpf_call

PAGE_BYTES: Final = 4096
"""Size of an inner map's elements, independent of the machine's page size."""

# include/uapi/linux/bpf.h
_MAP_CREATE: Final = 0
_MAP_UPDATE_ELEM: Final = 2
_MAP_DELETE_ELEM: Final = 3
_MAP_UPDATE_BATCH: Final = 26
_MAP_TYPE_ARRAY: Final = 2
MMAPABLE: Final = 1 << 10
_INNER_MAP: Final = 1 << 12
"""Flag that allows inner maps of different lengths (since Linux 5.10)."""


class MapShape(NamedTuple):
    """The type, element sizes and flags of a map."""

    kind: int  # enum bpf_map_type
    key_bytes: int
    value_bytes: int
    flags: int = 0


class _CreateAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_MAP_CREATE, up to ``map_name``."""

    _fields_ = (
        ("map_type", ctypes.c_uint32),
        ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("numa_node", ctypes.c_uint32),
        ("map_name", ctypes.c_char * 16),
    )


def create_map(name: str, shape: MapShape, entries: int) -> int:
    """Create a map with ``max_entries`` set to ``entries``; the caller closes the descriptor.

    The name may consist of at most 15 letters, digits, dots and underscores. Raises ``OSError``,
    for example with ``EPERM`` (a capability is missing) or ``ENOMEM``.
    """
    kind, key_bytes, value_bytes, flags = shape
    attributes = _CreateAttributes(
        kind, key_bytes, value_bytes, entries, flags, 0, 0, name.encode("ascii")
    )
    return bpf_call(_MAP_CREATE, attributes)


def create_inner_map(pages: int, name: str) -> int:
    """Create a mappable array of ``pages`` elements, as an element of an array of maps.

    See :func:`create_map` for errors.
    """
    return create_map(name, MapShape(_MAP_TYPE_ARRAY, 4, PAGE_BYTES, MMAPABLE | _INNER_MAP), pages)


def update_map(fd: int, key: bytes, value: bytes) -> None:
    """Set an element in a map. Raises ``OSError`` (``E2BIG`` if a hash map is full)."""
    _bpf_on_element(_MAP_UPDATE_ELEM, fd, key, value)


def delete_from_map(fd: int, key: bytes) -> None:
    """Delete a hash map element. Raises ``OSError`` (``ENOENT`` if there is no such key)."""
    _bpf_on_element(_MAP_DELETE_ELEM, fd, key, None)


class _BatchAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_MAP_*_BATCH."""

    _fields_ = (
        ("in_batch", ctypes.c_uint64),
        ("out_batch", ctypes.c_uint64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("map_fd", ctypes.c_uint32),
        ("elem_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


def write_pages(fd: int, content: mmap.mmap) -> None:
    """Set all elements of an inner map to the pages of ``content``. Raises ``OSError``.

    Uses a single system call. Unlike mmap(2), requires no additional descriptor, which a forked
    child would inherit.
    """
    pages = len(content) // PAGE_BYTES
    keys = (ctypes.c_uint32 * pages)(*range(pages))
    values = ctypes.c_char.from_buffer(content)
    addresses = ctypes.addressof(keys), ctypes.addressof(values)
    bpf_call(_MAP_UPDATE_BATCH, _BatchAttributes(0, 0, *addresses, pages, fd, 0, 0))


class _ElementAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_MAP_*_ELEM."""

    _fields_ = (
        ("map_fd", ctypes.c_uint32),
        ("key", ctypes.c_char_p),
        ("value", ctypes.c_char_p),
        ("flags", ctypes.c_uint64),
    )


def _bpf_on_element(command: int, fd: int, key: bytes, value: bytes | None) -> None:
    bpf_call(command, _ElementAttributes(fd, key, value, 0))
