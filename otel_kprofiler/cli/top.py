"""``otel-kprofiler top``: show a live view of this host in the terminal."""

import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import click

from otel_kprofiler.analysis import Filter
from otel_kprofiler.cli.cpu_meter import CpuMeter
from otel_kprofiler.cli.end_signals import EndSignals
from otel_kprofiler.cli.named import named_parameters
from otel_kprofiler.cli.sampling_options import EVENT_RATE, Sampling, sampling_options
from otel_kprofiler.cli.screen import Screen, check_terminal
from otel_kprofiler.cli.target_filters import Targets
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.cli.top_page import Size, Status, page, plain_table
from otel_kprofiler.cli.top_state import GROUPING_KEYS, ORDERS, TopState
from otel_kprofiler.cli.top_table import Table
from otel_kprofiler.cli.top_windows import Shown, SlidingWindow
from otel_kprofiler.cli.types import DURATION
from otel_kprofiler.clock import Clock
from otel_kprofiler.host import CPU_CLOCK, Access, parse_event
from otel_kprofiler.model import OFF_CPU, ON_CPU, ProfileKind, Window
from otel_kprofiler.pipeline import (
    DRAIN_INTERVAL_S,
    LIVE_SCHEDULE,
    Pipeline,
    PipelineOptions,
    open_live,
    open_resources,
    open_symbols,
)
from otel_kprofiler.sampling import EbpfSampler

_SHORTEST_S: Final = 1.0
_WINDOW_S: Final = (5.0, 60.0)
"""Default and maximum length of the sliding window when sampling this host, in seconds."""
_WINDOW_OF_TABLE_S: Final = (60.0, 3600.0)
_WITH_TABLE: Final = frozenset({"pids", "comms", "containers", "cpus", "off_cpu", "idle"})
"""Sampling options that can be combined with ``--from``, because they also apply to ClickHouse."""
_PLAIN_ROWS: Final = 20
_KEPT_MESSAGES: Final = 20


