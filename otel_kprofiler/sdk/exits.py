"""The end of a process, also of those that never reach ``atexit``.

A forked child of multiprocessing or billiard ends by ``os._exit``. Before that it runs finalizers,
those that were registered since it forked; a worker of billiard's pools (Celery) not even those.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Final, cast

_LAST: Final = -1000
"""Priority of a finalizer: behind the service's own, and when its children have been joined."""


def call_at_exit(method: Callable[[], None]) -> None:
    """Call a method of an object at the end of this process, perhaps more than once."""
    atexit.register(method)
    _register_finalizer(method)


def cancel(method: Callable[[], None]) -> None:
    """Do not keep the object of the method alive for the end of the process."""
    atexit.unregister(method)


def call_at_exit_of_child(method: Callable[[], None]) -> None:
    """In a forked child, whose parent has called :func:`call_at_exit`: the same for the child."""
    _register_finalizer(method)
    worker: Any = getattr(sys.modules.get("billiard.pool"), "Worker", None)
    if hasattr(worker, "_do_exit"):
        end = worker._do_exit  # noqa: SLF001 - there is no hook for every pool

        def _do_exit(self: object, *arguments: object, **options: object) -> None:
            method()
            end(self, *arguments, **options)

        worker._do_exit = _do_exit  # noqa: SLF001


def _register_finalizer(method: Callable[[], None]) -> None:
    """Have multiprocessing call; billiard shares its registry.

    Finalizers are dropped when a process of multiprocessing begins, which is after the fork, or
    after the import of the main module in a child of the fork server: hence twice.
    """
    if not sys.modules.keys() & {"multiprocessing", "billiard"}:
        return
    from multiprocessing import util  # noqa: PLC0415 - many services never need it

    ref = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := ref()) is not None:
            alive()

    def register(_: object) -> None:
        util.Finalize(None, call, exitpriority=_LAST)

    register(None)
    util.register_after_fork(cast("MethodType", method).__self__, register)
