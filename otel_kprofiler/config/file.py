"""``exporters: file:``, with the keys of the Collector's exporter."""

from __future__ import annotations

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
    """When to start a new file, and which old files to keep. By default, the file only grows."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.ROTATION

    max_megabytes: int = Field(
        default=100, ge=1, description="Start a new file before the current one exceeds this size."
    )
    max_days: int = Field(
        default=0, ge=0, description="Delete old files after this many days; 0 keeps them."
    )
    max_backups: int = Field(
        default=100, ge=0, description="Keep at most this many old files; 0 keeps all."
    )

    def settings(self) -> RotationPolicy:
        """Returns the rotation policy of the exporter."""
        return RotationPolicy(
            max_bytes=self.max_megabytes * MEBIBYTE,
            max_backups=self.max_backups,
            max_backup_age_s=self.max_days * _DAY_S,
        )


class File(Exporter):
    """A file readable by the Collector's otlpjsonfile receiver and by `otel-kprofiler`."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.FILE

    path: str = Field(
        min_length=1,
        description="File to append to. A new file is readable by its owner only, since unresolved "
        "frames reveal kernel addresses; an existing file keeps its permissions.",
        json_schema_extra={"example": "/var/lib/otel-kprofiler/profiles.jsonl"},
    )
    format: Literal["json", "proto"] = Field(
        default="json",
        description="json: one OTLP JSON message per line. proto: OTLP messages, each preceded by "
        "its length in 4 bytes, big-endian.",
    )
    attributes: AttributesKey = "inline"
    rotation: Rotation | None = None

    def settings(self) -> FileSettings:
        """Returns the settings with which the agent opens the exporter."""
        return FileSettings(
            path=self.path,
            form=FORMS[self.format],
            attributes=AttributeForm(self.attributes),
            rotation=self.rotation.settings() if self.rotation else None,
        )
