"""The schema of ``receivers: kprofiler:``, which uses keys from opentelemetry-ebpf-profiler."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints, WrapValidator, field_validator

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.durations import Duration
from otel_kprofiler.config.section import Section, duration, lower
from otel_kprofiler.host import (
    CPU_CLOCK,
    MAX_EVENTS,
    find_repeated_event,
    parse_cpu_list,
    parse_event,
)
from otel_kprofiler.model import MAX_FRAMES, PYTHON_FRAMES

_MAX_PID = 4_194_304  # PID_MAX_LIMIT, include/linux/threads.h
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1  # AnyValue.int_value, opentelemetry/proto/common/v1

Target = Annotated[str, StringConstraints(min_length=1)]
AttributeName = Annotated[str, StringConstraints(min_length=1)]


def _attribute(value: Any, _: Any) -> Any:
    """Check a value's type, so that one error is reported instead of one per allowed type."""
    items = value if isinstance(value, list) else [value]
    kinds = {type(item) for item in items}
    if not kinds <= {str, bool, int, float} or len(kinds) > 1:
        raise ValueError("should be a string, number or Boolean, or a list of values of one type")
    if any(isinstance(item, int) and not _MIN_INT64 <= item <= _MAX_INT64 for item in items):
        raise ValueError("should be a number of at most 64 bits, or a string")
    return value


def _symbols(value: Any) -> Any:
    """Convert false to ``off``, because YAML 1.1 parsers read ``off`` as false."""
    return "off" if value is False else lower(value)


def _count(value: Any) -> Any:
    """Convert ``off`` to 0. YAML 1.1 parses an unquoted ``off`` as false."""
    return 0 if value is False or value in ("off", "false") else value


