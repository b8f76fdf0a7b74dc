"""``receivers: kprofiler:``, with the keys of the opentelemetry-ebpf-profiler receiver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints, WrapValidator, field_validator

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.durations import Duration
from otel_kprofiler.config.section import Section, duration, lower
from otel_kprofiler.host import CPU_CLOCK, MAX_EVENTS, parse_cpu_list, parse_event
from otel_kprofiler.model import MAX_FRAMES, PYTHON_FRAMES

_MAX_PID = 4_194_304  # PID_MAX_LIMIT, include/linux/threads.h

Target = Annotated[str, StringConstraints(min_length=1)]
AttributeName = Annotated[str, StringConstraints(min_length=1)]


def _attribute(value: Any, _: Any) -> Any:
    """Check the type of a value, so that one error is reported, not one for each allowed type."""
    items = value if isinstance(value, list) else [value]
    kinds = {type(item) for item in items}
    if not kinds <= {str, bool, int, float} or len(kinds) > 1:
        raise ValueError("should be a string, a number, true or false, or a list of one of these")
    return value


def _symbols(value: Any) -> Any:
    """Convert false to ``off``, because YAML 1.1 parsers read ``off`` as false."""
    return "off" if value is False else lower(value)


def _count(value: Any) -> Any:
    """Convert ``off`` to 0, even if a YAML parser or a variable has turned ``off`` into false."""
    return 0 if value is False or value in ("off", "false") else value


def _words(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Scalar = str | bool | int | float
Attribute = Annotated[
    _Scalar | list[str] | list[bool] | list[int] | list[float], WrapValidator(_attribute)
]


def _enabled(value: Any) -> Any:
    """Accept ``true`` and ``false`` in place of a section, even as text from a variable."""
    words = {"true": True, "on": True, "false": False, "off": False}
    value = words.get(value.lower(), value) if isinstance(value, str) else value
    return {"enabled": value} if isinstance(value, bool) else value


class OffCpu(Section):
    """Sampling of waiting threads."""

    enabled: bool = Field(
        default=False,
        description="Also sample where threads wait, and count the exact off-CPU time of each "
        "process. This costs CPU time at every context switch (see docs/off-cpu.md).",
    )
    samples_per_second_per_cpu: int = Field(
        default=20,
        ge=0,
        le=10_000,
        description="Average number of wait samples per second on each CPU, 0 to 10000. A wait "
        "is sampled with a probability proportional to its duration; 0 only counts waits.",
    )
    min_duration: Duration = duration(
        "1us",
        "Minimum duration of sampled waits, 0s to 4s; shorter waits are only counted.",
        ge="0s",
        le="4s",
    )
    wakers: bool = Field(
        default=False,
        description="Also record which thread ended a wait. This yields more distinct samples "
        "and slows wakeups.",
    )
    causes: bool = Field(
        default=True, description="Record the cause of each wait (disk, pipe, poll and so on)."
    )


class ServiceName(Section):
    """Service names for processes that do not declare one."""

    sources: Annotated[
        list[Literal["container", "unit", "executable"]], BeforeValidator(_words)
    ] = Field(
        default=["container", "unit", "executable"],
        alias="from",
        description="The first of these that applies to a process becomes its service.name, "
        "unless the process publishes one or has OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES "
        "in its environment (see docs/processes.md): container (its name in the pod, in Docker "
        "or podman), unit (the systemd service), executable (the file name; for kernel threads "
        "their purpose, as in [kworker]). Empty: service.name is not derived.",
    )


class Receiver(Section):
    """The sampler of this host."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.RECEIVER

    samples_per_second: int = Field(
        default=19,
        ge=1,
        le=10_000,
        description="Samples per second on each CPU, 1 to 10000. The default is odd to avoid "
        "running in step with timers of 10 or 100 Hz.",
    )
    stacks: Literal["kernel", "user", "both"] = Field(
        default="both",
        description="Sides of stacks to collect. kernel also skips all time in user mode, and "
        "costs the least.",
    )
    user_symbols: Annotated[Literal["off", "names", "lines"], BeforeValidator(_symbols)] = Field(
        default="names",
        description="Detail of user frames beyond file and address: none (off), function names "
        "(names), or also source lines and inlined functions (lines; needs the extra "
        "dwarf). Symbols are read from the files and their installed debug files.",
    )
    max_user_symbol_megabytes: int = Field(
        default=32,
        ge=1,
        le=65_536,
        description="Limit on the memory used by the symbols of user files; large and long-unused "
        "tables are evicted. Files are read one at a time, within three quarters of this limit. A "
        "file that needs more is rejected, and the log shows its size. A table larger than half "
        "the limit is also rejected. With user_symbols: lines, a process that converts DWARF may "
        "use eight times this limit, but at most half of the memory that the cgroup's limit "
        "leaves.",
    )
    user_unwinding: Literal["auto", "frame_pointers"] = Field(
        default="auto",
        description="How to unwind user stacks. auto uses the files' .eh_frame tables where the "
        "kernel and the loader support this, and frame pointers elsewhere; frame_pointers works "
        "only for code built with frame pointers, which most distributions' binaries lack.",
    )
    max_unwind_work: int = Field(
        default=5000,
        ge=100,
        le=1_000_000,
        description="Limit on unwinding one user stack inside the interrupt, in steps of at most "
        "25 ns (see docs/unwinding.md); deeper stacks are truncated.",
    )
    max_unwind_table_megabytes: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Limit on the kernel memory used by the unwind tables of all files; the least "
        "recently used tables are evicted.",
    )
    max_unwind_file_megabytes: int = Field(
        default=40,
        ge=1,
        le=255,
        description="Limit on the unwind table of one file; larger tables are not used.",
    )
    max_frames: int = Field(
        MAX_FRAMES,
        ge=1,
        le=MAX_FRAMES,
        description="Maximum frames per side of a stack (kernel and user), counted from the leaf, "
        "1 to 127.",
    )
    python_frames: Annotated[int, BeforeValidator(_count)] = Field(
        default=PYTHON_FRAMES,
        ge=0,
        le=MAX_FRAMES,
        description="Maximum Python functions per stack, counted from the leaf, 0 to 127; 0 or "
        "off disables Python frames. Python frames have source lines and need CPython 3.11 or "
        "newer (see docs/python.md).",
    )
    off_cpu: Annotated[OffCpu, BeforeValidator(_enabled)] = OffCpu()
    events: list[str] = Field(
        default=[],
        max_length=MAX_EVENTS,
        description="Events to sample in addition to the clock: perf events, such as page-faults, "
        '"context-switches:period=1000" (every 1000th on each CPU) or "cycles:freq=49" (about 49 '
        "samples per second on each CPU; default: samples_per_second); lock-contention; and "
        "tracepoints, such as block_rq_issue (every event, unless a period is set). "
        "`otel-kprofiler record -e help` lists events (see docs/events.md).",
    )
    target_pids: list[Annotated[int, Field(ge=1, le=_MAX_PID)]] = Field(
        default=[],
        description="Processes to sample, as PIDs in the host's pid namespace. Empty: all.",
    )
    target_containers: list[Target] = Field(
        default=[],
        description="Containers to sample, by name (in Docker, in podman, in their pod, or "
        "POD/NAME), or by at least the first four digits of the id. The containers need not "
        "be running yet. If target_containers, target_pods or target_units is set, a sample must "
        "come from one of the named targets and pass all other filters (see docs/processes.md).",
    )
    target_pods: list[Target] = Field(
        default=[],
        description="Kubernetes pods to sample, by UID, name, or NAMESPACE/NAME.",
    )
    target_units: list[Target] = Field(
        default=[],
        description="systemd units to sample, such as nginx.service; .service may be omitted.",
    )
    target_comms: list[Target] = Field(
        default=[],
        description="Names of threads or processes to sample; the name of a process is that of its "
        "main thread. Only the first 15 bytes are compared. Process names need BTF. Empty: all.",
    )
    pin_cpu_ids: str = Field(
        default="", description='CPUs to sample, such as "0-3,8". Empty: all online CPUs.'
    )
    send_idle_frames: bool = Field(
        default=False,
        description="Also sample the idle task. Interrupts on idle CPUs are always sampled.",
    )
    filter_min_process_age: Duration = duration(
        "0s", "Do not sample processes younger than this; 0s samples all."
    )
    reporter_interval: Duration = duration(
        "5s", "Length of a window, whose samples are merged and sent together.", ge="100ms"
    )
    reporter_jitter: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Random variation of each window's length, as a fraction of reporter_interval, "
        "0 to 1, so that hosts do not send simultaneously.",
    )
    monitor_interval: Duration = duration(
        "5s", "Interval at which the agent checks service.limits.", ge="100ms"
    )
    clock_sync_interval: Duration = duration(
        "3m",
        "Interval at which the offset between the kernel's clock and wall-clock time is "
        "measured; 0s measures it only at start.",
    )
    probabilistic_interval: Duration = duration(
        "1m", "Interval at which the agent decides at random whether to sample, 1m to 5m.",
        ge="1m", le="5m",
    )  # fmt: skip
    probabilistic_threshold: int = Field(
        default=100,
        ge=1,
        le=100,
        description="Probability in percent, 1 to 100, that the host samples during a "
        "probabilistic_interval; 100 always samples.",
    )
    map_scale_factor: int = Field(
        default=0,
        ge=0,
        le=8,
        description="Number of times that the ring buffer between kernel and agent is doubled, "
        "0 to 8.",
    )
    loader: Literal["auto", "libbpf", "bcc"] = Field(
        default="auto",
        description="Library that loads the eBPF program; auto prefers libbpf over bcc.",
    )
    bpf_verifier_log_level: int = Field(
        default=0, ge=0, le=2, description="Log level of the kernel's verifier, 0 to 2."
    )
    no_kernel_version_check: bool = Field(
        default=False, description="Also try kernels older than 5.10 instead of refusing them."
    )
    error_mode: Annotated[Literal["propagate", "ignore"], BeforeValidator(lower)] = Field(
        default="propagate",
        description="What to do if sampling cannot start: propagate exits with an error; ignore "
        "logs the error and keeps running without samples.",
    )
    verbose_mode: bool = Field(
        default=False,
        description="Enable debug logs (same as service.telemetry.logs.level: debug).",
    )
    service_name: ServiceName = ServiceName()
    resource: dict[AttributeName, Attribute] = Field(
        default={},
        description="Attributes of every profile's Resource, such as "
        "{deployment.environment.name: dev}. They override detected attributes of host and "
        "process.",
    )

    self_profiled: Annotated[Literal["leave_out", "mark"], BeforeValidator(lower)] = Field(
        default="leave_out",
        description="What to do with on-CPU samples of services that profile themselves with "
        "this package: leave_out drops them (counted as lost, with the cause self_profiled), so "
        "that their CPU time counts only once; mark sends them. In both cases, the Resource of "
        "such a service has the attribute otel_kprofiler.self_profiled (see docs/fleet.md).",
    )
    resources: Annotated[
        Literal["process", "executable", "container", "service", "host"], BeforeValidator(lower)
    ] = Field(
        default="process",
        description="The unit that gets a separate Resource; samples of processes that share a "
        "Resource are merged before they are sent. Coarser units yield fewer series and smaller "
        "requests, and still distinguish threads (see docs/fleet.md).",
    )

    @field_validator("events")
    @classmethod
    def _check_events(cls, texts: list[str]) -> list[str]:
        names = [parse_event(text, 1).name for text in texts]
        if CPU_CLOCK in names:
            raise ValueError(f"{CPU_CLOCK} is always sampled: set samples_per_second instead")
        if len(set(names)) < len(names):
            raise ValueError("an event is selected twice")
        return texts

    @field_validator("pin_cpu_ids")
    @classmethod
    def _check_cpus(cls, value: str) -> str:
        parse_cpu_list(value)
        return value

    @property
    def cpus(self) -> tuple[int, ...]:
        """Returns ``pin_cpu_ids`` as sorted numbers; empty for all online CPUs."""
        return parse_cpu_list(self.pin_cpu_ids)
