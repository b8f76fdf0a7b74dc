"""Separates tests that change host settings from tests that depend on these settings."""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_settings(*, changes: bool) -> Iterator[None]:
    """Holds a lock on host settings: exclusive for a test that changes them, else shared."""
    with Path(tempfile.gettempdir(), "otel-kprofiler-host-settings.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if changes else fcntl.LOCK_SH)
        yield
