"""Read a configuration in a process of its own.

The libraries that read YAML and check it take 25 MB and are needed for half a second. The
agent has them run in a child, and keeps the values only.
"""

from __future__ import annotations

import logging
import os
import pickle
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from otel_kprofiler.errors import ConfigError, KProfilerError

if TYPE_CHECKING:
    from otel_kprofiler.config.config import Config


T = TypeVar("T")
Convert = Callable[["Config"], T]
"""Makes of a checked configuration what its reader takes; a function of a module's top level."""

_log = logging.getLogger(__name__)

_ENVIRONMENT: Final = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}  # looking for them is slow
_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Far above what the largest file that is taken needs; holds for the libraries that read it, too.
_LIMITS: Final = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_CPU: 60}  # bytes, seconds


class PendingConfig(Generic[T]):
    """A configuration that is being read while the caller does something else.

    Args:
        path: YAML file.
        convert: makes the values that are wanted of the configuration, in the other process. They
            are pickled, and must not need the libraries of the schema.
        fork: fork this process for it, which takes half the time of a new interpreter; for a
            process that has no other threads yet.
    """

    def __init__(self, path: str, convert: Convert[T], *, fork: bool = False) -> None:
        self._path = path
        self._wait = _fork(path, convert) if fork else _spawn(path, convert)

    def get(self) -> T:
        """Wait for the values; logs a warning if every user can read secrets in the file.

        Raises:
            ConfigError: the file cannot be read, or is wrong; holds all problems.
            KProfilerError: the reading process failed.
        """
        content, status = self._wait()
        if status:
            raise KProfilerError(
                f"reading {self._path} ended with status {status}",
                hint="otel-kprofiler validate shows what is wrong",
            )
        # From our own child: as trustworthy as this process.
        result, exposure = pickle.loads(content)  # noqa: S301
        if isinstance(result, ConfigError):
            raise result
        if exposure:
            _log.warning("%s", exposure)
        return cast("T", result)


def _spawn(path: str, convert: Convert[T]) -> Callable[[], tuple[bytes, int]]:
    """Have a new interpreter read it; returns what waits for the pickled result and status.

    It is isolated (-I), so that it imports from where this process does, and from nowhere else:
    not from the working directory, in which others may write.
    """
    paths = [path for path in (*sys.path, _ROOT) if os.path.isabs(path)]
    code = (
        f"import sys; sys.path[:] = {paths!r}; from {__name__} import main; "
        f"from {convert.__module__} import {convert.__qualname__} as convert; main(convert)"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code, os.path.abspath(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd="/",
        env={**os.environ, **_ENVIRONMENT},
    )
    return lambda: (child.communicate()[0], child.returncode)


def _fork(path: str, convert: Convert[T]) -> Callable[[], tuple[bytes, int]]:
    """Have a fork of this process read it; returns the same."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.update(_ENVIRONMENT)
            with open(writing, "wb") as file:
                file.write(_read(path, convert))
            status = 0
        except Exception:  # noqa: BLE001 - what a new interpreter would do
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)

    def wait() -> tuple[bytes, int]:
        with open(reading, "rb") as file:
            content = file.read()
        return content, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return wait


def main(convert: Convert[object]) -> None:
    """Read the file that is named on the command line, and write it pickled to descriptor 1."""
    content = _read(sys.argv[1], convert)
    with suppress(BrokenPipeError):  # the agent has ended meanwhile
        while content:
            content = content[os.write(1, content) :]


def _read(path: str, convert: Convert[object]) -> bytes:
    for kind, most in _LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (soft, hard))
    from otel_kprofiler.config.exposure import find_exposure  # noqa: PLC0415
    from otel_kprofiler.config.load import load_config  # noqa: PLC0415

    result: object
    exposure = ""
    try:
        loaded = load_config(path, environ=os.environ)
        result, exposure = convert(loaded.config), find_exposure(loaded)
    except ConfigError as error:
        result = error
    return pickle.dumps((result, exposure))
