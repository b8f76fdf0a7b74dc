"""What the environment says about the profiler of a service.

Without settings of ours nothing is imported to check any: the defaults are known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from otel_kprofiler.errors import ConfigError
from otel_kprofiler.export import OtlpSettings
from otel_kprofiler.sdk.declarative import read_configuration_file
from otel_kprofiler.sdk.exporters import ExporterFactory, find_exporters
from otel_kprofiler.sdk.plan import Plan

PREFIX: Final = "OTEL_KPROFILER_"
_OWN_VARIABLES: Final = frozenset({"OTEL_KPROFILER_FILE"})
_log = logging.getLogger(__name__)

Wanted = tuple[Plan | None, tuple[ExporterFactory, ...]]
"""What to profile, None for the defaults, and where to export it."""


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings among the variables, by key; an empty value counts as unset."""
    return {
        name.removeprefix(PREFIX).lower(): text.strip()
        for name, text in environ.items()
        if name.startswith(PREFIX) and name not in _OWN_VARIABLES and text.strip()
    }


def read_environment(environ: Mapping[str, str]) -> Wanted:
    """What to profile and where to export it.

    Unknown variables alone are named in a warning.

    Raises:
        ConfigError: unusable variables; all problems at once, and with them unknown variables.
    """

    def find() -> list[ExporterFactory]:
        return find_exporters(environ, read_configuration_file(environ))

    if not read_variables(environ):
        return None, tuple(find())
    from otel_kprofiler.sdk import settings  # noqa: PLC0415 - pydantic, 9 MB

    unknown = settings.find_unknown(environ)
    try:
        wanted = _read_both(lambda: settings.make_plan(settings.read_settings(environ)), find)
    except ConfigError as error:
        raise ConfigError([*error.problems, *unknown], hint=error.hint) from error
    if unknown:
        _log.warning("ignored: %s", "\n".join(map(str, unknown)))
    return wanted


def read_options(
    options: Mapping[str, Any], otlp: OtlpSettings | None, environ: Mapping[str, str]
) -> Wanted:
    """What to profile, out of options, and where to export it, out of the environment.

    Args:
        options: of declarative configuration.
        otlp: what the exporter ``otlp`` is; by default what the environment says.
        environ: the environment.

    Raises:
        ConfigError: unknown options and unusable values; all problems at once.
    """
    from otel_kprofiler.sdk.settings import make_plan, make_settings  # noqa: PLC0415 - pydantic

    source = "instrumentation/development.python"
    return _read_both(
        lambda: make_plan(make_settings(options, source=source)),
        lambda: find_exporters(environ, otlp or read_configuration_file(environ)),
    )


def _read_both(plan: Callable[[], Plan], find: Callable[[], list[ExporterFactory]]) -> Wanted:
    """Both, or the problems of both in one error."""
    mistakes = []
    try:
        wanted = plan()
    except ConfigError as error:
        mistakes.append(error)
    try:
        exporters = tuple(find())
    except ConfigError as error:
        mistakes.append(error)
    if mistakes:
        raise ConfigError.merge(mistakes)
    return wanted, exporters
