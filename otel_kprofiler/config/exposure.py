"""Finds secrets in configuration files that every user can read."""

import os
import stat

from otel_kprofiler.config.document import Path
from otel_kprofiler.config.load import LoadedConfig
from otel_kprofiler.config.otlp import ADDRESSES
from otel_kprofiler.redact import has_secrets


def find_exposure(loaded: LoadedConfig) -> str:
    """Returns a warning if a file that every user can read contains secrets; empty otherwise.

    Ignores values from environment variables, because the file does not contain them.
    """
    written = [
        loaded.document.name(path)
        for path, mark in loaded.document.marks.items()
        if path[:1] == ("exporters",) and not mark.env and _is_secret(path, loaded.document.values)
    ]
    if not written or not _is_world_readable(loaded.document.path):
        return ""
    return (
        f"{loaded.document.path} holds secrets ({', '.join(sorted(written))}) and every user can"
        " read it: restrict its mode (chmod o-r), or use ${env:NAME}"
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
    except OSError:  # the file was removed after it was read
        return False
    return True
