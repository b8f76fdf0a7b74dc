"""Waits in tests, for as long as a busy machine may need."""

import time


def wait_until(condition, seconds=60, say=str):
    """Waits until a condition holds, and returns its value.

    Fails the test if it does not hold within ``seconds``, with the message that ``say`` returns.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        ended = time.monotonic()
        assert ended < deadline, say()
        time.sleep(min(max(0.01, ended - began), 0.2))  # checks a slow condition less often
