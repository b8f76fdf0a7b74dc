"""The library that publishes the current span of each thread; ``record.c`` has its source.

``build.sh`` compiles it, and the result is committed, as the eBPF objects are.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["load"]


def load() -> ModuleType:
    """Load the library.

    Raises:
        ImportError: it is not for this processor or interpreter.
    """
    from otel_kprofiler.thread_record import _record  # type: ignore[attr-defined]  # noqa: PLC0415

    module: ModuleType = _record
    return module
