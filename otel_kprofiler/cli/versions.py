"""Collects versions for bug reports: program, eBPF loader, Python and kernel."""

import os
import platform

from otel_kprofiler.bpf import BccLoader, LibbpfLoader
from otel_kprofiler.version import __version__


def describe_versions() -> str:
    """Returns the versions of the program, eBPF loader, Python and kernel on one line."""
    version = LibbpfLoader.find_version()
    loader = f"libbpf {version}" if version else "bcc" if BccLoader.is_installed() else "no loader"
    python = f"{platform.python_implementation()} {platform.python_version()}"
    system = os.uname()
    return (
        f"otel-kprofiler {__version__} ({loader}, {python},"
        f" Linux {system.release} {system.machine})"
    )
