"""Collects versions for bug reports: program, eBPF loader, Python and kernel."""

import os
import platform
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from typing import Final

from otel_kprofiler.bpf import BccLoader, LibbpfLoader
from otel_kprofiler.version import __version__

_COMPILED: Final = "otel_kprofiler.otlp.wire"
"""One of the modules that ``hatch_build.py`` compiles."""


def describe_versions() -> str:
    """Returns the versions of the program, eBPF loader, Python and kernel on one line."""
    version = LibbpfLoader.find_version()
    loader = f"libbpf {version}" if version else "bcc" if BccLoader.is_installed() else "no loader"
    python = f"{platform.python_implementation()} {platform.python_version()}"
    python += ", compiled modules" if has_compiled_modules() else ""
    system = os.uname()
    return (
        f"otel-kprofiler {__version__} ({loader}, {python},"
        f" Linux {system.release} {system.machine})"
    )


def has_compiled_modules() -> bool:
    """Returns whether mypyc compiled the modules that run for each sample."""
    spec = find_spec(_COMPILED)
    return spec is not None and isinstance(spec.loader, ExtensionFileLoader)
