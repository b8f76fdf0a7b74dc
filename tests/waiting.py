"""Helpers that wait in tests, with time limits for busy machines."""

import time
from concurrent import futures


def wait_until(condition, seconds=60, say=str):
    """Waits until a condition holds, and returns its value.

    If the condition does not hold within ``seconds``, the test fails with the message from ``say``.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        ended = time.monotonic()
        assert ended < deadline, say()
        time.sleep(min(max(0.01, ended - began), 0.2))  # checks a slow condition less often


def call_in_thread(function, *arguments):
    """Calls a function in a new thread, and returns a future for its result."""
    return futures.ThreadPoolExecutor(1).submit(function, *arguments)
