"""Secrets in a configuration that every user of the host can read."""

from __future__ import annotations

import os
import stat

from otel_kprofiler.config.document import Path, dotted
from otel_kprofiler.config.load import LoadedConfig
from otel_kprofiler.config.otlp import ADDRESSES
from otel_kprofiler.redact import has_secrets


def find_exposure(loaded: LoadedConfig) -> str:
    """What to warn of, in one sentence; empty if there is nothing.

    What comes from the environment is not in the file.
    """
    written = [
        dotted(path)
        for path, mark in loaded.document.marks.items()
        if path[:1] == ("exporters",) and not mark.env and _is_secret(path, loaded.document.values)
    ]
    if not written or not _is_world_readable(loaded.document.path):
        return ""
    return (
        f"{loaded.document.path}: every user can read it, and it holds secrets"
        f" ({', '.join(sorted(written))}): take the right away (chmod o-r), or write ${{env:NAME}}"
    )


def _is_secret(path: Path, values: object) -> bool:
    for key in path:
        values = values[key] if isinstance(values, dict) else None
    if not isinstance(values, str) or not values:
        return False
    return path[2:3] == ("headers",) or (path[-1] in ADDRESSES and has_secrets(values))


def _is_world_readable(path: str) -> bool:
    try:
        if not os.stat(path).st_mode & stat.S_IROTH:
            return False
        place = os.path.dirname(os.path.realpath(path))
        while place != os.path.dirname(place):
            if not os.stat(place).st_mode & stat.S_IXOTH:
                return False
            place = os.path.dirname(place)
    except OSError:  # it was read a moment ago, and is gone
        return False
    return True
