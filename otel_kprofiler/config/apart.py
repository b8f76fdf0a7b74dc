"""Read a configuration in a process of its own.

The libraries that read YAML and check it take 25 MB and are needed for half a second. The
agent has them run in a child, and keeps the values only.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

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


class PendingConfig:
    """A configuration that is being read while the caller does something else.

    Args:
        path: YAML file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._child = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", path],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYDANTIC_DISABLE_PLUGINS": "__all__"},  # looking for them is slow
        )

    def get(self) -> Config:
        """Wait for the configuration.

        The result has the attributes of :class:`otel_kprofiler.config.Config`, computed ones
        included, but is made of plain objects: ``isinstance`` tells nothing of them.

        Raises:
            ConfigError: the file cannot be read, or is wrong; holds all problems.
            KProfilerError: the reading process failed.
        """
        content, _ = self._child.communicate()
        if self._child.returncode:
            raise KProfilerError(
                f"reading {self._path} ended with status {self._child.returncode}",
                hint="otel-kprofiler validate shows what is wrong",
            )
        # From our own child: as trustworthy as this process.
        result = pickle.loads(content)  # noqa: S301
        if isinstance(result, ConfigError):
            raise result
        return cast("Config", result)


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
    """Read the file that is named on the command line, and write it pickled."""
    from otel_kprofiler.config.load import load_config  # noqa: PLC0415

    result: object
    try:
        result = to_plain(load_config(sys.argv[1], environ=os.environ).config)
    except ConfigError as error:
        result = error
    sys.stdout.buffer.write(pickle.dumps(result))
