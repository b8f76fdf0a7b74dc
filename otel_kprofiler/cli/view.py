"""``otel-kprofiler view``: show profiles in the browser."""

import os
import signal
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final

import click

from otel_kprofiler.analysis import Filter
from otel_kprofiler.cli import report, top
from otel_kprofiler.cli.end_signals import EndSignals
from otel_kprofiler.cli.named import named_parameters
from otel_kprofiler.cli.sampling_options import Sampling
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.cli.types import DURATION, ParsedType
from otel_kprofiler.cli.view_sources import (
    Source,
    choose_by,
    open_receivers,
    open_sampler,
    open_saved,
)
from otel_kprofiler.formats import page
from otel_kprofiler.serving import is_loopback
from otel_kprofiler.viewing import (
    DATA,
    DEFAULT_KEEP_S,
    DEFAULT_MAX_BYTES,
    SOURCE,
    PageServer,
    SampleStore,
    StoreAnswers,
)

_SELECTION: Final = frozenset(Filter.__dataclass_fields__) | {"start", "end", "sides"}
_SAMPLING: Final = (
    "rate", "events", "period", "stacks", "user_symbols", "python", "off_cpu", "off_cpu_rate",
    "wakers", "loader", "idle",
)  # fmt: skip
_EVERYTHING: Final[dict[str, Any]] = dict.fromkeys(
    ("pids", "comms", "cgroups", "containers", "pods", "units", "cpus"), ()
)
_STORING: Final = frozenset({"keep_s", "keep_megabytes", "store_path"})
_POLL_S: Final = 0.2


def _parse_endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address such as 127.0.0.1:4317")
    return text


_ENDPOINT: Final = ParsedType("endpoint", _parse_endpoint)


@click.command(name="view")
@click.argument("paths", nargs=-1, metavar="[SOURCE...]")
@click.option(
    "--listen", "grpc_endpoint", type=_ENDPOINT, metavar="HOST:PORT",
    help="Receive OTLP over gRPC on this address, such as 127.0.0.1:4317.",
)  # fmt: skip
@click.option(
    "--listen-http", "http_endpoint", type=_ENDPOINT, metavar="HOST:PORT",
    help="Receive OTLP over HTTP on this address. With --listen, the default is port 4318 on the "
    "same host.",
)  # fmt: skip
@click.option(
    "--live", "is_live", is_flag=True, help="Sample this host, and show the samples as they arrive."
)
@click.option(
    "--keep", "keep_s", type=DURATION, default=f"{DEFAULT_KEEP_S:.0f}s", show_default="1h",
    help="How long to keep received samples.",
)  # fmt: skip
@click.option(
    "--keep-megabytes", type=click.IntRange(1), default=DEFAULT_MAX_BYTES >> 20,
    show_default=True, help="Maximum size of the stored samples, in MiB.",
)  # fmt: skip
@click.option(
    "--store", "store_path", metavar="PATH",
    help="File for keeping received samples across restarts. By default, a temporary file is used "
    "and deleted at exit.",
)  # fmt: skip
@click.option(
    "--bind", "host", default="127.0.0.1", show_default=True, metavar="HOST",
    help="Address on which to serve the page. Unless this is a loopback address, other hosts can "
    "read the page.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0,
    help="Port on which to serve the page. Default: a free port.",
)  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def command(
    *,
    paths: tuple[str, ...],
    grpc_endpoint: str | None,
    http_endpoint: str | None,
    is_live: bool,
    keep_s: float,
    keep_megabytes: int,
    store_path: str | None,
    host: str,
    port: int,
    no_browser: bool,
    **filters: Any,
) -> None:
    """Serve profiles as a web page until Ctrl-C. Multiple SOURCEs are merged.

    A SOURCE is a file, or a database that a Collector writes to, given as
    clickhouse://HOST:PORT/DATABASE.

    \b
      otel-kprofiler view profile.otlp
      otel-kprofiler view --process nginx --from 10s --to 20s profile.otlp
      otel-kprofiler view --service shop --from -1h clickhouse://localhost:8123/otel
      otel-kprofiler view --listen 127.0.0.1:4317
      otel-kprofiler view --live

    With --listen, the command receives profiles from any OTLP sender, keeps the last hour of
    samples on disk, and shows any part of this hour. With --live, the command samples this host.
    The filters are the same as for report. Received and live samples that do not match the filters
    are dropped.
    """  # noqa: D301 - \b keeps click from wrapping the paragraph
    sampling = {name: filters.pop(name) for name in _SAMPLING}
    is_listening = bool(grpc_endpoint or http_endpoint)
    _check(bool(paths), is_listening, is_live, has_times=any(map(filters.get, ("start", "end"))))
    idle = bool(sampling["idle"])
    choose = choose_by(filters, idle=idle)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with EndSignals() as signals, ExitStack() as stack:
        if paths:
            source = open_saved(paths, filters, idle=idle)
        else:
            store = SampleStore(store_path, keep_s=keep_s, max_bytes=keep_megabytes << 20)
            stack.enter_context(store)
            answer = stack.enter_context(closing(StoreAnswers(store.path, title="view")))
            source = (
                open_sampler(stack, store, answer, choose, Sampling(**sampling, **_EVERYTHING))
                if is_live
                else open_receivers(stack, store, answer, choose, (grpc_endpoint, http_endpoint))
            )
        signals.listen(source.wake)
        with serving(endpoint, source, opens=not no_browser):
            source.start()
            while not signals.received:
                source.step(_POLL_S)
            source.stop()
        if said := source.describe():
            say(said, err=True)
    if signals.received != signal.SIGINT:
        sys.exit(128 + signals.received)


command.params += [parameter for parameter in report.command.params if parameter.name in _SELECTION]
command.params += [parameter for parameter in top.command.params if parameter.name in _SAMPLING]


def _check(has_files: bool, is_listening: bool, is_live: bool, *, has_times: bool) -> None:
    if has_files + is_listening + is_live != 1:
        raise click.UsageError("pass SOURCEs, --live or --listen")
    if has_times and not has_files:
        raise click.UsageError(
            "--from and --to require a SOURCE: for live data, choose times on the page"
        )
    for parameter in named_parameters():
        if (parameter.name in _SAMPLING and parameter.name != "idle" and not is_live) or (
            parameter.name in _STORING and has_files
        ):
            other = "SOURCEs" if has_files else "--listen"
            raise click.UsageError(f"{parameter.opts[-1]} has no effect with {other}")


@contextmanager
def serving(endpoint: str, source: Source, *, opens: bool) -> Iterator[None]:
    """Serve the page, print its address, and open it in a browser if possible."""
    text = page({"source": DATA, "files": SOURCE}, connects=True)
    with closing(PageServer(endpoint, text, source.answer, source.names_file)) as server:
        say(f"the page is at {server.address} until Ctrl-C")
        if not is_loopback(endpoint.rpartition(":")[0]):
            say("other hosts that can reach this address can also read the page", err=True)
        sys.stdout.flush()
        if opens and has_browser(os.environ):
            webbrowser.open(server.address)
        yield


def has_browser(environ: Mapping[str, str]) -> bool:
    """Returns whether a browser can be opened on a local display; False if this process is root."""
    if "SSH_CONNECTION" in environ or os.geteuid() == 0:
        return False
    return "DISPLAY" in environ or "WAYLAND_DISPLAY" in environ