@click.command(name="top")
@click.option(
    "--by", type=click.Choice(list(GROUPING_KEYS.values())), default="function",
    show_default=True, help="Initial grouping.",
)  # fmt: skip
@click.option(
    "--sort", "order", type=click.Choice(ORDERS), default="self", show_default=True,
    help="Order of the rows.",
)  # fmt: skip
@click.option(
    "--window", "window_s", type=DURATION,
    help="Length of the sliding window: 1s to 60s (default: 5s), or with --from 1s to 1h (default: "
    "1m).",
)  # fmt: skip
@click.option(
    "-n", "--lines", "rows", type=click.IntRange(1),
    help="Maximum number of rows. Default: as many as fit on the screen, or 20.",
)  # fmt: skip
@click.option(
    "--from", "table", metavar="ADDRESS",
    help="Show profiles from a ClickHouse database instead of sampling this host: "
    "clickhouse://HOST:PORT/DATABASE.",
)  # fmt: skip
@click.option(
    "--service", "services", multiple=True, metavar="NAME",
    help="With --from, show only this service.",
)  # fmt: skip
@click.option(
    "--once", is_flag=True, help="Print one table of the first window as plain text, and exit."
)
@click.option("--batch", is_flag=True, help="Print a table after each window.")
@sampling_options
def command(
    *,
    by: str,
    order: str,
    window_s: float | None,
    rows: int | None,
    table: str | None,
    services: tuple[str, ...],
    once: bool,
    batch: bool,
    **options: Any,
) -> None:
    """Show what is running on this host, based on the last few seconds of samples.

    With --off-cpu, show where threads wait. With -e, show where an event happens.

    \b
      otel-kprofiler top
      otel-kprofiler top --by syscall --stacks kernel
      otel-kprofiler top -p 4242
      otel-kprofiler top --off-cpu --by cause
      otel-kprofiler top -e page-faults
      otel-kprofiler top -e lock-contention --by lock
      otel-kprofiler top --once --by process > processes.txt
      otel-kprofiler top --from clickhouse://localhost:8123/otel --service shop

    Keys: f functions, p processes, t threads, s system calls, c containers, m modules, l lines, b
    BPF programs, v services, w wait causes, k kernel locks. Enter shows callers and callees,
    space freezes the screen, / filters the rows, h shows all keys, and q quits. When all processes
    selected by --pid, --cgroup or --container have exited, the last screen remains visible.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    default_s, longest_s = _WINDOW_S if table is None else _WINDOW_OF_TABLE_S
    window_s = default_s if window_s is None else window_s
    if not _SHORTEST_S <= window_s <= longest_s:
        raise click.UsageError(f"--window must be between 1s and {longest_s:g}s, not {window_s:g}s")
    if once and batch:
        raise click.UsageError("--once cannot be combined with --batch")
    if services and table is None:
        raise click.UsageError("--service needs --from")
    if table is not None:
        _refuse_settings_of_sampling()
    is_plain = once or batch
    if not is_plain:
        check_terminal()
    kind = _choose_kind(**options)
    ended_by: int | None = None
    with EndSignals() as signals:
        live: Live | Table
        idle = options["idle"] or kind != OFF_CPU
        if table is None:
            sampling = Sampling(**options, on_cpu=kind == ON_CPU)
            live = Live(sampling, SlidingWindow(window_s, kind, idle=idle))
        else:
            live = Table(table, _choose(services, **options), kind, window_s, idle=idle)
        with live, _hold_messages(is_plain):
            signals.listen(live.request_end)
            live.start()
            state = TopState(by, order)
            if is_plain:
                _print(live, signals, state, window_s, rows or _PLAIN_ROWS, once=once)
            elif not _show(live, signals, state, rows):
                ended_by = signal.SIGHUP
    ended_by = signals.received or ended_by
    if ended_by and ended_by != signal.SIGINT:
        sys.exit(128 + ended_by)


def _choose_kind(*, off_cpu: bool, events: Sequence[str], **_: object) -> ProfileKind:
    if off_cpu and events:
        raise click.UsageError(
            "--off-cpu cannot be combined with -e: top shows only one kind of sample at a time"
        )
    if len(events) > 1:
        raise click.UsageError("top shows a single event: pass -e only once")
    if off_cpu:
        return OFF_CPU
    specs = [parse_event(text, EVENT_RATE) for text in events]
    return next((spec.kind for spec in specs if spec.name != CPU_CLOCK), ON_CPU)


class Live:
    """Samples this host continuously until the context exits.

    Attributes:
        sliding: the last few seconds of samples.
        status: contents of the header line, kept up to date.
        seconds: total length of the windows sampled so far, in seconds.
        on_woken: called during a long :meth:`step`, soon after :meth:`wake`.
    """

    def __init__(self, sampling: Sampling, sliding: SlidingWindow) -> None:
        access, clock = Access(), Clock()
        host = os.uname()
        self.sliding = sliding
        rate = "waits" if sampling.off_cpu else f"{sampling.clock_rate} Hz"
        rate = ", ".join(map(str, sampling.specs)) or rate
        self.status = Status(host.nodename, host.release, rate)
        self.seconds = 0.0
        self.on_woken: Callable[[], None] | None = None
        self._woken = threading.Event()
        self._targets: Targets | None = None
        targets = sampling.find_targets(access)
        if sampling.has_targets:
            self._targets = targets
        self.pipeline: Pipeline[EbpfSampler] = open_live(
            sampling.config(access, targets, None),
            LIVE_SCHEDULE,
            self._add,
            access=access,
            clock=clock,
            resources=open_resources(access, clock, {}),
            symbolizer=open_symbols(access),
            user_names=sampling.open_user_names(),
            loader=sampling.loader,
            options=PipelineOptions(pause=self._pause),
        )
        self._meter = CpuMeter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipeline.close()

    def start(self) -> None:
        """Start sampling."""
        self.pipeline.start()

    def shown(self) -> Shown:
        """Returns the samples in the sliding window."""
        return self.sliding.shown()

    def wake(self) -> None:
        """End the wait in :meth:`step`; callable from any thread or signal handler."""
        self._woken.set()
        self.pipeline.wake()

    def request_end(self) -> None:
        """Interrupt a running :meth:`step`; callable from any thread or signal handler."""
        self._woken.set()
        self.pipeline.request_stop()

    def step(self) -> bool:
        """Sample briefly, or until :meth:`wake` is called. Return whether there is new data."""
        if self.status.has_ended:
            self._woken.wait(DRAIN_INTERVAL_S)
            self._woken.clear()
            return False
        self._woken.clear()
        last = self.seconds
        self.pipeline.step(DRAIN_INTERVAL_S)
        if self._targets and self._targets.have_ended(self.pipeline.sampler):
            self.pipeline.stop()
            self.status.has_ended = True
            return True
        return self.seconds != last

    def _pause(self) -> None:
        if self.on_woken and self._woken.is_set():
            self._woken.clear()
            self.on_woken()

    def _add(self, window: Window) -> None:
        self.sliding.add(window)
        self.seconds += (window.end_unix_ns - window.start_unix_ns) / 1e9
        self.status.own_share = self._meter.share()
        self.status.remarks = self.pipeline.remarks()


def _choose(
    services: tuple[str, ...],
    *,
    pids: tuple[int, ...],
    comms: tuple[str, ...],
    containers: tuple[str, ...],
    cpus: tuple[int, ...],
    **_: object,
) -> Filter:
    """Converts the options that select targets on a host into a filter for ClickHouse samples."""
    return Filter(
        processes=tuple(map(str, pids)), threads=comms, containers=containers,
        services=services, cpus=cpus,
    )  # fmt: skip


def _refuse_settings_of_sampling() -> None:
    for parameter in named_parameters():
        if parameter.name in Sampling.__dataclass_fields__.keys() - _WITH_TABLE:
            raise click.UsageError(f"--from cannot be combined with {parameter.opts[-1]}")


def _show(live: Live | Table, signals: EndSignals, state: TopState, rows: int | None) -> bool:
    """Show the screen until the user quits. Return False if the terminal was closed."""
    color = not os.environ.get("NO_COLOR")
    is_new = True
    with Screen(live.wake) as screen:

        def refresh() -> None:
            nonlocal is_new
            for key in screen.take_keys():
                state.press(key, live.shown())
                is_new = True
            if state.has_quit:
                live.request_end()
            elif is_new or screen.is_empty:
                columns, lines = screen.size()
                size = Size(columns, lines, rows)
                drawn = page(state, live.shown(), live.status, size, color=color)
                is_new = not screen.draw(drawn)
            else:
                screen.flush()

        live.on_woken = refresh
        while not (signals.received or state.has_quit or screen.is_closed):
            refresh()
            is_new = live.step() or is_new
            screen.stop_if_asked(has_ended=lambda: signals.received is not None)
        live.on_woken = None
        return not screen.is_closed


def _print(
    live: Live | Table,
    signals: EndSignals,
    state: TopState,
    window_s: float,
    rows: int,
    *,
    once: bool,
) -> None:
    printed_s = 0.0
    while not (signals.received or live.status.has_ended):
        live.step()
        if live.seconds - printed_s < window_s and not live.status.has_ended:
            continue
        if printed_s:
            click.echo()
        printed_s = live.seconds
        click.echo("\n".join(plain_table(state, live.shown(), live.status, rows)))
        if once:
            return


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=_KEPT_MESSAGES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def _hold_messages(is_plain: bool) -> Iterator[None]:
    if is_plain:
        yield
        return
    kept, root = _Kept(), logging.getLogger()
    root.addHandler(kept)
    try:
        yield
    finally:
        root.removeHandler(kept)
        for line in kept.lines:
            say(line, err=True)
