"""``otel-kprofiler record``: record a profile to a file or to an OTLP receiver."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Final

import click

from otel_kprofiler.cli.end_signals import EndSignals
from otel_kprofiler.cli.named import named_parameters
from otel_kprofiler.cli.output import DEFAULT_NAME, Output
from otel_kprofiler.cli.part_file import SCHEDULE as PART_SCHEDULE
from otel_kprofiler.cli.progress import open_progress
from otel_kprofiler.cli.raw import RawOutput
from otel_kprofiler.cli.receivers import open_receiver
from otel_kprofiler.cli.sampling_options import Sampling, sampling_options
from otel_kprofiler.cli.sending import SCHEDULE as EXPORT_SCHEDULE
from otel_kprofiler.cli.sending import Sending
from otel_kprofiler.cli.session import Session
from otel_kprofiler.cli.summary import summarize, summarize_sent
from otel_kprofiler.cli.target_filters import Targets, check_namespace
from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.cli.types import DURATION, is_duration
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import FORMATS, select_modules
from otel_kprofiler.host import Access
from otel_kprofiler.model import Window
from otel_kprofiler.pipeline import (
    Pipeline,
    PipelineOptions,
    WindowSink,
    open_live,
    open_resources,
    open_symbols,
    replay,
)
from otel_kprofiler.recording import Recording, ReplaySampler
from otel_kprofiler.sampling import CommandError, HeldCommand, SamplerConfig

_DEFAULT_DURATION_S: Final = 10.0
_WITH_REPLAY: Final = frozenset({"path", "address", "form", "modules", "replay_path", "force"})
"""Parameters allowed with ``--replay``, because they apply to samples already taken."""


@click.command(name="record")
@click.option(
    "-d", "--duration", type=DURATION,
    help="Duration of the recording, such as 10s or 1m30s. Default: 10s, or until COMMAND exits.",
)  # fmt: skip
@click.option(
    "-o", "--output", "path", metavar="FILE",
    help="Output file, or - for standard output. Default: profile.html, or profile-2.html and so "
    "on if that file exists. --format changes the suffix.",
)  # fmt: skip
@click.option(
    "--export", "address", metavar="URL",
    help="Send the samples to the OTLP receiver at this URL: grpc://HOST:PORT, grpcs://HOST:PORT, "
    "or a URL with http:// or https://. Without -o, no file is written. All other settings are "
    "read from the OTEL_EXPORTER_OTLP_[PROFILES_]* environment variables. Samples that the "
    "receiver does not accept are kept in NAME.unsent.otlp.",
)  # fmt: skip
@click.option(
    "-f", "--format", "form", type=click.Choice([row.name for row in FORMATS]),
    help="Output format. By default, the suffix of FILE selects the format. The output is "
    "compressed if FILE ends in .gz.",
)  # fmt: skip
@click.option(
    "--on-cpu/--no-on-cpu", "on_cpu", default=None,
    help="Sample the code running on CPUs. This is the default unless -e names other events.",
)  # fmt: skip
@sampling_options
@click.option(
    "--module", "modules", multiple=True, metavar="NAME",
    help="Keep only stacks with frames in this kernel module, loadable or built in. May be "
    "repeated.",
)  # fmt: skip
@click.option(
    "--raw", "raw_path", metavar="FILE",
    help="Also write the raw samples, with everything needed to replay them on any host.",
)  # fmt: skip
@click.option(
    "--replay", "replay_path", metavar="FILE",
    help="Replay a file written by --raw instead of sampling.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.argument("words", nargs=-1, metavar="[-- COMMAND ...]")
def command(
    *,
    duration: float | None,
    path: str | None,
    address: str | None,
    form: str | None,
    modules: tuple[str, ...],
    raw_path: str | None,
    replay_path: str | None,
    force: bool,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    """Profile this host, or COMMAND and its children, and write a file.

    \b
      otel-kprofiler record -d 10s -o profile.html
      otel-kprofiler record -o build.folded -- make -j2
      otel-kprofiler record -p 4242 -d 30s -o server.otlp
      otel-kprofiler record -d 1m --export grpc://127.0.0.1:4317
      otel-kprofiler record -e page-faults -c 1 -- ./program

    Ctrl-C, SIGTERM and SIGHUP end the recording early. Samples taken until then are still written.

    The recording of a COMMAND ends when COMMAND exits. Children of COMMAND that have not exited
    keep running. If the duration ends first, COMMAND and its children are sent SIGTERM. If a signal
    arrives first, it is forwarded to COMMAND and its children. Processes that are still running
    five seconds later are sent SIGKILL. The exit status is that of COMMAND: 128+n if signal n
    killed COMMAND, 127 if COMMAND was not found, 126 if COMMAND cannot be executed, and 0 if the
    recording ended first. If the --export receiver did not accept everything, the exit status is 1,
    and the samples that were not accepted are kept in a file.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    sampling = Sampling(**options)
    if words and (sampling.has_targets or sampling.cpus):
        raise click.UsageError(
            "a COMMAND cannot be combined with --pid, --comm, --cgroup, --container or --cpus"
        )
    if replay_path:
        _refuse_settings_of_sampling()
    windows: list[Window] = []
    with ExitStack() as stack:
        signals = stack.enter_context(EndSignals())
        exporter = open_receiver(address) if address else None
        output = None
        if path or form or modules or not exporter:
            output = Output(path, form, force=force, keep_part=not replay_path)
            stack.enter_context(output)
            _check_distinct(output.path, raw_path, replay_path)
        sending = None
        if address and exporter:
            beside = output.path if output and not output.is_special else DEFAULT_NAME
            sending = stack.enter_context(Sending(address, exporter, beside))
        sinks = Sinks(sending, output, windows)
        if replay_path:
            session = Session(_replay(replay_path, sinks), signals)
        else:
            access, clock = Access(), Clock()
            targets = sampling.find_targets(access)
            held = stack.enter_context(_hold(access, words, output)) if words else None
            raw = raw_path and stack.enter_context(RawOutput(raw_path, access, force=force))
            limit = _DEFAULT_DURATION_S if duration is None and not words else duration
            if raw:
                sinks.add(raw.add_window)
            pipeline = open_live(
                _sampler_config(sampling, access, targets, held),
                sinks.schedule,
                sinks.add_window,
                access=access,
                clock=clock,
                resources=open_resources(
                    access, clock, {}, on_new=raw.add_process if raw else None
                ),
                symbolizer=open_symbols(access, event_sink=raw.add_event if raw else None),
                user_names=sampling.open_user_names(raw.add_code if raw else None),
                loader=sampling.loader,
                raw_sink=raw.add_records if raw else None,
                replaced_sink=raw.add_frame if raw else None,
                options=PipelineOptions(whole_sink=sinks.whole),
            )
            session = Session(pipeline, signals, held, targets)
            with open_progress(limit or float("inf")) as progress:
                session.run(limit, progress)
            if raw:
                raw.finish(clock, pipeline.sampler)
            session.wait_for_command()
        if output:
            windows = _select(windows, modules) if modules else windows
            # arguments may contain secrets, so the page shows only the program's name
            title = os.path.basename(words[0]) if words else ""
            output.write(windows, title, idle=sampling.idle, has_whole_threads=not modules)
    _say_remarks(session.pipeline)
    if output:
        say("\n".join(summarize(session, output, windows)), err=True)
    if sending:
        say(summarize_sent(session, sending), err=True)
    if sending:
        sending.check()
    sys.exit(session.exit_status)


