"""The schema for ``service:``, with the agent's pipelines, telemetry, limits and privileges."""

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
        default="info", description="Minimum level of logged messages."
    )
    encoding: Literal["auto", "console", "json"] = Field(
        default="auto",
        description="Log format. auto: text if the log is a terminal, and JSON otherwise.",
    )


class Metrics(Section):
    """The agent's own metrics, sent to the OTLP receivers in the pipeline."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.METRICS

    level: Literal["none", "normal"] = Field(
        default="normal", description="Metrics to send. none: the agent sends no metrics."
    )
    interval: Duration = duration("60s", "Interval at which the agent sends metrics.", ge="100ms")


class Telemetry(Section):
    """The agent's own logs and metrics."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.TELEMETRY

    logs: Logs = Logs()
    metrics: Metrics = Metrics()


class Health(Section):
    """HTTP endpoint that serves /livez, /readyz and /status."""

    endpoint: str = Field(
        default="",
        description="Address to listen on, such as 127.0.0.1:13133. If empty, the endpoint is "
        "disabled.",
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError("should be host:port, such as 127.0.0.1:13133")
        return value


class Limits(Section):
    """Limits on the agent's CPU and memory usage, enforced by lowering the sampling rate."""

    max_cpu_percent: float = Field(
        default=0,
        ge=0,
        description="Limit on the CPU usage of the agent's process, without its child processes, "
        "where 100 is one core. 0 means no limit.",
    )
    max_rss_megabytes: int = Field(
        default=0,
        ge=0,
        description="Limit on the resident memory of the agent's process, without its child "
        "processes. 0 means no limit.",
    )


class Privileges(Section):
    """Capabilities that the agent drops once sampling has started (see docs/permissions.md)."""

    drop_all: bool = Field(
        default=False,
        description="Drop all capabilities, including those needed later for CPUs that come "
        "online, newly loaded modules and other users' processes. With this setting, user stacks "
        "are unwound with frame pointers.",
    )


class ProfilesPipeline(Section):
    """The profiles pipeline."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.PIPELINE

    receivers: list[str] = Field(
        description="Must be [kprofiler].", json_schema_extra={"example": ["kprofiler"]}
    )
    exporters: list[str] = Field(
        min_length=1,
        description="IDs of the exporters to run. A slow exporter does not delay other exporters.",
        json_schema_extra={"example": ["otlp_grpc"]},
    )

    @field_validator("receivers")
    @classmethod
    def _check_receivers(cls, value: list[str]) -> list[str]:
        if value != ["kprofiler"]:
            raise ValueError("should be [kprofiler], the agent's only receiver")
        return value

    @field_validator("exporters")
    @classmethod
    def _check_exporters(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError("lists an exporter twice")
        return value


class Pipelines(Section):
    """The agent's pipelines; only profiles are supported."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.PIPELINES

    profiles: ProfilesPipeline


class Service(Section):
    """Pipelines, telemetry, limits and privileges."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.SERVICE

    telemetry: Telemetry = Telemetry()
    health: Health = Health()
    shutdown_timeout: Duration = duration(
        "10s", "Time limit for stopping the agent, including the delivery of the last samples."
    )
    limits: Limits = Limits()
    privileges: Privileges = Privileges()
    pipelines: Pipelines
