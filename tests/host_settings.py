"""Prevents tests from changing host settings while other tests depend on them."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK, _GATE = (
    # The name includes the uid, because another user's file might not be writable.
    Path(tempfile.gettempdir(), f"otel-kprofiler-host-settings-{os.getuid()}.{name}").open("w")  # noqa: SIM115
    for name in ("lock", "gate")
)


@contextlib.contextmanager
def hold_settings(*, changes: bool) -> Iterator[None]:
    """Holds a lock on host settings: exclusive for a test that changes them, otherwise shared.

    While a test waits for the exclusive lock, no other test can acquire the lock.
    """
    fcntl.flock(_GATE, fcntl.LOCK_EX)
    fcntl.flock(_LOCK, fcntl.LOCK_EX if changes else fcntl.LOCK_SH)
    fcntl.flock(_GATE, fcntl.LOCK_UN)
    try:
        yield
    finally:
        fcntl.flock(_LOCK, fcntl.LOCK_UN)
