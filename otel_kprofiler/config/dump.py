"""Formats a complete configuration as YAML without secrets, optionally with each value's origin."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from otel_kprofiler.config.document import Path
from otel_kprofiler.config.durations import Duration
from otel_kprofiler.config.load import LoadedConfig
from otel_kprofiler.config.section import Section
from otel_kprofiler.redact import REDACTED

# Plain scalars that every YAML parser reads as strings.
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS: Final = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def dump_config(loaded: LoadedConfig, *, origins: bool = False) -> str:
    """Returns every key with its effective value, as YAML that can be loaded again.

    Secrets (values of headers, passwords in addresses) appear as ``[REDACTED]``. With ``origins``,
    a comment after each value states its origin: default, file and line, or environment.
    """

    def comment(path: Path) -> str:
        return f"  # {loaded.origin(path)}" if origins else ""

    return "".join(f"{line}\n" for line in yaml_lines(loaded.config, (), comment))


def yaml_lines(value: Any, path: Path, comment: Callable[[Path], str]) -> Iterator[str]:
    """Yields the lines of a mapping or section, indented by the depth of ``path``."""
    items = (
        [
            (field.alias or name, getattr(value, name))
            for name, field in type(value).model_fields.items()
        ]
        if isinstance(value, Section)
        else list(value.items())
    )
    indent = "  " * len(path)
    for name, item in items:
        here = (*path, name)
        key = f"{indent}{_quote(name)}:"
        if isinstance(item, Section | Mapping) and (not isinstance(item, Mapping) or item):
            yield key
            yield from yaml_lines(item, here, comment)
        else:
            yield f"{key} {scalar(item)}{comment(here)}"


def scalar(value: Any) -> str:
    """Formats a scalar or a list in YAML flow style, and escapes ``$``."""
    if isinstance(value, Duration):
        return str(value)
    if isinstance(value, SecretStr):
        return scalar(REDACTED)
    if isinstance(value, list):
        return f"[{', '.join(scalar(item) for item in value)}]"
    if isinstance(value, str):
        return _quote(_without_password(value).replace("$", "$$"))
    return json.dumps(value)


def _quote(text: str) -> str:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _without_password(text: str) -> str:
    if "@" not in text or "://" not in text:
        return text
    try:
        userinfo = urlsplit(text).netloc.rpartition("@")[0]
    except ValueError:  # not an address
        return text
    # Drop the brackets, which are invalid in an address.
    return text.replace(f"{userinfo}@", f"{REDACTED.strip('[]')}@", 1) if userinfo else text
