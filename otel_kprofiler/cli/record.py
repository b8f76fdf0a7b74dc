"""``otel-kprofiler record``: record to a file or a receiver."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final, Literal

import click

from otel_kprofiler.cli.output import Output
from otel_kprofiler.cli.progress import Progress, open_progress
from otel_kprofiler.cli.raw import RawOutput
from otel_kprofiler.cli.sending import SCHEDULE, Sending
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.cli.types import CpuListType, DurationType
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import FORMATS, select_modules
from otel_kprofiler.host import Access
from otel_kprofiler.model import KERNEL_SIDE, Account, Losses, Window
from otel_kprofiler.pipeline import (
    DRAIN_INTERVAL_S,
    Pipeline,
    WindowSchedule,
    WindowSink,
    open_live,
    open_resources,
    open_symbols,
    replay,
)
from otel_kprofiler.recording import Recording, ReplaySampler
from otel_kprofiler.sampling import EbpfSampler, HeldCommand, SamplerConfig

# A single window, so that each output is one profile.
_WHOLE_RECORDING: Final = WindowSchedule(2**62)
_DEFAULT_DURATION_S: Final = 10.0


@click.command(name="record")
@click.option(
    "-d",
    "--duration",
    type=DurationType(),
    help="Duration, such as 10s or 1m30s. Default: 10s, or until COMMAND ends.",
)
@click.option(
    "-F",
    "--rate",
    type=click.IntRange(1, 10_000),
    default=99,
    show_default=True,
    help="Samples per second on each CPU.",
)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    help="Output file; - is standard output. Default: kernel.html.",
)
@click.option(
    "--export",
    "address",
    metavar="URL",
    help="Send to an OTLP receiver instead: grpc://HOST:PORT, grpcs://, http:// or https://. "
    "OTEL_EXPORTER_OTLP_[PROFILES_]* set everything else.",
)
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice([row.name for row in FORMATS]),
    help="Output format. Default: by the file's suffix.",
)
@click.option("-p", "--pid", "pids", type=int, multiple=True, help="Only this process; repeatable.")
@click.option(
    "--cpus", type=CpuListType(), default=(), metavar="LIST", help="Only these CPUs: 0-3,8."
)
@click.option(
    "--stacks",
    type=click.Choice(["kernel", "user", "both"]),
    default="kernel",
    show_default=True,
    help="Sides of stacks to collect. User frames are files and addresses.",
)
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="NAME",
    help="Keep only stacks with code of this module, loadable or built in; repeatable.",
)
@click.option(
    "--loader",
    type=click.Choice(["auto", "libbpf", "bcc"]),
    default="auto",
    help="Library that loads the eBPF program; auto prefers libbpf over bcc.",
)
@click.option("--idle", is_flag=True, help="Sample the idle task too.")
@click.option(
    "--raw",
    "raw_path",
    metavar="FILE",
    help="Also write raw samples, with everything needed to replay them anywhere.",
)
@click.option(
    "--replay",
    "replay_path",
    metavar="FILE",
    help="Replay a file written by --raw instead of sampling.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.argument("words", nargs=-1, metavar="[-- COMMAND ...]")
def command(
    *,
    duration: float | None,
    rate: int,
    path: str | None,
    address: str | None,
    form: str | None,
    pids: tuple[int, ...],
    cpus: tuple[int, ...],
    stacks: Literal["kernel", "user", "both"],
    modules: tuple[str, ...],
    loader: str,
    idle: bool,
    raw_path: str | None,
    replay_path: str | None,
    force: bool,
    words: tuple[str, ...],
) -> None:
    """Profile this host, or COMMAND and its children, into a file.

    \b
      otel-kprofiler record -d 10s -o kernel.html
      otel-kprofiler record -o build.folded -- make -j2
      otel-kprofiler record -p 4242 -d 30s -o server.otlp
      otel-kprofiler record -d 1m --export grpc://127.0.0.1:4317

    Ctrl-C ends the recording early and writes what was recorded. A COMMAND that is still running
    after the duration is terminated.
    """  # noqa: D301 - \b tells click not to wrap the paragraph
    if words and (pids or cpus):
        raise click.UsageError("a COMMAND cannot be combined with --pid or --cpus")
    if replay_path and (words or raw_path):
        raise click.UsageError("--replay cannot be combined with a COMMAND or --raw")
    if address and (path or form or modules):
        raise click.UsageError("--export cannot be combined with --output, --format or --module")
    path = path or "kernel.html"
    windows: list[Window] = []
    with ExitStack() as stack:
        sending = stack.enter_context(Sending(address)) if address else None
        output = None if sending else stack.enter_context(Output(path, form, force=force))
        schedule = SCHEDULE if sending else _WHOLE_RECORDING
        sink = sending or windows.append
        if replay_path:
            session = Session(_replay(replay_path, schedule, sink))
        else:
            held = stack.enter_context(HeldCommand(words)) if words else None
            config = SamplerConfig(
                samples_per_second=rate,
                stacks=stacks,
                pin_cpu_ids=cpus,
                send_idle_frames=idle,
                target_pids=pids,
                drain_interval_s=DRAIN_INTERVAL_S,
                child_pid=held.pid if held else None,
            )
            access, clock = Access(), Clock()
            raw = raw_path and stack.enter_context(RawOutput(raw_path, access, force=force))
            limit = _DEFAULT_DURATION_S if duration is None and not words else duration
            pipeline = open_live(
                config,
                schedule,
                sink,
                access=access,
                clock=clock,
                resources=open_resources(
                    access, clock, {}, on_new=raw.add_process if raw else None
                ),
                symbolizer=open_symbols(access, event_sink=raw.add_event if raw else None),
                loader=loader,
                raw_sink=raw.add_records if raw else None,
            )
            session = Session(pipeline, held)
            with open_progress(limit or float("inf")) as progress:
                session.run(limit, progress)
            if raw:
                raw.finish(clock, pipeline.sampler)
        if output:
            output.write(_select(windows, modules) if modules else windows)
    if sending:
        sending.check()
        say(session.sent(sending), err=True)
    elif output:
        say(session.summary(output, windows), err=True)


def _select(windows: Sequence[Window], modules: Sequence[str]) -> list[Window]:
    selected = select_modules(windows, modules)
    kept, count = (sum(w.sample_count for w in part) for part in (selected, windows))
    say(f"{kept:,} of {count:,} samples have code of {' or '.join(modules)}", err=True)
    return selected


def _replay(path: str, schedule: WindowSchedule, sink: WindowSink) -> Pipeline[ReplaySampler]:
    try:
        recording = Recording(path)
    except OSError as error:
        raise KProfilerError(f"cannot read {path}: {error.strerror}") from error
    with closing(recording):
        return replay(recording, schedule, sink)


@dataclass(slots=True)
class Session:
    """A recording in progress, and how it ended."""

    pipeline: Pipeline[EbpfSampler] | Pipeline[ReplaySampler]
    held: HeldCommand | None = None
    seconds: float = 0.0
    interrupted: bool = False

    def run(self, limit_s: float | None, progress: Progress) -> None:
        """Sample until the time limit, the end of the command, or Ctrl-C."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self.pipeline.start()
            started = time.monotonic()
            if self.held:
                self.held.release()
            while not self.interrupted and not (self.held and self.held.poll() is not None):
                self.seconds = time.monotonic() - started
                left = DRAIN_INTERVAL_S if limit_s is None else limit_s - self.seconds
                if left <= 0:
                    self._end_command()
                    break
                self.pipeline.step(min(left, DRAIN_INTERVAL_S))
                progress.update(self.seconds, self.pipeline.account())
            self.pipeline.stop()
            self.seconds = time.monotonic() - started
        finally:
            signal.signal(signal.SIGINT, before)
            self.pipeline.close()

    def _end_command(self) -> None:
        if self.held and self.held.poll() is None:
            os.kill(self.held.pid, signal.SIGTERM)

    def _interrupt(self, _number: int, _frame: object) -> None:
        self.interrupted = True
        self.pipeline.wake()

    def summary(self, output: Output, windows: Sequence[Window]) -> str:
        """The final message: what was written, what was lost, what to do next."""
        account = self.pipeline.account()
        cpus = _count_cpus(windows)
        parts = [
            f"{account.received:,} samples",
            f"{cpus} CPU" if cpus == 1 else f"{cpus} CPUs",
            f"{self.seconds:.1f} s",
            f"lost {describe_losses(account.lost)}",
            f"unresolved {_unresolved_share(windows):.1%} of kernel frames",
        ]
        return f"wrote {output.path}: {self._ended(parts, account)}{_next_step(output, account)}"

    def sent(self, sending: Sending) -> str:
        """The final message if samples went to a receiver."""
        account = Account.of_kinds(self.pipeline.account().kinds, sending.accounts())
        (receiver,) = account.exporters
        parts = [
            f"{receiver.exported:,} of {account.taken:,} samples",
            f"{self.seconds:.1f} s",
            f"lost {describe_losses(Counter(account.lost) + Counter(receiver.lost))}",
        ]
        return f"sent to {sending.address}: {self._ended(parts, account)}"

    def _ended(self, parts: list[str], account: Account) -> str:
        if self.interrupted:
            parts.insert(0, "interrupted")
        if self.held and self.held.poll():
            parts.append(f"the command exited with status {self.held.poll()}")
        return ", ".join([*parts, *(f"accounting gap: {gap}" for gap in account.gaps())])


def describe_losses(lost: Losses) -> str:
    """Format losses by cause."""
    if not sum(lost.values()):
        return "0"
    return " ".join(f"{count:,} ({cause.value})" for cause, count in lost.items() if count)


def _count_cpus(windows: Sequence[Window]) -> int:
    return len({sample.cpu for window in windows for _, sample in window.samples})


def _unresolved_share(windows: Sequence[Window]) -> float:
    frames = unresolved = 0
    for window in windows:
        for _, sample in window.samples:
            count = len(sample.timestamps_unix_ns)
            for side in sample.stack.sides:
                if side.kind is KERNEL_SIDE:
                    frames += count * len(side.frames)
                    unresolved += count * sum(bool(frame.unresolved) for frame in side.frames)
    return unresolved / frames if frames else 0.0


def _next_step(output: Output, account: Account) -> str:
    if not account.received:
        return " · nothing ran in the kernel; record for longer, or with --idle"
    return f" · next: {output.next_step}" if output.next_step else ""
