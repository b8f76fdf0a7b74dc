"""Calls methods at process exit, even in processes that never run ``atexit`` handlers.

A child forked by multiprocessing or billiard runs the finalizers registered since the fork, and
then exits with ``os._exit``. A billiard pool worker (Celery) does not even run these finalizers.
"""

import atexit
import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Final, cast

_LAST: Final = -1000
"""Priority with which a finalizer runs last, after the service's children have been joined."""


def call_at_exit(method: Callable[[], None]) -> None:
    """Call an idempotent method when this process exits."""
    atexit.register(method)
    _register_finalizer(method)


def call_at_exit_of_child(method: Callable[[], None]) -> None:
    """Call a method when a forked child exits, if the parent has called :func:`call_at_exit`."""
    _register_finalizer(method)
    worker: Any = getattr(sys.modules.get("billiard.pool"), "Worker", None)
    if hasattr(worker, "_do_exit"):
        end = worker._do_exit  # noqa: SLF001 - there is no public hook

        def _do_exit(self: object, *arguments: object, **options: object) -> None:
            method()
            end(self, *arguments, **options)

        worker._do_exit = _do_exit  # noqa: SLF001


def _register_finalizer(method: Callable[[], None]) -> None:
    """Register a finalizer with multiprocessing, which shares its registry with billiard.

    The finalizer is also registered in children, because a multiprocessing process clears all
    finalizers when it starts (after the fork or, under the fork server, after importing the main
    module).
    """
    if not sys.modules.keys() & {"multiprocessing", "billiard"}:
        return
    from multiprocessing import util  # noqa: PLC0415 - many services do not need it

    ref = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := ref()) is not None:
            alive()

    def register(owner: object) -> None:
        util.Finalize(owner, call, exitpriority=_LAST)  # removed along with its owner

    owner = cast("MethodType", method).__self__
    register(owner)
    util.register_after_fork(owner, register)
