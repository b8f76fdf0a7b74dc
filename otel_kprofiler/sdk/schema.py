"""The schema of the embedded profiler's settings."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import Field, ValidationError

from otel_kprofiler.config import Receiver, ServiceName
from otel_kprofiler.errors import ConfigError, ConfigProblem
from otel_kprofiler.pipeline import (
    resource_attributes,
    sampler_config,
    service_sources,
    user_symbol_settings,
    window_schedule,
)
from otel_kprofiler.sdk.environment_variables import PREFIX, read_variables
from otel_kprofiler.sdk.label_sets import check_name
from otel_kprofiler.sdk.plan import Plan

_OF_AGENTS: Final = (
    "target_containers",
    "target_pods",
    "target_units",
    "resources",
    "self_profiled",
)
"""Agent configuration keys that have no meaning in an embedded profiler."""
_WORDS: Final = {"true": True, "false": False}


class Settings(Receiver):
    """The agent's keys under ``receivers: kprofiler:``, plus keys for embedded profilers only."""

    target: Literal["self", "children", "host"] = Field(
        default="self",
        description="What to profile: this process, this process and its descendants, or the host.",
    )
    span_links: bool = Field(
        default=True, description="Link each sample to the span that was active in its thread."
    )
    link_unsampled_spans: bool = Field(
        default=False, description="Also link samples to spans that are not sampled."
    )
    local_root_names: bool = Field(
        default=True,
        description="Add the name of the trace's topmost span in this process to linked samples.",
    )
    baggage_keys: list[str] = Field(
        default=[],
        max_length=16,
        description="Baggage keys used as sample labels; values are read when a local root span "
        "starts.",
    )
    publish_context: bool = Field(
        default=True,
        description="Publish the Resource for profilers outside this process (OTEP 4719).",
    )
    publish_thread_contexts: bool = Field(
        default=True,
        description="Publish the current span and labels of each thread for profilers outside "
        "this process (OTEP 4947). Requires publish_context.",
    )
    restart_in_children: bool = Field(
        default=True, description="Start a profiler in each forked child."
    )
    export_on_sigterm: bool = Field(
        default=False, description="Export pending samples before SIGTERM terminates the process."
    )


def make_settings(options: Mapping[str, Any], *, source: str) -> Settings:
    """Check and convert options from ``source``, or raise ``ConfigError`` listing all problems."""
    try:
        return Settings.model_validate(dict(options))
    except ValidationError as error:
        problems = [
            ConfigProblem(source, 0, 0, ".".join(map(str, detail["loc"])), detail["msg"])
            for detail in error.errors()
        ]
        raise ConfigError(problems, hint="docs/embedding.md lists the settings") from error


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Reads the settings from ``OTEL_KPROFILER_*``, or raises ``ConfigError`` with all problems."""
    options = {
        key: _typed(key, text)
        for key, text in read_variables(environ).items()
        if key in Settings.model_fields
    }
    try:
        return make_settings(options, source="environment")
    except ConfigError as error:
        problems = [
            replace(problem, key=PREFIX + problem.key.partition(".")[0].upper())
            for problem in error.problems
        ]
        raise ConfigError(problems, hint=error.hint) from error


def find_unknown(environ: Mapping[str, str]) -> list[ConfigProblem]:
    """Returns unknown variables with the ``OTEL_KPROFILER_`` prefix."""
    problems = []
    for key in read_variables(environ).keys() - Settings.model_fields.keys():
        supported = [name for name in Settings.model_fields if name not in Settings.unsupported]
        near = difflib.get_close_matches(key, supported, 1)
        reason = f"unknown; did you mean {PREFIX}{near[0].upper()}?" if near else "unknown"
        reason = Settings.unsupported.get(key, reason)
        problems.append(ConfigProblem("environment", 0, 0, PREFIX + key.upper(), reason))
    return sorted(problems, key=str)


def _typed(key: str, text: str) -> Any:
    """Convert a string to the key's type, leaving invalid strings for validation to reject."""
    field = Settings.model_fields.get(key)
    kind = field.annotation if field else None
    if kind is bool:
        return _WORDS.get(text.lower(), text)
    if kind in {int, float}:
        try:
            return float(text) if kind is float else int(text)
        except ValueError:
            return text
    if kind is ServiceName or (kind is not None and get_origin(kind) is list):
        parts = [part.strip() for part in text.split(",")]
        items = [int(part) if part.isdecimal() else part for part in parts]
        return {"from": items} if kind is ServiceName else items
    if get_args(kind) and all(isinstance(word, str) for word in get_args(kind)):
        return text.lower()
    return text


def make_plan(settings: Settings) -> Plan:
    """Convert settings to a plan.

    Raises ``ConfigError`` if a key is only for the agent, ``target_pids`` is incompatible with the
    target, or a baggage key is not a valid label name.
    """
    for key in _OF_AGENTS:
        if getattr(settings, key) != Receiver.model_fields[key].default:
            raise ConfigError(
                [ConfigProblem("settings", 0, 0, key, "applies only to the agent")],
                hint="remove this setting: a service is profiled from inside its process",
            )
    if settings.target_pids and settings.target != "host":
        raise ConfigError(
            [ConfigProblem("settings", 0, 0, "target_pids", "applies only to the target 'host'")],
            hint="remove target_pids, or set target to host",
        )
    for key in settings.baggage_keys:
        try:
            check_name(key)
        except ValueError as error:
            raise ConfigError(
                [ConfigProblem("settings", 0, 0, "baggage_keys", str(error))],
                hint="list baggage keys, separated by commas",
            ) from error
    return Plan(
        target=settings.target,
        sampler=sampler_config(settings),
        schedule=window_schedule(settings),
        user_symbols=user_symbol_settings(settings),
        loader=settings.loader,
        attributes=resource_attributes(settings),
        service_sources=service_sources(settings),
        span_links=settings.span_links,
        link_unsampled_spans=settings.link_unsampled_spans,
        local_root_names=settings.local_root_names,
        baggage_keys=tuple(settings.baggage_keys),
        publish_context=settings.publish_context,
        publish_thread_contexts=settings.publish_thread_contexts,
        restart_in_children=settings.restart_in_children,
        export_on_sigterm=settings.export_on_sigterm,
    )
