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
    """When a new file is begun and how many old ones stay; without it one file grows on."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.ROTATION

    max_megabytes: int = Field(
        default=100, ge=1, description="Begin a new file before one grows larger than this."
    )
    max_days: int = Field(
        default=0, ge=0, description="Delete old files after this many days; 0 keeps them."
    )
    max_backups: int = Field(
        default=100, ge=0, description="Keep at most this many old files; 0 keeps all."
    )

    def settings(self) -> RotationPolicy:
        """What the exporter takes."""
        return RotationPolicy(
            max_bytes=self.max_megabytes * MEBIBYTE,
            max_backups=self.max_backups,
            max_backup_age_s=self.max_days * _DAY_S,
        )


class File(Exporter):
    """A file that the Collector's otlpjsonfile receiver, or `otel-kprofiler`, can read."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.FILE

    path: str = Field(
        min_length=1,
        description="File to append to. One that is made is for its owner only, since unresolved "
        "frames tell kernel addresses; an existing one keeps its permissions.",
        json_schema_extra={"example": "/var/lib/otel-kprofiler/profiles.jsonl"},
    )
    format: Literal["json", "proto"] = Field(
        default="json",
        description="json: one OTLP JSON message per line. proto: OTLP messages, each behind its "
        "length in 4 bytes, big-endian.",
    )
    attributes: AttributesKey = "inline"
    rotation: Rotation | None = None

    def settings(self) -> FileSettings:
        """What the agent opens the exporter with."""
        return FileSettings(
            path=self.path,
            form=FORMS[self.format],
            attributes=AttributeForm(self.attributes),
            rotation=self.rotation.settings() if self.rotation else None,
        )
