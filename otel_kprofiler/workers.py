"""Supports uWSGI workers, which are forked by C code.

uWSGI loads the application in its master process before forking. The master then keeps the GIL, so
threads that the application started in the master never run again. If a thread is waiting for the
GIL when the master forks, the worker waits forever for that thread to take the GIL. Threads must
therefore be started in each worker.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

THREADS_HINT: Final = "set enable-threads = true for uWSGI"


def call_in_workers(hook: Callable[[], object]) -> None:
    """Call a function in each process that uWSGI forks, and in this process if it becomes a worker.

    Does nothing unless :func:`is_before_workers` returns True.
    """
    if not is_before_workers():
        return
    try:
        # Importing uwsgidecorators overwrites an existing post-fork hook, so import it first.
        decorators: Any = importlib.import_module("uwsgidecorators")
    except Exception:  # noqa: BLE001 - an Exception means that there is no master process
        _chain(_find_uwsgi(), hook)
    else:
        decorators.postfork(hook)


def is_before_workers() -> bool:
    """Returns whether this is a uWSGI process that has not forked its workers yet."""
    uwsgi = _find_uwsgi()
    if uwsgi is None:
        return False
    return not (uwsgi.worker_id() or uwsgi.mule_id() or uwsgi.i_am_the_spooler())


def lacks_threads() -> bool:
    """Returns whether this uWSGI process runs Python threads only while it serves a request."""
    uwsgi = _find_uwsgi()
    return uwsgi is not None and not uwsgi.has_threads


def _find_uwsgi() -> Any:
    uwsgi = sys.modules.get("uwsgi")
    return uwsgi if hasattr(uwsgi, "worker_id") else None


def _chain(uwsgi: Any, hook: Callable[[], object]) -> None:
    earlier_hook = getattr(uwsgi, "post_fork_hook", None)

    def run() -> None:
        if earlier_hook is not None:
            earlier_hook()
        hook()

    uwsgi.post_fork_hook = run
