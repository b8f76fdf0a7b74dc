"""Where tests keep what they fetched and built: outside the checkout."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$OTEL_KPROFILER_CACHE``, or ``~/.cache/otel-kprofiler``."""
    named = os.environ.get("OTEL_KPROFILER_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "otel-kprofiler"
