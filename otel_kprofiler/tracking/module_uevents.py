"""Uevents of modules.

A datagram of the kernel is ``ACTION@DEVPATH`` and then ``KEY=VALUE`` for each variable, all
ended by zero bytes (lib/kobject_uevent.c). For a module these are ``add@/module/NAME`` when its
init function has succeeded and ``remove@/module/NAME`` when its exit function has returned,
before its memory is freed; a module whose init function fails sends none.
"""

from __future__ import annotations

import enum
import threading
from typing import Final, NamedTuple, Protocol

_FOLDER: Final = "/module/"


class ModuleAction(enum.Enum):
    """What happened to a module; the value is what the kernel writes."""

    ADDED = "add"
    REMOVED = "remove"


class ModuleEvent(NamedTuple):
    """One module was loaded or unloaded."""

    action: ModuleAction
    name: str


def parse_uevent(data: bytes) -> ModuleEvent | None:
    """The module event in a datagram; None if it is about something else, or malformed."""
    text = data.decode("utf-8", "replace")
    variables = dict(part.partition("=")[::2] for part in text.split("\0")[1:])
    path = variables.get("DEVPATH", "")
    name = path.removeprefix(_FOLDER)
    if variables.get("SUBSYSTEM") != "module" or name == path or not name or "/" in name:
        return None
    try:
        return ModuleEvent(ModuleAction(variables.get("ACTION")), name)
    except ValueError:
        return None


class ModuleEvents(Protocol):
    """Where announcements come from; see ``otel_kprofiler.host.Uevents``."""

    def wait(self, timeout_s: float | None) -> None:
        """Return when something waits, when woken, or in the end."""

    def wake(self) -> None:
        """End the wait of the other thread."""

    def is_waiting(self) -> bool:
        """Whether something waits."""

    def receive(self) -> list[bytes]:
        """All that waits; raises ``OSError`` when something was lost."""

    def close(self) -> None:
        """Give everything back."""


class NoEvents:
    """In place of announcements where there are none."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def wait(self, timeout_s: float | None) -> None:
        """Return when woken, or in the end."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def wake(self) -> None:
        """End the wait of the other thread."""
        self._woken.set()

    def is_waiting(self) -> bool:
        """Never."""
        return False

    def receive(self) -> list[bytes]:
        """Nothing."""
        return []

    def close(self) -> None:
        """Nothing to give back."""
