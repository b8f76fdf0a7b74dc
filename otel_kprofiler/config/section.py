"""Defines the base classes and field types of the configuration schema."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from otel_kprofiler.config.durations import parse_duration
from otel_kprofiler.export import ExporterSettings
from otel_kprofiler.model import Form

MEBIBYTE: Final = 1024 * 1024
FORMS: Final = {"json": Form.JSON, "proto": Form.PROTOBUF}
"""Encodings of OTLP messages, by their names in the configuration."""

AttributesKey = Annotated[
    Literal["inline", "references"],
    Field(
        description="Encoding of the keys and string values in resource and scope attributes. "
        "inline: the strings themselves. references: indices into the string table. References "
        "make uncompressed requests a quarter smaller, but save little if requests are "
        "compressed. Collectors up to v0.162, Pyroscope and Parca read references as empty keys."
    ),
]
"""Type of a field whose value names an :class:`otel_kprofiler.model.AttributeForm`."""


class Section(BaseModel):
    """An immutable mapping in the configuration, with a fixed set of keys.

    ``unsupported`` maps unsupported keys in related configuration formats to alternatives.
    """

    # A nested section is compiled with the section that contains it.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)
    unsupported: ClassVar[Mapping[str, str]] = {}


class Exporter(Section, ABC):
    """The schema for an exporter type."""

    @abstractmethod
    def settings(self) -> ExporterSettings:
        """Returns the exporter's settings."""


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns a section's fields, indexed by their keys in the configuration file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def lower(value: Any) -> Any:
    """Convert text to lower case for case-insensitive comparison."""
    return value.lower() if isinstance(value, str) else value


def duration(default: str, description: str, *, ge: str = "0s", le: str | None = None) -> Any:
    """Returns a field type for durations between ``ge`` and ``le``, in Go's syntax."""
    upper = None if le is None else parse_duration(le)
    return Field(
        default=parse_duration(default), description=description, ge=parse_duration(ge), le=upper
    )
