"""Keeps tests that change settings of the host apart from those that depend on them."""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_settings(*, changes: bool) -> Iterator[None]:
    """Waits until no other test changes settings or, to change them, until none depends on them."""
    with Path(tempfile.gettempdir(), "otel-kprofiler-host-settings.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if changes else fcntl.LOCK_SH)
        yield
