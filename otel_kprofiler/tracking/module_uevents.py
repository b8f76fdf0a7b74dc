"""Parses the kernel's uevents about loaded and unloaded modules.

A kernel datagram is ``ACTION@DEVPATH`` followed by ``KEY=VALUE`` variables, each terminated by a
zero byte (lib/kobject_uevent.c). The kernel sends ``add@/module/NAME`` after a module's init
function has succeeded, and ``remove@/module/NAME`` after its exit function has returned, before the
module's memory is freed. If the init function fails, the kernel sends no uevent.
"""

import enum
import threading
from typing import Final, NamedTuple, Protocol

_FOLDER: Final = "/module/"


class ModuleAction(enum.Enum):
    """A module event; the value is the kernel's keyword."""

    ADDED = "add"
    REMOVED = "remove"


class ModuleEvent(NamedTuple):
    """A module was loaded or unloaded."""

    action: ModuleAction
    name: str


def parse_uevent(data: bytes) -> ModuleEvent | None:
    """Parse a datagram; None if it is malformed or not about a module."""
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
    """Source of the kernel's uevents for modules; see ``otel_kprofiler.host.Uevents``."""

    def wait(self, timeout_s: float | None) -> None:
        """Block until a datagram arrives, ``wake`` is called, or the timeout expires."""

    def wake(self) -> None:
        """Wake the waiting thread."""

    def is_waiting(self) -> bool:
        """Returns whether a datagram is ready."""

    def receive(self) -> list[bytes]:
        """Returns all pending datagrams; raises ``OSError`` if any were lost."""

    def close(self) -> None:
        """Release all resources."""


class NoEvents:
    """Replaces :class:`ModuleEvents` on hosts where the kernel's uevents are not available."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def wait(self, timeout_s: float | None) -> None:
        """Block until ``wake`` is called or the timeout expires."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def wake(self) -> None:
        """Wake the waiting thread."""
        self._woken.set()

    def is_waiting(self) -> bool:
        """Returns False."""
        return False

    def receive(self) -> list[bytes]:
        """Returns no datagrams."""
        return []

    def close(self) -> None:
        """Does nothing, because there is nothing to release."""
