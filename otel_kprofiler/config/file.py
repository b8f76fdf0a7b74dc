"""The schema for ``exporters: file:``, with keys from the Collector's file exporter."""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.section import FORMS, MEBIBYTE, AttributesKey, Exporter, Section
from otel_kprofiler.export import FileSettings
from otel_kprofiler.export import Rotation as RotationPolicy
from otel_kprofiler.model import AttributeForm

_DAY_S: Final = 86_400


class Rotation(Section):
    """When to start a new file, and which old files to keep. By default, there is only one file."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.ROTATION

    max_megabytes: int = Field(
        default=100,
        ge=1,
        description="Maximum size of a file. A new file is started before the "
        "current one exceeds this size.",
    )
    max_days: int = Field(
        default=0,
        ge=0,
        description="Age in days at which old files are deleted. With 0, "
        "old files are kept regardless of their age.",
    )
    max_backups: int = Field(
        default=100,
        ge=0,
        description="Maximum number of old files to keep. With 0, all old files are kept.",
    )

    def settings(self) -> RotationPolicy:
        """Returns the exporter's rotation policy."""
        return RotationPolicy(
            max_bytes=self.max_megabytes * MEBIBYTE,
            max_backups=self.max_backups,
            max_backup_age_s=self.max_days * _DAY_S,
        )


class File(Exporter):
    """Writes profiles to a file. The Collector's otlpjsonfile receiver can read the json format."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.FILE

    path: str = Field(
        min_length=1,
        description="File to append to. A new file is readable only by its owner, because "
        "unresolved frames reveal kernel addresses. An existing file keeps its permissions.",
        json_schema_extra={"example": "/var/lib/otel-kprofiler/profiles.jsonl"},
    )
    format: Literal["json", "proto"] = Field(
        default="json",
        description="Format of the file. json: one OTLP JSON message per line. proto: OTLP "
        "messages, each preceded by its length as a big-endian 4-byte integer.",
    )
    attributes: AttributesKey = "inline"
    rotation: Rotation | None = None

    def settings(self) -> FileSettings:
        """Returns the exporter's settings."""
        return FileSettings(
            path=self.path,
            form=FORMS[self.format],
            attributes=AttributeForm(self.attributes),
            rotation=self.rotation.settings() if self.rotation else None,
        )
