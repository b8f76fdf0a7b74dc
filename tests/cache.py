"""The directory, outside the checkout, where tests cache downloads and builds."""

import os
from pathlib import Path


def cache_directory() -> Path:
    named = os.environ.get("OTEL_KPROFILER_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "otel-kprofiler"
