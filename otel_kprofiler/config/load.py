"""Loads YAML as a :class:`Config`, and reports every problem with its position."""

import difflib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.config import Config
from otel_kprofiler.config.debug import Debug
from otel_kprofiler.config.document import Document, Path, hide, parse_document
from otel_kprofiler.config.durations import Duration
from otel_kprofiler.config.exporter_types import EXPORTERS
from otel_kprofiler.config.otlp import ADDRESSES
from otel_kprofiler.config.reading import read_text
from otel_kprofiler.config.section import Section, keys_of
from otel_kprofiler.errors import ConfigError
from otel_kprofiler.redact import redact_address

_Model = TypeVar("_Model", bound=Section)
_EXPORTER_ID: Final = re.compile(r"([a-z0-9_]+)(?:/(\S+))?")
_HEADER: Final = re.compile(r"[A-Za-z]{1,24}(-[A-Za-z]{1,24}){0,4}")
"""Matches header names such as ``authorization`` and ``X-Scope-OrgID``."""
_HINT: Final = "docs/configuration.md lists every key; `otel-kprofiler validate` checks a file"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and the origins of its values."""

    config: Config
    document: Document

    def origin(self, path: Path) -> str:
        """Returns where a value was set: ``default``, ``FILE:LINE``, or ``env NAME, FILE:LINE``."""
        mark = self.document.marks.get(path)
        if mark is None:
            return "default"
        place = f"{os.path.basename(self.document.path)}:{mark.value[0]}"
        return ", ".join([*(f"env {name}" for name in mark.env), place])


def load_config(path: str, *, environ: Mapping[str, str]) -> LoadedConfig:
    """Read and validate a UTF-8 configuration file.

    ``environ`` contains the environment variables for ``${env:NAME}``. If the file is unreadable or
    invalid, raises ``ConfigError``, which lists all problems.
    """
    return parse_config(read_text(path), path=path, environ=environ)


def parse_config(text: str, *, path: str, environ: Mapping[str, str]) -> LoadedConfig:
    """Validate the text of a configuration. ``path`` is used only in messages.

    If the configuration is invalid, raises ``ConfigError``, which lists all problems by line.
    """
    document = parse_document(text, path=path, environ=environ, describe_key=_describe_key)
    config = _check(document) if document.marks or not document.problems else None
    if document.problems or config is None:
        ordered = sorted(document.problems, key=lambda problem: (problem.line, problem.column))
        raise ConfigError(ordered, hint=_HINT)
    return LoadedConfig(config, document)


def _describe_key(path: Path) -> str:
    """Returns the last key in a path, redacted unless it resembles a key in the schema.

    An unknown key may be a misplaced secret.
    """
    key = str(path[-1])
    if path[-2:-1] == ("headers",):
        is_shown = _HEADER.fullmatch(key) is not None
    elif path[:-1] == ("exporters",):
        is_shown = key.partition("/")[0] in EXPORTERS
    else:
        is_shown = bool(difflib.get_close_matches(key, _all_keys(), n=1))
    return key if is_shown else hide(key)


@functools.cache
def _all_keys() -> frozenset[str]:
    keys = {*EXPORTERS, *unsupported_keys.EXPORTERS}
    sections: list[type[Section]] = [Config, *EXPORTERS.values()]
    while sections:
        section = sections.pop()
        keys |= {*keys_of(section), *section.unsupported}
        sections += filter(None, map(section_of, keys_of(section).values()))
    return frozenset(keys)


def _check(document: Document) -> Config | None:
    values = _fill(Config, document.values)
    if not isinstance(values, dict):
        document.complain((), "should be a mapping with receivers, exporters and service")
        return None
    ids = values.get("exporters")
    if isinstance(ids, dict):
        values["exporters"] = {name: _exporter(document, name, ids[name]) for name in ids}
    config = _validate(document, Config, values, ())
    if isinstance(ids, dict):
        _check_pipeline(document, values, ids)
    return config


def _exporter(document: Document, name: str, settings: Any) -> Section:
    path: Path = ("exporters", name)
    match = _EXPORTER_ID.fullmatch(name)
    model = EXPORTERS.get(match[1]) if match else None
    if model is None:
        kind = name.partition("/")[0]
        message = _unknown(kind, EXPORTERS, unsupported_keys.EXPORTERS, "exporter")
        document.complain(path, message, at_key=True)
        return Debug()
    return _validate(document, model, _fill(model, settings), path) or Debug()


def _check_pipeline(document: Document, values: dict[str, Any], ids: dict[str, Any]) -> None:
    path: Path = ("service", "pipelines", "profiles", "exporters")
    names: Any = values
    for key in path:
        names = names.get(key) if isinstance(names, dict) else None
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if isinstance(name, str) and name not in ids:
            document.complain((*path, index), f"there is no exporter {name!r} under exporters")


def _validate(document: Document, model: type[_Model], values: Any, prefix: Path) -> _Model | None:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _explain(document, model, prefix, detail)
        return None


def _explain(document: Document, model: type[Section], prefix: Path, detail: Any) -> None:
    inner: Path = detail["loc"]
    at_key = inner[-1:] == ("[key]",)
    inner = inner[:-1] if at_key else inner
    path = (*prefix, *inner)
    if detail["type"] == "extra_forbidden":
        owner = _section(model, inner[:-1])
        message = _unknown(str(inner[-1]), keys_of(owner), owner.unsupported, "key")
        document.complain(path, message, at_key=True)
    elif detail["type"] == "missing":
        document.complain(path, "is required")
    elif detail["input"] is not None:
        document.complain(path, _message(detail, path), at_key=at_key)
    elif all(problem.key != document.name(path) for problem in document.problems):
        # A malformed reference has already been reported.
        mark = document.marks.get(path)
        unset = " and ".join(mark.env) if mark else ""
        document.complain(path, "has no value" + (f": {unset} is unset or empty" if unset else ""))


def _message(detail: Any, path: Path) -> str:
    message, value, context = str(detail["msg"]), detail["input"], detail.get("ctx", {})
    bound = context.get("ge", context.get("le"))
    if bound is not None and isinstance(value, str):
        message = message.replace(str(int(bound)), str(Duration(bound)))
    message = message.removeprefix("Value error, ").replace("Input should", "should")
    is_shown = isinstance(value, str | int | float) and "headers" not in path
    is_address = isinstance(value, str) and path[-1] in ADDRESSES
    shown = redact_address(value) if is_address else value
    return f"{message}, not {shown!r}" if is_shown and message.startswith("should") else message


def _unknown(name: str, keys: Mapping[str, Any], reasons: Mapping[str, str], noun: str) -> str:
    if name in reasons:
        return f"not available: {reasons[name]}"
    near = difflib.get_close_matches(name, [*keys, *reasons], n=1)
    suggestion = f"did you mean {near[0]}?" if near else f"use one of {', '.join(keys)}"
    return f"unknown {noun}; {suggestion}"


def _section(model: type[Section], path: Path) -> type[Section]:
    for key in path:
        model = section_of(keys_of(model)[str(key)]) or model
    return model


def section_of(field: FieldInfo) -> type[Section] | None:
    """Returns the section type of a field; None for a plain value."""
    kinds = get_args(field.annotation) or (field.annotation,)
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return sections[0] if len(sections) == 1 else None


def _fill(model: type[Section], values: Any) -> Any:
    """Replace null with an empty mapping where the schema expects a mapping."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        return values
    filled = dict(values)
    for name, field in keys_of(model).items():
        section = section_of(field)
        optional = type(None) in get_args(field.annotation)
        if name not in filled or (optional and filled[name] is None):
            continue
        if section is not None:
            filled[name] = _fill(section, filled[name])
        elif filled[name] is None and get_origin(field.annotation) is dict:
            filled[name] = {}
    return filled
