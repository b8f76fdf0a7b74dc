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
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from otel_kprofiler.errors import ConfigError, KProfilerError

if TYPE_CHECKING:
    from otel_kprofiler.config.config import Config


class Secret(str):
    """A text that no message shows; the counterpart of pydantic's ``SecretStr``."""

    __slots__ = ()

    def get_secret_value(self) -> str:
        """The text."""
        return str(self)

    def __repr__(self) -> str:
        return "Secret('[REDACTED]')"


_log = logging.getLogger(__name__)

_ENVIRONMENT: Final = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}  # looking for them is slow
_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Far above what the largest file that is taken needs; holds for the libraries that read it, too.
_LIMITS: Final = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_CPU: 60}  # bytes, seconds


class PendingConfig:
    """A configuration that is being read while the caller does something else.

    Args:
        path: YAML file.
        fork: fork this process for it, which takes half the time of a new interpreter; for a
            process that has no other threads yet.
    """

    def __init__(self, path: str, *, fork: bool = False) -> None:
        self._path = path
        self._wait = _fork(path) if fork else _spawn(path)

    def get(self) -> Config:
        """Wait for the configuration.

        The result has the attributes of :class:`otel_kprofiler.config.Config`, computed ones
        included, but is made of plain objects: ``isinstance`` tells nothing of them. Logs a
        warning if every user can read secrets in the file.

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
        return cast("Config", result)


def _spawn(path: str) -> Callable[[], tuple[bytes, int]]:
    """Have a new interpreter read it; returns what waits for the pickled result and status.

    It is isolated (-I), so that it imports from where this process does, and from nowhere else:
    not from the working directory, in which others may write.
    """
    paths = [path for path in (*sys.path, _ROOT) if os.path.isabs(path)]
    code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code, os.path.abspath(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd="/",
        env={**os.environ, **_ENVIRONMENT},
    )
    return lambda: (child.communicate()[0], child.returncode)


def _fork(path: str) -> Callable[[], tuple[bytes, int]]:
    """Have a fork of this process read it; returns the same."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.update(_ENVIRONMENT)
            with open(writing, "wb") as file:
                file.write(_read(path))
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


def to_plain(value: Any) -> Any:
    """Sections as plain objects with the same attributes; everything else as it is."""
    from pydantic import BaseModel, SecretStr  # noqa: PLC0415 - in the child only

    if isinstance(value, BaseModel):
        names = list(type(value).model_fields)
        names += [
            name
            for kind in type(value).__mro__
            for name, member in vars(kind).items()
            if isinstance(member, property) and kind.__module__.startswith(__package__ or "")
        ]
        return SimpleNamespace(**{name: to_plain(getattr(value, name)) for name in names})
    if isinstance(value, SecretStr):
        return Secret(value.get_secret_value())
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return value


def main() -> None:
    """Read the file that is named on the command line, and write it pickled to descriptor 1."""
    content = _read(sys.argv[1])
    with suppress(BrokenPipeError):  # the agent has ended meanwhile
        while content:
            content = content[os.write(1, content) :]


def _read(path: str) -> bytes:
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
        result, exposure = to_plain(loaded.config), find_exposure(loaded)
    except ConfigError as error:
        result = error
    return pickle.dumps((result, exposure))
