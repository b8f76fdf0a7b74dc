"""Loads the library that publishes the current span of each thread (source: ``record.c``).

``build_libraries.sh`` compiles the library for each architecture. The binaries are committed, like
the eBPF objects.
"""

import importlib
import platform
from types import ModuleType


def load() -> ModuleType:
    """Load the library; raises ``ImportError`` on an unsupported processor or interpreter."""
    return importlib.import_module(f"{__name__}._record_{platform.machine()}")
