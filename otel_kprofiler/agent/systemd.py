"""Sends notifications to systemd, using the sd_notify(3) protocol."""

import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

from otel_kprofiler.errors import describe_error

_RETRY_S: Final = 1.0

_log = logging.getLogger(__name__)


class Notifier:
    """Reports readiness, reloads and liveness to systemd; does nothing without ``NOTIFY_SOCKET``.

    Never blocks. If the socket is full, a later :meth:`alive` sends the message, unless a newer
    message has superseded it. Reads ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``,
    which systemd sets for its services.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte at the start of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        concerned = int(environment.get("WATCHDOG_PID") or 0) in (0, os.getpid())
        microseconds = int(environment.get("WATCHDOG_USEC") or 0)
        self.watchdog_interval_s = microseconds / 1e6 if concerned and microseconds > 0 else None
        self._next_alive = 0.0
        self._unsent = ""
        self._next_try = 0.0

    @property
    def longest_pause_s(self) -> float:
        """Returns the longest allowed interval between calls to :meth:`alive`, in seconds."""
        return (self.watchdog_interval_s or float("inf")) / 4

    def ready(self, status: str) -> None:
        """Report that the service is up, or that a reload has finished."""
        self._report(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Report that a reload has begun (``Type=notify-reload``); :meth:`ready` ends it."""
        self._report(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the service is shutting down."""
        self._report("STOPPING=1")

    def alive(self, now: float) -> None:
        """Notify systemd's watchdog if due. Call often; ``now`` is a monotonic time in seconds."""
        if self._unsent and now >= self._next_try:
            self._next_try = now + _RETRY_S
            self._report(self._unsent)
        if self.watchdog_interval_s is not None and now >= self._next_alive:
            # sd_watchdog_enabled(3) recommends notifying at half the interval.
            self._next_alive = now + self.watchdog_interval_s / 2
            self._send("WATCHDOG=1")

    def _report(self, text: str) -> None:
        self._unsent = "" if self._send(text) else text

    def _send(self, text: str) -> bool:
        """Return False if the message should be sent again later."""
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(text.encode(), self._address)
        except BlockingIOError:
            _log.warning(
                "cannot notify systemd: no process is reading the socket %s", self._address
            )
            return False
        except OSError as error:
            _log.warning("cannot notify systemd: %s", describe_error(error))
        return True
