"""The exception hierarchy of otel-kprofiler. Each error states its cause and how to fix it.

::

    KProfilerError(message, hint)            exit status 1
    ├── ConfigError(problems)                exit status 2, lists all problems
    ├── HostError                            exit status 3, this host cannot be profiled
    │   ├── PrivilegeError(missing)          a capability is missing
    │   ├── KernelFeatureError(feature)      the kernel is too old or built without it
    │   ├── DependencyError(package)         a library is missing
    │   └── ShortageError                    exit status 1, a resource is exhausted at the moment
    ├── SamplerError(log)                    the sampler failed; includes the verifier log
    ├── ExportError                          an output cannot be written
    └── PayloadError                         data that is not valid OTLP profiles

An unresolved frame raises no exception; it is marked as :class:`otel_kprofiler.model.Unresolved`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class KProfilerError(Exception):
    """Base class for all errors shown to users. Commands print ``hint`` after ``fix:``."""

    exit_status: int = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def with_fix(self) -> str:
        """Returns the message, followed by the hint if there is one."""
        return f"{self} (fix: {self.hint})" if self.hint else str(self)


def describe_error(error: BaseException) -> str:
    """Describes an error for users. A system error is reduced to its path and message."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    has_path = isinstance(error.filename, str | bytes)
    return f"{os.fsdecode(error.filename)}: {error.strerror}" if has_path else error.strerror


def describe_status(status: int) -> str:
    """Describes how a process exited, naming the signal if ``status`` is negative."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # real-time signals
        return f"signal {-status}"


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A problem in a configuration; ``line`` and ``column`` are 1-based, 0 if unknown."""

    path: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}:{self.column}" if self.line else self.path
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class ConfigError(KProfilerError):
    """The configuration is unusable. The error lists all problems."""

    exit_status = 2

    def __init__(self, problems: Sequence[ConfigProblem], *, hint: str = "") -> None:
        super().__init__("\n".join(str(problem) for problem in problems), hint=hint)
        self.problems = tuple(problems)

    @classmethod
    def merge(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """Returns an error with the problems and hints from several errors."""
        problems = dict.fromkeys(problem for error in errors for problem in error.problems)
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        return cls(tuple(problems), hint="; ".join(hints))

    def __reduce__(self) -> tuple[Callable[..., ConfigError], tuple[object, ...]]:
        return _make_config_error, (self.problems, self.hint)


def _make_config_error(problems: Sequence[ConfigProblem], hint: str) -> ConfigError:
    return ConfigError(problems, hint=hint)


class HostError(KProfilerError):
    """The host does not support an operation, or this user is not permitted to perform it."""

    exit_status = 3


class PrivilegeError(HostError):
    """This process lacks capabilities; ``missing`` contains their names, such as ``CAP_BPF``."""

    def __init__(self, message: str, *, missing: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.missing = tuple(missing)


class KernelFeatureError(HostError):
    """The kernel is too old, or was built without a required feature."""


class DependencyError(HostError):
    """A library that is needed at run time is not installed."""


class ShortageError(HostError):
    """The host is out of memory, processes or descriptors. A later attempt may succeed.

    Therefore, the exit status differs from that of other host errors, after which the systemd unit
    does not restart the agent.
    """

    exit_status = 1


class SamplerError(KProfilerError):
    """The sampler could not be loaded or attached; ``log`` is the verifier log, if any."""

    def __init__(self, message: str, *, log: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.log = log


class ExportError(KProfilerError):
    """An output cannot be opened or written."""


class PayloadError(KProfilerError):
    """Data cannot be decoded as OTLP profiles: it is malformed, or its layout is not supported."""