def _words(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Scalar = str | bool | int | float
Attribute = Annotated[
    _Scalar | list[str] | list[bool] | list[int] | list[float], WrapValidator(_attribute)
]


def _enabled(value: Any) -> Any:
    """Convert a Boolean, possibly given as text, to a section with only the key ``enabled``."""
    words = {"true": True, "on": True, "false": False, "off": False}
    value = words.get(value.lower(), value) if isinstance(value, str) else value
    return {"enabled": value} if isinstance(value, bool) else value


class OffCpu(Section):
    """Sampling of waiting threads."""

    enabled: bool = Field(
        default=False,
        description="Also sample waiting threads, and measure the exact off-CPU time of each "
        "process. This costs CPU time at every context switch (see docs/off-cpu.md).",
    )
    samples_per_second_per_cpu: int = Field(
        default=20,
        ge=0,
        le=10_000,
        description="Average number of wait samples per second on each CPU, 0 to 10000. Long waits "
        "are always sampled, and shorter waits with a probability proportional to their duration. "
        "With 0, waits are counted but not sampled.",
    )
    min_duration: Duration = duration(
        "1us",
        "Minimum duration of sampled waits, 0s to 4s. Shorter waits are counted but not sampled.",
        ge="0s",
        le="4s",
    )
    wakers: bool = Field(
        default=False,
        description="Also record the thread that woke each waiting thread, at the cost of slower "
        "wakeups and more distinct samples.",
    )
    causes: bool = Field(
        default=True, description="Record the cause of each wait (disk, pipe, poll and so on)."
    )


class ServiceName(Section):
    """Service names for processes that do not declare a name."""

    sources: Annotated[
        list[Literal["container", "unit", "executable"]], BeforeValidator(_words)
    ] = Field(
        default=["container", "unit", "executable"],
        alias="from",
        description="Sources of service.name, in order of preference. container: the container's "
        "name in its pod, in Docker or in podman. unit: the name of the systemd service. "
        "executable: the name of the executable file or, for a kernel thread, its purpose, as in "
        "[kworker]. The list is used only if the process does not publish a service.name, "
        "and its environment does not set one in OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES "
        "(see docs/processes.md). If the list is empty, no name is derived.",
    )


class Receiver(Section):
    """Settings for the receiver, which samples this host."""

    unsupported: ClassVar[Mapping[str, str]] = unsupported_keys.RECEIVER

    samples_per_second: int = Field(
        default=19,
        ge=1,
        le=10_000,
        description="Samples per second on each CPU, 1 to 10000. The default of 19 "
        "prevents sampling in lockstep with 10 Hz or 100 Hz timers.",
    )
    stacks: Literal["kernel", "user", "both"] = Field(
        default="both",
        description="Stacks to collect. kernel has the lowest overhead, because time "
        "in user mode is not sampled.",
    )
    user_symbols: Annotated[Literal["off", "names", "lines"], BeforeValidator(_symbols)] = Field(
        default="names",
        description="Level of detail for user frames. off: only file and address. names: also "
        "function names. lines: also source lines and inlined functions (needs the dwarf extra). "
        "Symbols are read from executables, libraries and their installed debug files.",
    )
    max_user_symbol_megabytes: int = Field(
        default=32,
        ge=1,
        le=65_536,
        description="Limit on the memory for symbols from user-space binaries. Large tables, and "
        "tables that were not used recently, are evicted first. Files are read one at a time. A "
        "file is rejected if reading it needs more than three quarters of this limit, and the log "
        "shows the required size. A file whose table exceeds half of the limit is also rejected. "
        "With user_symbols: lines, a separate process converts DWARF, and may use up to eight "
        "times this limit, but at most half of the memory still available in the cgroup.",
    )
    user_unwinding: Literal["auto", "frame_pointers"] = Field(
        default="auto",
        description="How to unwind user stacks. auto: with the files' .eh_frame tables if the "
        "kernel and the loader support them, otherwise with frame pointers. frame_pointers: only "
        "with frame pointers, which most distributions' binaries lack.",
    )
    max_unwind_work: int = Field(
        default=5000,
        ge=100,
        le=1_000_000,
        description="Maximum cost of unwinding one user stack. One unit is at most 25 ns of "
        "interrupt time (see docs/unwinding.md). Deeper stacks are truncated.",
    )
    max_unwind_table_megabytes: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Limit on the kernel memory used by the unwind tables for all files. When the "
        "limit is reached, the least recently used tables are evicted.",
    )
    max_unwind_file_megabytes: int = Field(
        default=40,
        ge=1,
        le=255,
        description="Limit on the size of one file's unwind table. Larger tables are not used.",
    )
    max_frames: int = Field(
        MAX_FRAMES,
        ge=1,
        le=MAX_FRAMES,
        description="Maximum number of kernel frames and of user frames per stack, 1 to 127. "
        "The frames nearest to the leaf are kept.",
    )
    python_frames: Annotated[int, BeforeValidator(_count)] = Field(
        default=PYTHON_FRAMES,
        ge=0,
        le=MAX_FRAMES,
        description="Maximum number of Python functions per stack, 0 to 127. The functions nearest "
        "to the leaf are kept. 0 or off disables Python frames. Python frames include source lines "
        "and require CPython 3.11 or newer (see docs/python.md).",
    )
    off_cpu: Annotated[OffCpu, BeforeValidator(_enabled)] = OffCpu()
    events: list[str] = Field(
        default=[],
        max_length=MAX_EVENTS,
        description="Events to sample in addition to the clock: perf events, lock-contention and "
        'tracepoints (see docs/events.md). For example, "context-switches:period=1000" samples '
        'every 1000th context switch on each CPU, and "cycles:freq=49" takes about 49 samples per '
        "second on each CPU. The default frequency is the value of samples_per_second. For a "
        "tracepoint such as block_rq_issue, every event is sampled unless a period is set. "
        "`otel-kprofiler record -e help` lists all events.",
    )
    target_pids: list[Annotated[int, Field(ge=1, le=_MAX_PID)]] = Field(
        default=[],
        description="Processes to sample, as PIDs in the host's pid namespace. If empty, all "
        "processes are sampled.",
    )
    target_containers: list[Target] = Field(
        default=[],
        description="Containers to sample, each specified by name or by at least the first four "
        "digits of its ID. The name may be POD/NAME, or the container's name in Docker, podman or "
        "its pod. The containers need not be running yet. If target_containers, "
        "target_pods or target_units is set, a sample must come from one of these targets and pass "
        "all other filters (see docs/processes.md).",
    )
    target_pods: list[Target] = Field(
        default=[],
        description="Kubernetes pods to sample, each given by its UID, its name, or "
        "NAMESPACE/NAME.",
    )
    target_units: list[Target] = Field(
        default=[],
        description="systemd units to sample, such as nginx.service. The .service suffix may be "
        "omitted.",
    )
    target_comms: list[Target] = Field(
        default=[],
        description="Names of the threads and processes to sample. A process has the name of its "
        "main thread. Only the first 15 bytes are compared. Matching process names requires BTF. "
        "If the list is empty, all threads are sampled.",
    )
    pin_cpu_ids: str = Field(
        default="",
        description='CPUs to sample, such as "0-3,8". If empty, all online CPUs are sampled.',
    )
    send_idle_frames: bool = Field(
        default=False,
        description="Also sample the idle task. Interrupts on idle CPUs are sampled even if this "
        "key is false.",
    )
    filter_min_process_age: Duration = duration(
        "0s", "Minimum age of the processes to sample. With 0s, all processes are sampled."
    )
    reporter_interval: Duration = duration(
        "5s",
        "Length of a window. The samples taken in a window are merged and sent together.",
        ge="100ms",
    )
    reporter_jitter: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Random variation of each window's length, as a fraction of reporter_interval, "
        "0 to 1. The variation prevents hosts from sending at the same time.",
    )
    monitor_interval: Duration = duration(
        "5s",
        "Interval at which the agent compares its resource usage with service.limits.",
        ge="100ms",
    )
    clock_sync_interval: Duration = duration(
        "3m",
        "Interval at which the agent measures the offset between the kernel's clock and wall-clock "
        "time. With 0s, the agent measures the offset only at startup.",
    )
    probabilistic_interval: Duration = duration(
        "1m", "Interval at which the agent decides at random whether to sample, 1m to 5m.",
        ge="1m", le="5m",
    )  # fmt: skip
    probabilistic_threshold: int = Field(
        default=100,
        ge=1,
        le=100,
        description="Probability that the agent samples during a probabilistic_interval, as "
        "a percentage from 1 to 100.",
    )
    map_scale_factor: int = Field(
        default=0,
        ge=0,
        le=8,
        description="Number of times to double the size of the ring buffer between the kernel and "
        "the agent, 0 to 8.",
    )
    loader: Literal["auto", "libbpf", "bcc"] = Field(
        default="auto",
        description="Library that loads the eBPF program. auto prefers libbpf to bcc.",
    )
    bpf_verifier_log_level: int = Field(
        default=0, ge=0, le=2, description="Log level of the kernel's BPF verifier, 0 to 2."
    )
    no_kernel_version_check: bool = Field(
        default=False, description="Try to sample even on kernels older than 5.10."
    )
    error_mode: Annotated[Literal["propagate", "ignore"], BeforeValidator(lower)] = Field(
        default="propagate",
        description="What to do if sampling cannot start. propagate: exit with an error. ignore: "
        "log the error and keep running without samples.",
    )
    verbose_mode: bool = Field(
        default=False,
        description="Write debug messages to the log (same as service.telemetry.logs.level: "
        "debug).",
    )
    service_name: ServiceName = ServiceName()
    resource: dict[AttributeName, Attribute] = Field(
        default={},
        description="Attributes to add to the Resource of every profile, such as "
        "{deployment.environment.name: dev}. These attributes override attributes detected for "
        "the host and the process.",
    )

    self_profiled: Annotated[Literal["leave_out", "mark"], BeforeValidator(lower)] = Field(
        default="leave_out",
        description="How to treat on-CPU samples from services that profile themselves with this "
        "package. leave_out: drop the samples and count them as lost with the cause self_profiled, "
        "so that the CPU time is not reported twice. mark: send the samples. In both cases, the "
        "service's Resource has the otel_kprofiler.self_profiled attribute (see "
        "docs/fleet.md).",
    )
    resources: Annotated[
        Literal["process", "executable", "container", "service", "host"], BeforeValidator(lower)
    ] = Field(
        default="process",
        description="What each Resource describes. Samples from processes sharing a Resource are "
        "merged before they are sent. The default, process, results in the most series and the "
        "largest requests. Samples still identify their threads (see docs/fleet.md).",
    )

    @field_validator("events")
    @classmethod
    def _check_events(cls, texts: list[str]) -> list[str]:
        specs = [parse_event(text, 1) for text in texts]
        if any(spec.name == CPU_CLOCK for spec in specs):
            raise ValueError(f"{CPU_CLOCK} is always sampled: set samples_per_second instead")
        if twice := find_repeated_event(specs):
            raise ValueError(f"event {twice} is selected twice")
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