def _say_remarks(pipeline: Pipeline[Any]) -> None:
    for remark in pipeline.remarks():
        say(remark, err=True)


class Sinks:
    """Passes each window to the receiver and the ``.part`` file, and collects all windows."""

    def __init__(
        self, sending: Sending | None, output: Output | None, windows: list[Window]
    ) -> None:
        part = output.part if output else None
        self._each: list[WindowSink] = [sink for sink in (sending, part) if sink]
        self._whole: list[WindowSink] = [windows.append] if output else []
        self.schedule = EXPORT_SCHEDULE if sending else PART_SCHEDULE

    @property
    def whole(self) -> WindowSink | None:
        """Returns the sink for the whole recording as one window; None if no file is written."""
        return self._add_whole if self._whole else None

    def add(self, sink: WindowSink) -> None:
        """Add a sink, which receives the whole recording as one window at the end.

        If there is no output file, the sink receives each window as it closes.
        """
        (self._whole or self._each).insert(0, sink)

    def add_window(self, window: Window) -> None:
        """Pass a window to the receiver and the ``.part`` file."""
        for sink in self._each:
            sink(window)

    def _add_whole(self, window: Window) -> None:
        for sink in self._whole:
            sink(window)


def _refuse_settings_of_sampling() -> None:
    """Reject options that would have no effect on replayed samples."""
    for parameter in named_parameters():
        if parameter.name not in _WITH_REPLAY:
            what = "a COMMAND" if parameter.name == "words" else parameter.opts[-1]
            raise click.UsageError(f"--replay cannot be combined with {what}")


def _hold(access: Access, words: Sequence[str], output: Output | None) -> HeldCommand:
    """Start the command, redirecting its output to stderr if the profile is written to stdout."""
    check_namespace(access)
    taken = output is not None and output.is_stdout
    try:
        return HeldCommand(words, stdout=sys.stderr.fileno() if taken else None)
    except CommandError as error:
        if len(words) == 1 and is_duration(words[0]):
            error.hint = f"for a duration, use -d {words[0]}"
        raise


def _sampler_config(
    sampling: Sampling, access: Access, targets: Targets, held: HeldCommand | None
) -> SamplerConfig:
    config = sampling.config(access, targets, held.pid if held else None)
    return replace(config, preload_paths=held.find_files()) if held else config


def _check_distinct(output: str, raw: str | None, replayed: str | None) -> None:
    """Reject options that write the same file twice or overwrite the input."""
    for option, other in (("--raw", raw), ("--replay", replayed)):
        if other is not None and os.path.realpath(other) == os.path.realpath(output):
            raise click.UsageError(f"-o and {option} are the same file: {other}")


def _select(windows: Sequence[Window], modules: Sequence[str]) -> list[Window]:
    selected = select_modules(windows, modules)
    kept, count = (sum(w.sample_count for w in part) for part in (selected, windows))
    say(
        f"{kept:,} of {describe_count(count, 'sample')} have frames in {' or '.join(modules)}",
        err=True,
    )
    return selected


def _replay(path: str, sinks: Sinks) -> Pipeline[ReplaySampler]:
    try:
        recording = Recording(path)
    except OSError as error:
        raise KProfilerError(
            f"cannot read {path}: {error.strerror}", hint="pass a file written by --raw"
        ) from error
    with closing(recording):
        return replay(recording, sinks.schedule, sinks.add_window, whole_sink=sinks.whole)
