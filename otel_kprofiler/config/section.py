"""What all parts of the configuration schema have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from otel_kprofiler.config.durations import parse_duration


class Section(BaseModel):
    """A mapping of the configuration with a closed list of keys; immutable.

    ``refused`` holds keys that users know from elsewhere, with what to do instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    refused: ClassVar[Mapping[str, str]] = {}


def lower(value: Any) -> Any:
    """Text in lower case, for words that may be written either way."""
    return value.lower() if isinstance(value, str) else value


def duration(default: str, description: str, *, ge: str = "0s", le: str | None = None) -> Any:
    """A field with a duration between ``ge`` and ``le``, all in Go syntax."""
    upper = None if le is None else parse_duration(le)
    return Field(
        default=parse_duration(default), description=description, ge=parse_duration(ge), le=upper
    )
