"""Runs a module in a child process with its own interpreter and resource limits."""

import os
import resource
import sys
from collections.abc import Mapping
from typing import Final

_ROOT: Final = os.path.abspath(__file__ + "/../../..")


def child_command(module: str, *arguments: str) -> list[str]:
    """Returns a command line that runs the ``main`` function of a module in a new interpreter.

    The interpreter does not import from the working directory, which other users may control.
    """
    paths = [path for path in (*sys.path, _ROOT) if os.path.isabs(path)]
    code = f"import sys; sys.path[:] = {paths!r}; from {module} import main; main()"
    return [sys.executable, "-I", "-c", code, *arguments]


def limit_resources(limits: Mapping[int, int], pid: int = 0) -> None:
    """Lower a process's resource limits (keys: ``RLIMIT_…``), and disable core dumps.

    A ``pid`` of 0 selects this process. Raises ``OSError`` if the process has exited.
    """
    for kind, most in {**limits, resource.RLIMIT_CORE: 0}.items():
        hard = resource.prlimit(pid, kind)[1]
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.prlimit(pid, kind, (soft, hard))
