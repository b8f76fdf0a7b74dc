"""Rejects gevent and eventlet, whose green threads the profiler's threads would block.

gevent calls :func:`stop_before_patching` (entry point ``gevent.plugins.monkey.will_patch_all``)
before it replaces the modules that the profiler's threads use. Without this call, a profiler would
break if it starts earlier: in the main process of a server whose workers are patched after the
fork, such as gunicorn's, or in such a worker.
"""

import sys
import weakref
from typing import Any, Final, Protocol

from otel_kprofiler.errors import HostError


class Stoppable(Protocol):
    """A profiler that :func:`stop_before_patching` stops."""

    def stop_before_patching(self) -> None:
        """Stop the profiler, or cancel its pending start, and log why."""


_profilers: Final[weakref.WeakSet[Stoppable]] = weakref.WeakSet()
_patcher = ""


def watch(profiler: Stoppable) -> None:
    """Stop ``profiler`` before gevent patches threads."""
    _profilers.add(profiler)


def stop_before_patching(event: Any) -> None:
    """Stop this process's profilers unless gevent leaves threads unpatched; called by gevent.

    ``event`` is a ``gevent.events.GeventWillPatchAllEvent``.
    """
    global _patcher  # noqa: PLW0603 - one per process
    if not any(map(event.will_patch_module, ("thread", "select"))):
        return
    _patcher = "gevent"
    for profiler in tuple(_profilers):
        profiler.stop_before_patching()


def refuse_green_threads() -> None:
    """Raise ``HostError`` under gevent and eventlet: the profiler would block all green threads."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent and any(map(gevent.is_module_patched, ("threading", "select"))):
        who = "gevent"
    elif eventlet and any(map(eventlet.is_monkey_patched, ("thread", "select"))):
        who = "eventlet"
    elif not (who := _patcher):
        return
    raise HostError(
        f"{who} has monkey-patched threading, but the profiler needs a native thread",
        hint="run the agent on this host (otel-kprofiler run), which profiles the process under "
        "its published Resource, or use threaded workers (gunicorn --worker-class gthread)",
    )
