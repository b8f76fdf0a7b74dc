"""Resolves host names within a time limit."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Watch = Callable[[Callable[[], object]], None]
"""Called before each step, with a function that aborts the step from another thread. Raises
:class:`ConnectError` if no further step may begin."""
_Results = queue.SimpleQueue[list[Any] | OSError]


class ConnectError(Exception):
    """No connection could be opened; the message names the address and the reason."""


class NameLookups:
    """Looks up names in other threads, because ``getaddrinfo`` cannot be interrupted.

    A lookup that exceeds the time limit continues, and the next call waits for its result.
    Otherwise, a name server that responds only after the time limit would never be of use. Calls
    are made by one thread at a time.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[int, str, int], _Results] = {}  # by process, host and port

    def resolve(
        self, host: str, port: int, deadline: float, watch: Watch
    ) -> list[tuple[socket.AddressFamily, Any]]:
        """Returns the addresses of a host, which may be an IP address, most preferred first.

        Args:
            deadline: a time of ``time.monotonic()``.

        Raises:
            ConnectError: the name does not exist, or its name servers cannot be reached.
            TimeoutError: the deadline has passed.
        """
        resolved = _look_up(host, port, socket.AI_NUMERICHOST)
        if isinstance(resolved, OSError):
            resolved = self._wait(host, port, deadline, watch)
        if isinstance(resolved, OSError):
            raise ConnectError(f"cannot resolve {host}: {resolved.strerror or resolved}")
        return [(family, address) for family, _, _, _, address in resolved]

    def _wait(self, host: str, port: int, deadline: float, watch: Watch) -> list[Any] | OSError:
        key = os.getpid(), host, port  # threads do not continue in a forked child
        results = self._running.pop(key, None) or _start(host, port)
        watch(lambda: results.put(OSError("the exporter was shut down")))
        try:
            return results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self._running[key] = results
            raise TimeoutError(f"cannot resolve {host}: no response") from None


def _start(host: str, port: int) -> _Results:
    results: _Results = queue.SimpleQueue()

    def run() -> None:
        results.put(_look_up(host, port))

    try:
        threading.Thread(target=run, name="kprofiler-dns", daemon=True).start()
    except RuntimeError:  # since Python 3.12, during interpreter shutdown
        run()
    return results


def _look_up(host: str, port: int, flags: int = 0) -> list[Any] | OSError:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except OSError as error:
        return error
    except UnicodeError:  # a label is empty or too long
        return OSError(f"{host!r} is not a valid name")
