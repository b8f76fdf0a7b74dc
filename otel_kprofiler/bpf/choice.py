"""Chooses the library that loads BPF programs."""

from typing import Final

from otel_kprofiler.bpf.bcc import BccLoader
from otel_kprofiler.bpf.libbpf import LibbpfLoader
from otel_kprofiler.bpf.loader import Loader
from otel_kprofiler.errors import DependencyError

LOADERS: Final = ("auto", "libbpf", "bcc")
"""Names accepted by :func:`get_loader`."""


def get_loader(name: str = "auto") -> Loader:
    """Returns a loader by name; ``auto`` selects libbpf if it is installed, otherwise bcc.

    A loader requested by name is returned even if its library is missing; see :meth:`Loader.load`.
    Raises ``ValueError`` for unknown names, and ``DependencyError`` if ``auto`` finds no library.
    """
    if name not in LOADERS:
        raise ValueError(f"unknown loader {name!r}; use one of {', '.join(LOADERS)}")
    if name == "libbpf" or (name == "auto" and LibbpfLoader.is_installed()):
        return LibbpfLoader()
    if name == "bcc" or BccLoader.is_installed():
        return BccLoader()
    raise DependencyError(
        "no library for loading BPF programs is installed",
        hint="install one, as root: apt-get install libbpf1 (Fedora, openSUSE: libbpf); "
        "where only libbpf.so.0 is packaged: apt-get install python3-bpfcc",
    )
