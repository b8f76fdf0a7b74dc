"""Reads the embedded profiler's settings from the environment.

Without ``OTEL_KPROFILER_*`` variables, the defaults apply and the schema is not imported.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from otel_kprofiler.errors import ConfigError
from otel_kprofiler.export import ClientSettings
from otel_kprofiler.sdk.declarative import read_configuration_file
from otel_kprofiler.sdk.environment_variables import read_variables
from otel_kprofiler.sdk.exporters import ExporterFactory, find_exporters
from otel_kprofiler.sdk.plan import Plan

_log = logging.getLogger(__name__)

Wanted = tuple[Plan | None, tuple[ExporterFactory, ...]]
"""The profiling plan (None for the defaults), and a factory for each exporter."""


def read_environment(environ: Mapping[str, str]) -> Wanted:
    """Reads the profiling plan and the exporters from the environment.

    Logs a warning about unknown variables. Raises one ``ConfigError`` that lists all problems.
    """

    def find() -> list[ExporterFactory]:
        return find_exporters(environ, read_configuration_file(environ))

    if not read_variables(environ):
        return None, tuple(find())
    from otel_kprofiler.sdk import schema  # noqa: PLC0415 - pydantic, 9 MB

    unknown = schema.find_unknown(environ)
    try:
        wanted = _read_both(lambda: schema.make_plan(schema.read_settings(environ)), find)
    except ConfigError as error:
        raise ConfigError([*error.problems, *unknown], hint=error.hint) from error
    if unknown:
        _log.warning("ignored: %s", "\n".join(map(str, unknown)))
    return wanted


def read_options(
    options: Mapping[str, Any], otlp: ClientSettings | None, environ: Mapping[str, str]
) -> Wanted:
    """Reads the profiling plan from options, and the exporters from the environment.

    ``otlp`` contains the settings for the ``otlp`` exporter. If it is None, the settings are read
    from the environment. Raises one ``ConfigError`` that lists all problems.
    """
    from otel_kprofiler.sdk.schema import make_plan, make_settings  # noqa: PLC0415 - pydantic

    source = "instrumentation/development.python"
    return _read_both(
        lambda: make_plan(make_settings(options, source=source)),
        lambda: find_exporters(environ, otlp or read_configuration_file(environ)),
    )


def _read_both(plan: Callable[[], Plan], find: Callable[[], list[ExporterFactory]]) -> Wanted:
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
