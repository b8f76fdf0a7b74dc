"""The options for commands that sample this host."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

import click

from otel_kprofiler.bpf import VMLINUX_BTF, list_tracepoints
from otel_kprofiler.cli.target_filters import Targets, find_namespace, find_targets
from otel_kprofiler.cli.types import CPU_LIST
from otel_kprofiler.host import (
    CPU_CLOCK,
    LOCK_EVENT,
    VALUES,
    Access,
    AnyEventSpec,
    find_repeated_event,
    list_events,
    parse_event,
)
from otel_kprofiler.model import PYTHON_FRAMES
from otel_kprofiler.pipeline import DRAIN_INTERVAL_S
from otel_kprofiler.sampling import Groups, OffCpuConfig, SamplerConfig
from otel_kprofiler.symbols import CodeSink, UserNames, UserSymbolSettings, open_user_names

CLOCK_RATE: Final = 99
EVENT_RATE: Final = 999
"""Default sampling rate for an event (``-e``) on each CPU, per second. At a lower rate, a sample
would represent thousands of events, some caused by other programs."""
_SYMBOL_BYTES: Final = 256 << 20
CommandT = TypeVar("CommandT", bound=Callable[..., None])


def _parse_events(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    if "help" in texts:
        click.echo(_describe_events())
        ctx.exit()
    for text in texts:
        try:
            parse_event(text, 1)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return texts


def _describe_events() -> str:
    lines = [f"{CPU_CLOCK:24} time on a CPU: the default"]
    reasons: dict[str, list[str]] = {}
    for name, meaning, problem in list_events(Access()):
        lines.append(f"{name:24} {meaning}" + (" (not available)" if problem else ""))
        if problem:
            fix = f"\n  fix: {problem.hint}" if problem.hint else ""
            reasons.setdefault(str(problem).replace(name, "EVENT") + fix, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"\n{', '.join(names)}: {reason}")
    lines.insert(
        1, f"{LOCK_EVENT:24} waits for kernel locks, weighted by duration (since Linux 5.19)"
    )
    lines += ["", *_describe_tracepoints()]
    return "\n".join(lines)


def _describe_tracepoints() -> Iterator[str]:
    try:
        number = f"{len(list_tracepoints(Access().read_bytes(VMLINUX_BTF))):,} "
    except OSError:
        number = ""
    yield f"{number}kernel tracepoints, such as sched:sched_process_fork or, for a system call,"
    yield "sys_enter:openat; the subsystem may be omitted. Events count 1; these count bytes:"
    yield ", ".join(VALUES)


COMM_OPTION: Final = click.option(
    "--comm", "comms", multiple=True, metavar="NAME",
    help="Select only threads with this name, and processes whose main thread has this name. Only "
    "the first 15 characters are compared.",
)  # fmt: skip
USER_SYMBOLS_OPTION: Final = click.option(
    "--user-symbols", "user_symbols", type=click.Choice(["off", "names", "lines"]),
    default="names", show_default=True,
    help="Level of detail for user frames. off: only file and address. names: also function names. "
    "lines: also source lines and inlined functions (needs the dwarf extra).",
)  # fmt: skip
PYTHON_OPTION: Final = click.option(
    "--python/--no-python", "python", default=True, show_default=True,
    help="Show Python functions and lines in processes that run CPython 3.11 or newer.",
)  # fmt: skip
_OPTIONS: Final = (
    click.option(
        "-F", "--rate", type=click.IntRange(1, 10_000), default=None,
        help=f"Samples per second on each CPU. Default: {CLOCK_RATE} for the clock, {EVENT_RATE} "
        "for other events.",
    ),
    click.option(
        "-e", "--event", "events", multiple=True, metavar="EVENT", callback=_parse_events,
        help="Sample on this event instead of the clock. Events include page-faults, "
        "context-switches, cpu-migrations, lock-contention, cycles, and tracepoints such as "
        "block_rq_issue or sys_enter:openat. EVENT:period=N samples every Nth event, and "
        "EVENT:freq=N takes about N samples per second on each CPU. May be repeated. `-e help` "
        "lists all events, and explains why any are unavailable on this host.",
    ),
    click.option(
        "-c", "--period", "period", type=click.IntRange(1), default=None, metavar="N",
        help="For each -e without period or freq, sample every Nth event. By default, tracepoints "
        "are sampled at every event, and other events --rate times per second.",
    ),
    click.option(
        "-p", "--pid", "pids", type=click.IntRange(1), multiple=True,
        help="Sample only this process and its descendants. Sampling ends when all of them have "
        "exited. All filters may be repeated. A sample must match at least one value of each "
        "filter.",
    ),
    COMM_OPTION,
    click.option(
        "--cgroup", "cgroups", multiple=True, metavar="PATH",
        help="Sample only this cgroup (v2) and its descendants. Sampling ends when all their "
        "processes have exited.",
    ),
    click.option(
        "--container", "containers", multiple=True, metavar="NAME|ID",
        help="Sample only this container, given by its name or a prefix of its ID. Sampling ends "
        "when the container stops.",
    ),
    click.option(
        "--pod", "pods", multiple=True, metavar="NAME|UID",
        help="Sample only this Kubernetes pod, given as NAME, NAMESPACE/NAME or UID. Sampling ends "
        "when the pod stops.",
    ),
    click.option(
        "--unit", "units", multiple=True, metavar="NAME",
        help="Sample only this systemd unit, such as nginx.service. Sampling ends when the unit's "
        "last process exits.",
    ),
    click.option(
        "--cpus", type=CPU_LIST, default=(), metavar="LIST",
        help="Sample only these CPUs, for example 0-3,8.",
    ),
    click.option(
        "--stacks", type=click.Choice(["kernel", "user", "both"]), default="both",
        show_default=True,
        help="Stacks to collect. With kernel, time in user mode is not sampled.",
    ),
    USER_SYMBOLS_OPTION,
    PYTHON_OPTION,
    click.option(
        "--off-cpu", "off_cpu", is_flag=True,
        help="Also sample waiting threads: where, for what and for how long they wait.",
    ),
    click.option(
        "--off-cpu-rate", "off_cpu_rate", type=click.IntRange(1, 10_000), default=20,
        show_default=True,
        help="Average number of wait samples per second on each CPU. Long waits are always "
        "sampled.",
    ),
    click.option("--wakers", is_flag=True, help="Also record which thread woke each waiter."),
    click.option(
        "--loader", type=click.Choice(["auto", "libbpf", "bcc"]), default="auto",
        help="Library that loads the eBPF program. auto prefers libbpf to bcc.",
    ),
    click.option(
        "--idle", is_flag=True,
        help="Also sample the idle task, and show waits in which a thread has no work to do (poll, "
        "accept, sleep and so on).",
    ),
)  # fmt: skip


def sampling_options(command: CommandT) -> CommandT:
    """Add the :class:`Sampling` options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Sampling:
    """The values of the options that determine what is sampled, and how."""

    pids: tuple[int, ...]
    comms: tuple[str, ...]
    cgroups: tuple[str, ...]
    containers: tuple[str, ...]
    pods: tuple[str, ...]
    units: tuple[str, ...]
    cpus: tuple[int, ...]
    stacks: Literal["kernel", "user", "both"]
    user_symbols: Literal["off", "names", "lines"]
    python: bool
    off_cpu: bool
    off_cpu_rate: int
    wakers: bool
    loader: str
    idle: bool
    events: tuple[str, ...] = ()
    period: int | None = None
    on_cpu: bool | None = None
    rate: int | None = None

    def __post_init__(self) -> None:
        if self.period is not None and not self.events:
            raise click.UsageError("-c needs -e EVENT")
        if self.wakers and not self.off_cpu:
            raise click.UsageError("--wakers needs --off-cpu")
        specs = self.specs
        if twice := find_repeated_event(specs):
            raise click.UsageError(f"event {twice} is selected twice")
        if self.on_cpu is False and any(spec.name == CPU_CLOCK for spec in specs):
            raise click.UsageError(f"-e {CPU_CLOCK} cannot be used with --no-on-cpu")
        if self.on_cpu is False and not self.off_cpu and not specs:
            raise click.UsageError("--no-on-cpu needs --off-cpu or -e")

    @property
    def specs(self) -> tuple[AnyEventSpec, ...]:
        """Returns the events given with ``-e``, with their periods and rates."""
        rates = self.rate or EVENT_RATE, self.period or 0, self.clock_rate
        return tuple(parse_event(text, *rates) for text in self.events)

    @property
    def clock_rate(self) -> int:
        """Returns the rate of on-CPU samples on each CPU, which ``-e cpu-clock`` may override."""
        return self.rate or CLOCK_RATE

    @property
    def has_targets(self) -> bool:
        """Returns whether the options select processes."""
        return bool(
            self.pids or self.comms or self.cgroups or self.containers or self.pods or self.units
        )

    def find_targets(self, access: Access) -> Targets:
        """Finds the processes to sample; raises ``KProfilerError`` if a target does not exist."""
        return find_targets(
            access,
            pids=self.pids,
            comms=self.comms,
            cgroups=self.cgroups,
            containers=self.containers,
            groups=[
                *(Groups(pods=(pod,)) for pod in self.pods),
                *(Groups(units=(unit,)) for unit in self.units),
            ],
            loader=self.loader,
        )

    def config(self, access: Access, targets: Targets, child_pid: int | None) -> SamplerConfig:
        """Returns the sampler's configuration; ``child_pid`` is the pid of the recorded command."""
        waits = OffCpuConfig(
            samples_per_second=self.off_cpu_rate,
            wakers=self.wakers,
            leaves_out="" if self.comms else "process",
        )
        clocks = [spec for spec in self.specs if spec.name == CPU_CLOCK]
        config = SamplerConfig(
            samples_per_second=clocks[0].rate if clocks else self.clock_rate,
            stacks=self.stacks,
            python_frames=PYTHON_FRAMES if self.python else 0,
            pin_cpu_ids=self.cpus,
            send_idle_frames=self.idle,
            drain_interval_s=DRAIN_INTERVAL_S,
            target_namespace=find_namespace(access),
            on_cpu=bool(clocks or not self.events) if self.on_cpu is None else self.on_cpu,
            off_cpu=waits if self.off_cpu else None,
            events=tuple(spec for spec in self.specs if spec.name != CPU_CLOCK),
        )
        if child_pid is not None and (config.off_cpu or config.events):
            # Per-task perf events miss context switches, so sample all CPUs and filter by pid.
            return replace(config, target_pids=(child_pid,), target_descendants=True)
        config = replace(config, child_pid=child_pid)
        return targets.apply(config, access) if self.has_targets else config

    def open_user_names(self, code_sink: CodeSink | None = None) -> UserNames | None:
        """Opens a resolver for user frames. Returns None if the options disable user symbols.

        The caller must close the resolver, or pass it to a pipeline, which closes it. ``code_sink``
        receives each name that is resolved for JIT-compiled code.
        """
        return open_names(self.user_symbols, code_sink)


def open_names(
    detail: Literal["off", "names", "lines"], code_sink: CodeSink | None = None
) -> UserNames | None:
    """Opens a user frame resolver that, unlike the agent's, may block on file access."""
    settings = UserSymbolSettings(
        detail=detail, max_bytes=_SYMBOL_BYTES, cpu_share=1.0, may_block=True
    )
    return open_user_names(settings, code_sink)
