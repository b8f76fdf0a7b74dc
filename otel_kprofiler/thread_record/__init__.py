"""Loads the library that publishes the current span of each thread; its source is ``record.c``.

``build.sh`` compiles it, and the result is committed, like the eBPF objects.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["load"]


def load() -> ModuleType:
    """Load the library.

    Raises:
        ImportError: the library does not support this processor or interpreter.
    """
    from otel_kprofiler.thread_record import _record  # type: ignore[attr-defined]  # noqa: PLC0415

    module: ModuleType = _record
    return module
