"""``service:``: what of the configuration runs, and how the agent shows itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.durations import Duration
from otel_kprofiler.config.section import Section, duration, lower


class Logs(Section):
    """The agent's own log, on standard error."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.LOGS

    level: Annotated[Literal["debug", "info", "warn", "error"], BeforeValidator(lower)] = Field(
        default="info", description="Least important message that is logged."
    )
    encoding: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: text on a terminal, JSON otherwise."
    )


class Metrics(Section):
    """The agent's own metrics, sent to the OTLP receivers of the pipeline."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.METRICS

    level: Literal["none", "normal"] = Field(default="normal", description="none sends no metrics.")


class Telemetry(Section):
    """What the agent says about itself."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.TELEMETRY

    logs: Logs = Logs()
    metrics: Metrics = Metrics()


class Health(Section):
    """HTTP endpoint with /livez, /readyz and /status."""

    endpoint: str = Field(
        default="",
        description="Address to listen on, such as 127.0.0.1:13133. Empty: none.",
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError("should be host:port, such as 127.0.0.1:13133")
        return value


class Limits(Section):
    """What the agent may use; it lowers its sampling rate rather than take more."""

    max_cpu_percent: float = Field(
        default=0,
        ge=0,
        description="CPU time of the agent, 100 being one core; 0: no limit.",
    )
    max_rss_megabytes: int = Field(
        default=0,
        ge=0,
        description="Resident memory of the agent; 0: no limit.",
    )


class Privileges(Section):
    """What the agent gives up once it samples; see docs/permissions.md."""

    drop_all: bool = Field(
        default=False,
        description="Give up every capability, also those for CPUs that come online, modules that "
        "are loaded and processes of other users that are seen later.",
    )


class ProfilesPipeline(Section):
    """From where to where profiles go."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.PIPELINE

    receivers: list[str] = Field(
        description="Always kprofiler.", json_schema_extra={"example": ["kprofiler"]}
    )
    exporters: list[str] = Field(
        min_length=1,
        description="Ids of the exporters that run; none delays another.",
        json_schema_extra={"example": ["otlp_grpc"]},
    )

    @field_validator("receivers")
    @classmethod
    def _check_receivers(cls, value: list[str]) -> list[str]:
        if value != ["kprofiler"]:
            raise ValueError("should be [kprofiler]: it is the one receiver of the agent")
        return value

    @field_validator("exporters")
    @classmethod
    def _check_exporters(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError("names an exporter twice")
        return value


class Pipelines(Section):
    """The pipelines of the agent: the one for profiles."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.PIPELINES

    profiles: ProfilesPipeline


class Service(Section):
    """What runs."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.SERVICE

    telemetry: Telemetry = Telemetry()
    health: Health = Health()
    shutdown_timeout: Duration = duration(
        "10s", "Longest time that stopping may take, with the delivery of the last samples."
    )
    limits: Limits = Limits()
    privileges: Privileges = Privileges()
    pipelines: Pipelines
