"""Creates inner maps: mapped arrays that an array of maps holds."""

from __future__ import annotations

import ctypes
from typing import Final

from otel_kprofiler.bpf.call import bpf_call

PAGE_BYTES: Final = 4096
"""Size of an element, whatever the size of this machine's pages is."""

# include/uapi/linux/bpf.h
_MAP_CREATE: Final = 0
_MAP_TYPE_ARRAY: Final = 2
_MMAPABLE: Final = 1 << 10
_INNER_MAP: Final = 1 << 12
"""Lets maps of any length be put in the place of one of another length (since 5.10)."""


class _CreateAttributes(ctypes.Structure):
    """``union bpf_attr`` for BPF_MAP_CREATE, up to the map's name."""

    _fields_ = (
        ("map_type", ctypes.c_uint32),
        ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("numa_node", ctypes.c_uint32),
        ("name", ctypes.c_char * 16),
    )


def create_inner_map(pages: int, name: str) -> int:
    """Create an array of pages that can be mapped with mmap(2).

    Args:
        pages: number of elements of 4096 bytes.
        name: shown by bpftool; at most 15 letters, digits, dots and underscores.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: no right (``EPERM``) or no memory (``ENOMEM``).
    """
    flags = _MMAPABLE | _INNER_MAP
    attributes = _CreateAttributes(
        _MAP_TYPE_ARRAY, 4, PAGE_BYTES, pages, flags, 0, 0, name.encode("ascii")
    )
    return bpf_call(_MAP_CREATE, attributes)
