"""``otel-kprofiler view``: profiles in the browser."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from os.path import basename
from typing import Any, Final

import click

from otel_kprofiler.analysis import Filter
from otel_kprofiler.cli import report
from otel_kprofiler.cli.end_signals import EndSignals
from otel_kprofiler.cli.moments import Moment
from otel_kprofiler.cli.profiles import load_profiles
from otel_kprofiler.cli.report import select_samples
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.formats import columns, page
from otel_kprofiler.viewing import DATA, Answer, PageServer

_SELECTION: Final = frozenset(Filter.__dataclass_fields__) | {"start", "end", "sides"}
_POLL_S: Final = 0.2


@click.command(name="view")
@click.argument("paths", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--bind", "host", default="127.0.0.1", show_default=True, metavar="HOST",
    help="Address that the page is served on; others than this one let other hosts read it.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Its port. Default: a free one."
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def command(
    *,
    paths: tuple[str, ...],
    host: str,
    port: int,
    no_browser: bool,
    start: Moment | None,
    end: Moment | None,
    sides: tuple[str, ...],
    **filters: Any,
) -> None:
    """Show profiles as a page in the browser, until Ctrl-C; several FILEs are merged.

    \b
      otel-kprofiler view profile.otlp
      otel-kprofiler view --process nginx --from 10s --to 20s profile.otlp
    """  # noqa: D301 - \b tells click not to wrap the paragraph
    samples = select_samples(load_profiles(paths), Filter(**filters), start, end, sides)
    title = basename(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
    data = [json.dumps(columns(samples.windows(), title=title), separators=(",", ":")).encode()]
    del samples
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with EndSignals() as signals:
        signals.listen(lambda: None)
        with serving(endpoint, lambda _: data, opens=not no_browser):
            while not signals.received:
                time.sleep(_POLL_S)
    if signals.received not in {None, signal.SIGINT}:
        sys.exit(128 + signals.received)


command.params += [one for one in report.command.params if one.name in _SELECTION]


@contextmanager
def serving(endpoint: str, answer: Answer, *, opens: bool) -> Iterator[None]:
    """Serve the page, and tell its address; open it in a browser if there is one."""
    with closing(PageServer(endpoint, page({"source": DATA}, connects=True), answer)) as server:
        say(f"the page is at {server.address} until Ctrl-C")
        sys.stdout.flush()
        if opens and has_browser(os.environ):
            webbrowser.open(server.address)
        yield


def has_browser(environ: Mapping[str, str]) -> bool:
    """Whether a browser would open on the screen in front of the user, and as that user."""
    if "SSH_CONNECTION" in environ or os.geteuid() == 0:
        return False
    return "DISPLAY" in environ or "WAYLAND_DISPLAY" in environ
