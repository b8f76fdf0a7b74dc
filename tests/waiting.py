"""Waits in tests, for as long as a busy machine may need."""

import time


def wait_until(condition, seconds=60):
    """Waits until a condition holds. Fails the test if it does not hold within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
