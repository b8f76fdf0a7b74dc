"""What all parts of the configuration schema have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from otel_kprofiler.config.durations import parse_duration
from otel_kprofiler.export import ExporterSettings
from otel_kprofiler.model import Form

MEBIBYTE: Final = 1024 * 1024
FORMS: Final = {"json": Form.JSON, "proto": Form.PROTOBUF}
"""Forms of messages by the words of the configuration."""

AttributesKey = Annotated[
    Literal["inline", "references"],
    Field(
        description="How keys and texts of resource and scope attributes are written. inline: in "
        "place. references: as indices into the string table. Requests are a quarter smaller "
        "before compression and hardly smaller after it, but Collectors up to v0.162, Pyroscope "
        "and Parca find empty keys."
    ),
]
"""As :class:`otel_kprofiler.model.AttributeForm`."""


class Section(BaseModel):
    """A mapping of the configuration with a closed list of keys; immutable.

    ``unsupported`` holds keys that users know from elsewhere, with what to do instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    unsupported: ClassVar[Mapping[str, str]] = {}


class Exporter(Section, ABC):
    """A kind of exporter; the settings that it is made into open it."""

    @abstractmethod
    def settings(self) -> ExporterSettings:
        """What the agent opens the exporter with."""


def lower(value: Any) -> Any:
    """Text in lower case, for words that may be written either way."""
    return value.lower() if isinstance(value, str) else value


def duration(default: str, description: str, *, ge: str = "0s", le: str | None = None) -> Any:
    """A field with a duration between ``ge`` and ``le``, all in Go syntax."""
    upper = None if le is None else parse_duration(le)
    return Field(
        default=parse_duration(default), description=description, ge=parse_duration(ge), le=upper
    )
