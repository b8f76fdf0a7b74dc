"""The directories that the harness reads and writes."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).absolute().parents[3]


def cache_dir() -> Path:
    """Returns the cache for downloads, builds and results: ``$OTEL_KPROFILER_CACHE``/kernels."""
    base = os.environ.get("OTEL_KPROFILER_CACHE") or "~/.cache/otel-kprofiler"
    return Path(base).expanduser().absolute() / "kernels"
