"""``otel-kprofiler dump``: show what each thread of a process is doing right now."""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Final, Literal

import click

from otel_kprofiler.cli.sampling_options import (
    COMM_OPTION,
    PYTHON_OPTION,
    USER_SYMBOLS_OPTION,
    open_names,
)
from otel_kprofiler.cli.target_filters import check_process, find_namespace, get_containers
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.cli.types import DURATION
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import dump_folded, dump_json, dump_table
from otel_kprofiler.host import Access, find_containers
from otel_kprofiler.model import PYTHON_FRAMES, ProcessState
from otel_kprofiler.pipeline import ThreadDumper, compare_dumps, open_resources, open_symbols
from otel_kprofiler.sampling import SamplerConfig

_COMM_BYTES: Final = 15
_LONGEST_S: Final = 3600.0


@click.command(name="dump")
@click.option(
    "-p", "--pid", "pids", type=click.IntRange(1), multiple=True,
    help="Dump only this process. All filters may be repeated.",
)  # fmt: skip
@COMM_OPTION
@click.option(
    "--container", "containers", multiple=True, metavar="NAME|ID",
    help="Dump only the processes of this container, given by its name or a prefix of its ID.",
)  # fmt: skip
@click.option(
    "--interval", "interval_s", type=DURATION,
    help="Take a second dump after this delay, such as 1s, and show whether each thread "
    "has moved since the first dump.",
)  # fmt: skip
@click.option(
    "-f", "--format", "form", type=click.Choice(["table", "json", "folded"]), default="table",
    show_default=True, help="Output format.",
)  # fmt: skip
@click.option(
    "--stacks", type=click.Choice(["kernel", "both"]), default="both", show_default=True,
    help="Stacks to collect.",
)  # fmt: skip
@USER_SYMBOLS_OPTION
@PYTHON_OPTION
def command(
    *,
    pids: tuple[int, ...],
    comms: tuple[str, ...],
    containers: tuple[str, ...],
    interval_s: float | None,
    form: Literal["table", "json", "folded"],
    stacks: Literal["kernel", "both"],
    user_symbols: Literal["off", "names", "lines"],
    python: bool,
) -> None:
    """Show what each thread of a process is doing right now, even if it is asleep.

    \b
      otel-kprofiler dump -p 4242
      otel-kprofiler dump -p 4242 --interval 1s
      otel-kprofiler dump --comm nginx -f json

    The process is neither stopped nor traced. Threads with identical stacks are shown together,
    with their state, what they are waiting for, and for how long. Stacks are shown leaf first. With
    --interval, a second dump follows, and each thread is marked as moved or not moved: a thread
    that has not moved between the dumps is stuck rather than slow.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    if not (pids or comms or containers):
        raise click.UsageError("select a process with --pid, --comm or --container")
    if interval_s is not None and not 0 < interval_s <= _LONGEST_S:
        raise click.UsageError(f"--interval must be above 0s and at most {_LONGEST_S / 3600:g}h")
    access, clock = Access(), Clock()
    names = frozenset(os.fsencode(name)[:_COMM_BYTES] for name in comms)
    chosen = _find_processes(access, pids, names, containers)
    config = SamplerConfig(
        stacks=stacks,
        python_frames=PYTHON_FRAMES if python else 0,
        target_pids=tuple(sorted(chosen)),
        target_namespace=find_namespace(access),
    )
    dumper = ThreadDumper(
        config,
        access=access,
        clock=clock,
        symbolizer=open_symbols(access),
        resources=open_resources(access, clock, {}),
        user_names=open_names(user_symbols) if stacks == "both" else None,
    )
    with closing(dumper):
        dumped = dumper.dump()
        if interval_s is not None:
            time.sleep(interval_s)
            dumped = compare_dumps(dumped, dumper.dump())
        remarks = dumper.remarks()
    shown = [_select(process, chosen[process.tgid]) for process in dumped]
    if not shown:
        raise KProfilerError(
            "all selected processes have exited", hint="list processes with ps or pgrep"
        )
    _write(shown, form, interval_s)
    for remark in remarks:
        say(remark, err=True)


def _write(
    processes: Sequence[ProcessState],
    form: Literal["table", "json", "folded"],
    interval_s: float | None,
) -> None:
    if form == "json":
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        text = dump_json(processes, time=now, interval_s=interval_s)
    elif form == "folded":
        text = dump_folded(processes)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        text = dump_table(processes, width=width)
    click.echo(text, nl=False)


def _find_processes(
    access: Access, pids: Iterable[int], names: frozenset[bytes], containers: Iterable[str]
) -> dict[int, frozenset[bytes]]:
    """Returns the processes to dump, each with the thread names to show (empty: all)."""
    chosen: dict[int, frozenset[bytes]] = {}
    for pid in pids:
        check_process(access, pid)
        chosen[pid] = frozenset()
    listed = find_containers(access) if containers else []
    for name in containers:
        for container in get_containers(listed, name):
            chosen |= dict.fromkeys(container.pids, frozenset())
    if names:
        named = dict(_find_named(access, names))
        missing = names.difference(*(threads for _, threads in named.values()))
        if missing:
            text = " or ".join(sorted(map(os.fsdecode, missing)))
            raise KProfilerError(
                f"there is no thread named {text}", hint="list threads with ps -eLo pid,tid,comm"
            )
        for pid, (is_whole, threads) in named.items():
            if pid not in chosen:
                chosen[pid] = frozenset() if is_whole else threads
    return chosen


def _find_named(
    access: Access, names: frozenset[bytes]
) -> Iterable[tuple[int, tuple[bool, frozenset[bytes]]]]:
    """Yields each matching pid, whether its main thread matches, and the matching thread names."""
    for entry in access.list_dir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        named: dict[int, bytes] = {}
        try:
            for tid in access.list_dir(f"/proc/{entry}/task"):
                name = access.read_bytes(f"/proc/{entry}/task/{tid}/comm").rstrip(b"\n")
                if name in names:
                    named[int(tid)] = name
        except OSError:
            pass  # a thread or the process has exited
        if named:
            yield int(entry), (int(entry) in named, frozenset(named.values()))


def _select(process: ProcessState, names: frozenset[bytes]) -> ProcessState:
    if not names:
        return process
    shown = frozenset(map(os.fsdecode, names))
    return process._replace(
        threads=tuple(thread for thread in process.threads if thread.name in shown)
    )
