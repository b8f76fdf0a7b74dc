"""Loads a configuration in a child process.

pydantic and ruamel.yaml use 25 MB, but are needed for only half a second. Therefore, these
libraries are loaded only in a child process.
"""

import gc
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

from otel_kprofiler.config.reading import read_text
from otel_kprofiler.errors import ConfigError, KProfilerError, describe_status

if TYPE_CHECKING:
    from otel_kprofiler.config.config import Config


T = TypeVar("T")
Convert = Callable[["Config"], T]
"""A module's top-level function that converts a validated configuration."""

_log = logging.getLogger(__name__)

_ENVIRONMENT: Final = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}  # searching for plugins is slow
_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# These limits far exceed what the libraries need for the largest accepted file.
_LIMITS: Final = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_CPU: 60}  # bytes, seconds


class PendingConfig(Generic[T]):
    """A configuration that a child process is reading.

    The calling thread reads the file, because a new interpreter has no capabilities. A file with
    secrets may be readable only by root.

    Args:
        convert: converts the configuration in the child process. The result is pickled, and
            unpickling it must not import pydantic or ruamel.yaml.
        fork: whether to fork this process, which is twice as fast as starting an interpreter. Must
            be False if this process has several threads. Without a fork, the file must be a
            regular file.

    Raises:
        ConfigError: the file is unreadable or too large.
    """

    def __init__(self, path: str, convert: Convert[T], *, fork: bool = False) -> None:
        self._path = path
        text = read_text(path, may_wait=fork)  # a thread that waits would block later reloads
        self._wait = _fork(path, text, convert) if fork else _spawn(path, text, convert)

    def get(self) -> T:
        """Wait for the result, and log a warning if every user can read secrets in the file.

        Raises ``ConfigError`` with all problems if the file is invalid, and ``KProfilerError`` if
        the child process failed.
        """
        content, status = self._wait()
        if status:
            raise KProfilerError(
                f"reading {self._path} failed: {describe_status(status)}",
                hint="run otel-kprofiler validate to see the cause",
            )
        # The data comes from our own child process, and can be trusted.
        result, exposure = pickle.loads(content)  # noqa: S301
        if isinstance(result, ConfigError):
            raise result
        if exposure:
            _log.warning("%s", exposure)
        return cast("T", result)


def _spawn(path: str, text: str, convert: Convert[T]) -> Callable[[], tuple[bytes, int]]:
    """Load a text in a new interpreter process. Return a function that awaits the pickled result.

    The interpreter does not import from the working directory, which other users may modify.
    """
    paths = [path for path in (*sys.path, _ROOT) if os.path.isabs(path)]
    code = (
        f"import sys; sys.path[:] = {paths!r}; from {__name__} import main; "
        f"from {convert.__module__} import {convert.__qualname__} as convert; main(convert)"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code, os.path.abspath(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        env={**os.environ, **_ENVIRONMENT},
    )
    return lambda: (child.communicate(text.encode())[0], child.returncode)


def _fork(path: str, text: str, convert: Convert[T]) -> Callable[[], tuple[bytes, int]]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.update(_ENVIRONMENT)
            with open(writing, "wb") as file:
                file.write(_load(path, text, convert))
            status = 0
        except Exception:  # noqa: BLE001 - a new interpreter would print it, too
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
    """Load the text from standard input, and write the pickled result to standard output.

    The command line contains the path of the text's file.
    """
    from otel_kprofiler.host import write_all  # noqa: PLC0415 - only in the child

    content = _load(sys.argv[1], sys.stdin.buffer.read().decode(), convert)
    with suppress(BrokenPipeError):  # the agent has exited
        write_all(1, content)


def _load(path: str, text: str, convert: Convert[object]) -> bytes:
    gc.disable()  # the process ends soon
    from otel_kprofiler.host import limit_resources  # noqa: PLC0415

    limit_resources(_LIMITS)
    from otel_kprofiler.config.exposure import find_exposure  # noqa: PLC0415
    from otel_kprofiler.config.load import parse_config  # noqa: PLC0415

    result: object
    exposure = ""
    try:
        loaded = parse_config(text, path=path, environ=os.environ)
        result, exposure = convert(loaded.config), find_exposure(loaded)
    except ConfigError as error:
        result = error
    return pickle.dumps((result, exposure))
