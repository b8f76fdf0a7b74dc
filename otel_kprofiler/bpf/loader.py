"""What a loader of BPF programs is, and the bpf(2) calls on the maps of a loaded program."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.bpf.call import bpf_call

# enum bpf_cmd, include/uapi/linux/bpf.h
_MAP_UPDATE_ELEM: Final = 2
_MAP_DELETE_ELEM: Final = 3


class ObjectSpec(NamedTuple):
    """An object and those of its programs to load.

    Attributes:
        source: the C file, for loaders that compile.
        object: the compiled file, for loaders that do not.
        programs: the C functions to load. The rest of the object is left out, so that it may
            have programs that this kernel does not know.
        map_entries: ``max_entries`` by map, decided at run time (bytes for a ring).
        log_level: what the verifier logs: 0 nothing unless it rejects a program, 1 each
            instruction's state, 2 all branches. Loaders write it to the log at level INFO.
    """

    source: Path
    object: Path
    programs: tuple[str, ...]
    map_entries: Mapping[str, int]
    log_level: int = 0


class LoadedObject(Protocol):
    """Programs in the kernel; each is gone when it and every event that runs it are closed."""

    def program_fd(self, name: str) -> int:
        """Descriptor of a program, owned by this object. Raises ``KeyError`` if not loaded."""

    def map_fd(self, name: str) -> int:
        """Descriptor of a map, owned by this object. Raises ``KeyError``."""

    def close(self) -> None:
        """Close every descriptor; may be called again, and in a forked child."""


class Loader(Protocol):
    """Puts programs into the kernel."""

    name: str

    def load(self, spec: ObjectSpec) -> LoadedObject:
        """Load all programs of ``spec``, or none.

        Raises:
            DependencyError: the loader's library is missing.
            OSError: the kernel refused (``EPERM``, ``EACCES``) or has no such feature.
            SamplerError: a program was rejected; carries the verifier's log.
        """


def update_map(fd: int, key: bytes, value: bytes) -> None:
    """Set one element of a map. Raises ``OSError`` (``E2BIG`` when a hash is full)."""
    _bpf_on_element(_MAP_UPDATE_ELEM, fd, key, value)


def delete_from_map(fd: int, key: bytes) -> None:
    """Remove one element of a hash; raises ``OSError`` with ``ENOENT`` if it is not there."""
    _bpf_on_element(_MAP_DELETE_ELEM, fd, key, None)


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
