"""``otel-kprofiler view``: profiles in the browser."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from ipaddress import ip_address
from os.path import basename
from typing import Any, Final

import click

from otel_kprofiler.analysis import Filter, load_samples
from otel_kprofiler.cli import report
from otel_kprofiler.cli.end_signals import EndSignals
from otel_kprofiler.cli.profiles import load_profiles
from otel_kprofiler.cli.report import select_samples
from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.cli.types import DurationType
from otel_kprofiler.formats import columns, page
from otel_kprofiler.model import Window
from otel_kprofiler.viewing import (
    DATA,
    DEFAULT_KEEP_S,
    DEFAULT_MAX_BYTES,
    Answer,
    GrpcReceiver,
    HttpReceiver,
    Intake,
    PageServer,
    SampleStore,
    StoreAnswers,
)

_SELECTION: Final = frozenset(Filter.__dataclass_fields__) | {"start", "end", "sides"}
_HTTP_PORT: Final = 4318
_POLL_S: Final = 0.2


class EndpointType(click.ParamType[str]):
    """``HOST:PORT``."""

    name = "endpoint"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the value; fails with a usage error."""
        host, _, port = str(value).rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            self.fail(f"{value!r} is no address such as 127.0.0.1:4317", param, ctx)
        return str(value)


@click.command(name="view")
@click.argument("paths", nargs=-1, metavar="[FILE...]")
@click.option(
    "--listen", "grpc_endpoint", type=EndpointType(), metavar="HOST:PORT",
    help="Show what comes in as OTLP over gRPC here, such as 127.0.0.1:4317.",
)  # fmt: skip
@click.option(
    "--listen-http", "http_endpoint", type=EndpointType(), metavar="HOST:PORT",
    help="Likewise over HTTP. Default with --listen: its host, port 4318.",
)  # fmt: skip
@click.option(
    "--keep", "keep_s", type=DurationType(), default=f"{DEFAULT_KEEP_S:.0f}s", show_default="1h",
    help="How long what comes in is kept.",
)  # fmt: skip
@click.option(
    "--keep-megabytes", type=click.IntRange(1), default=DEFAULT_MAX_BYTES >> 20,
    show_default=True, help="How much of it is kept.",
)  # fmt: skip
@click.option(
    "--store", "store_path", metavar="PATH",
    help="Keep it in this file, for the next start. Default: in one that is removed at the end.",
)  # fmt: skip
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
    grpc_endpoint: str | None,
    http_endpoint: str | None,
    keep_s: float,
    keep_megabytes: int,
    store_path: str | None,
    host: str,
    port: int,
    no_browser: bool,
    **filters: Any,
) -> None:
    """Show profiles as a page in the browser, until Ctrl-C; several FILEs are merged.

    \b
      otel-kprofiler view profile.otlp
      otel-kprofiler view --process nginx --from 10s --to 20s profile.otlp
      otel-kprofiler view --listen 127.0.0.1:4317

    With --listen it receives the profiles of any OTLP sender, keeps the last hour on disk, and
    shows any part of it. The filters are those of report; of what comes in, it keeps what they
    match.
    """  # noqa: D301 - \b tells click not to wrap the paragraph
    is_listening = bool(grpc_endpoint or http_endpoint)
    if bool(paths) == is_listening:
        raise click.UsageError("name FILEs, or where to --listen")
    if is_listening and (filters["start"] or filters["end"]):
        raise click.UsageError("--from and --to are for FILEs; choose times on the page")
    choose = chooser(filters)
    intake: Intake | None = None
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with EndSignals() as signals, ExitStack() as stack:
        if paths:
            answer = _file_answer(paths, filters)
        else:
            store = SampleStore(store_path, keep_s=keep_s, max_bytes=keep_megabytes << 20)
            stack.enter_context(store)
            answer = stack.enter_context(closing(StoreAnswers(store.path, title="view")))
            intake = Intake(lambda windows: store.add(choose(windows)))
            for line in _listen(stack, intake, grpc_endpoint, http_endpoint):
                say(line, err=True)
        signals.listen(lambda: None)
        with serving(endpoint, answer, opens=not no_browser):
            while not signals.received:
                time.sleep(_POLL_S)
    if intake:
        _tell(intake)
    if signals.received != signal.SIGINT:
        sys.exit(128 + signals.received)


command.params += [one for one in report.command.params if one.name in _SELECTION]


def _file_answer(paths: Sequence[str], filters: Mapping[str, Any]) -> Answer:
    samples = _select(load_profiles(paths), filters)
    title = basename(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
    data = [json.dumps(columns(samples.windows(), title=title), separators=(",", ":")).encode()]
    return lambda _: data


def _select(samples: Any, filters: Mapping[str, Any]) -> Any:
    chosen = dict(filters)
    start, end, sides = (chosen.pop(name) for name in ("start", "end", "sides"))
    return select_samples(samples, Filter(**chosen), start, end, sides)


def chooser(filters: Mapping[str, Any]) -> Callable[[Sequence[Window]], Sequence[Window]]:
    """What keeps of windows that come in what the filters match."""
    if not any(filters.values()):
        return lambda windows: windows
    return lambda windows: _select(load_samples(windows), filters).windows()


def _listen(
    stack: ExitStack, intake: Intake, grpc_endpoint: str | None, http_endpoint: str | None
) -> Iterator[str]:
    """Open the receivers, and say where they are."""
    if grpc_endpoint:
        receiver = stack.enter_context(closing(GrpcReceiver(grpc_endpoint, intake)))
        yield from _describe("gRPC", grpc_endpoint, receiver.port)
        http_endpoint = http_endpoint or f"{_host(grpc_endpoint)}:{_HTTP_PORT}"
    if http_endpoint:
        other = stack.enter_context(closing(HttpReceiver(http_endpoint, intake)))
        yield from _describe("HTTP", http_endpoint, other.port)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]


def _describe(protocol: str, endpoint: str, port: int) -> Iterator[str]:
    host = _host(endpoint)
    yield f"receiving OTLP profiles over {protocol} at {host}:{port}"
    try:
        is_local = host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        yield f"other hosts that reach {host}:{port} can send profiles, too"


def _tell(intake: Intake) -> None:
    counts = intake.counts
    say(
        f"received {describe_count(counts.requests, 'request')}: "
        f"{describe_count(counts.kept, 'sample')} kept, {counts.outdated:,} too old; "
        f"{describe_count(counts.refused, 'request')} refused",
        err=True,
    )


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
