"""Interface for BPF program loaders."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.errors import HostError

_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals that, if blocked, kill the process without running their handlers (faulthandler)."""


def _identify(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


_OBJECTS: Final = {
    path: _identify(path) for path in Path(__file__).with_name("programs").glob("*.bpf.o")
}
"""The object files that this version of the package can use, as of its import."""


def check_object(path: Path) -> None:
    """Raise ``HostError`` if an object file has been replaced since this package was imported.

    The records of another version's programs may have another layout.
    """
    if path in _OBJECTS and _OBJECTS[path] != _identify(path):
        raise HostError(
            f"{path.name} was replaced after this process had started",
            hint="restart the process, and the process that forked it, if any: otel-kprofiler was "
            "upgraded",
        )


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    """Block signals in this thread in the ``with`` block, and permanently in threads started there.

    The verifier fails with ``EAGAIN`` if a signal is pending (do_check, kernel/bpf/verifier.c).
    Verification may take half a second, longer than some services' timer intervals.

    The kernel may deliver a signal to any thread. A service with signal handlers in C, such as
    uWSGI, relies on signals to interrupt its own threads, so our threads keep signals blocked.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


class ObjectSpec(NamedTuple):
    """A BPF object file, and the programs to load from it.

    Attributes:
        source: the C file, for loaders that compile it.
        object: the object file, for loaders that do not compile ``source``.
        programs: C functions to load. The running kernel need not support the file's other
            programs.
        map_entries: ``max_entries`` (bytes for a ring) by map, for maps without a fixed size.
        log_level: verifier log level (the log is written at INFO): 0 logs only rejections, 1
            also logs the state at each instruction, and 2 also logs all branches.
        constants: contents of read-only data sections, by name; only the libbpf loader sets these
            constants.
        maps_of: an object loaded from the same file, whose maps the new object shares;
            ``map_entries`` is ignored. Only the libbpf loader supports ``maps_of``.
    """

    source: Path
    object: Path
    programs: tuple[str, ...]
    map_entries: Mapping[str, int]
    log_level: int = 0
    constants: Mapping[str, bytes] = MappingProxyType({})
    maps_of: LoadedObject | None = None


class LoadedObject(Protocol):
    """Loaded BPF programs, which remain loaded until their descriptors and events are closed."""

    def program_fd(self, name: str) -> int:
        """Returns a program's descriptor, owned by this object. Raises ``KeyError`` if unknown."""

    def map_fd(self, name: str) -> int:
        """Returns a map's descriptor, owned by this object.

        Raises ``KeyError`` if there is no map with this name.
        """

    def close(self) -> None:
        """Close all descriptors; idempotent, and safe in a forked child."""


class Loader(Protocol):
    """Loads programs into the kernel."""

    name: str

    def load(self, spec: ObjectSpec) -> LoadedObject:
        """Load either all programs in ``spec`` or none.

        Raises:
            DependencyError: the loader's library is missing.
            OSError: the kernel denied permission (``EPERM``, ``EACCES``) or lacks a feature.
            HostError: the object file was replaced after this process had started.
            SamplerError: the verifier rejected a program. The error contains the verifier's log.
        """
