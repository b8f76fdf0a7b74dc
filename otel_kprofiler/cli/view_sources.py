"""Opens sources for ``view``: files, tables, received OTLP profiles, or this host's samples."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

from otel_kprofiler.agent import give_back_memory
from otel_kprofiler.analysis import load_samples
from otel_kprofiler.cli.no_match import check_matches
from otel_kprofiler.cli.report import drop_idle
from otel_kprofiler.cli.sampling_options import Sampling
from otel_kprofiler.cli.sources import Choice, describe_source, load_choice
from otel_kprofiler.cli.summary import describe_losses
from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.clickhouse import PAGE, need_of
from otel_kprofiler.clock import Clock
from otel_kprofiler.formats import columns, leave_out_idle
from otel_kprofiler.host import Access
from otel_kprofiler.model import Window
from otel_kprofiler.pipeline import LIVE_SCHEDULE, open_live, open_resources, open_symbols
from otel_kprofiler.serving import is_loopback
from otel_kprofiler.viewing import (
    Answer,
    GrpcReceiver,
    HttpReceiver,
    Intake,
    NamesFile,
    SampleStore,
    StoreAnswers,
)

_HTTP_PORT: Final = 4318
_GIVE_BACK_S: Final = 2.0

Choose = Callable[[Sequence[Window]], Sequence[Window]]
"""Function that reduces windows to the samples that match the filters."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Source:
    """Functions that provide and update the page's data.

    Attributes:
        answer: returns the data that the page requests.
        names_file: returns whether any frame in the data has a given source file.
        start: starts the source; called once the page is served.
        step: performs pending work, for at most the given number of seconds.
        wake: interrupts a step; called from signal handlers.
        stop: stops the source, and processes the remaining samples.
        describe: called after ``stop``; returns a summary of the samples, or an empty string if
            there is nothing to report.
    """

    answer: Answer
    names_file: NamesFile
    start: Callable[[], None] = _nothing
    step: Callable[[float], None] = time.sleep
    wake: Callable[[], None] = _nothing
    stop: Callable[[], None] = _nothing
    describe: Callable[[], str] = str


def open_saved(sources: Sequence[str], filters: Mapping[str, Any], *, idle: bool) -> Source:
    """Opens files and tables as the page's source. Without ``idle``, idle waits are dropped."""
    choice = Choice.of(filters)
    loaded, chosen = load_choice(sources, choice, PAGE | need_of(choice.chosen))
    check_matches(choice.chosen, loaded)
    samples = drop_idle(chosen, idle=idle)
    count = len(sources)
    title = describe_source(sources[0]) if count == 1 else f"{count} sources"
    shown = columns(samples.windows(), title=title)
    files = {shown["strings"][at] for at in shown["frames"]["file"]}
    data = [json.dumps(shown, separators=(",", ":")).encode()]
    gc.enable()  # the page may stay open for a long time
    return Source(lambda _: data, files.__contains__)


def choose_by(filters: Mapping[str, Any], *, idle: bool) -> Choose:
    """Returns a function that selects matching samples; it drops idle waits unless ``idle``."""
    choice = Choice.of(filters)

    def choose(windows: Sequence[Window]) -> Sequence[Window]:
        if any(filters.values()):
            windows = choice.apply(load_samples(windows)).windows()
        return windows if idle else leave_out_idle(windows)[0]

    return choose


def open_receivers(
    stack: ExitStack,
    store: SampleStore,
    answer: StoreAnswers,
    choose: Choose,
    endpoints: tuple[str | None, str | None],
) -> Source:
    """Opens OTLP receivers, and prints their addresses; raises ``HostError`` if that fails."""
    intake = Intake(lambda windows: store.add(choose(windows)))
    grpc_endpoint, http_endpoint = endpoints
    receivers = stack.enter_context(ExitStack())
    if grpc_endpoint:
        receiver = receivers.enter_context(closing(GrpcReceiver(grpc_endpoint, intake)))
        _announce("gRPC", grpc_endpoint, receiver.port)
        http_endpoint = http_endpoint or f"{_host(grpc_endpoint)}:{_HTTP_PORT}"
    if http_endpoint:
        other = receivers.enter_context(closing(HttpReceiver(http_endpoint, intake)))
        _announce("HTTP", http_endpoint, other.port)

    def describe() -> str:
        counts = intake.counts
        return (
            f"received {describe_count(counts.requests, 'request')}: "
            f"{describe_count(counts.kept, 'sample')} kept, {counts.outdated:,} too old, "
            f"{counts.repeated:,} repeated; "
            f"{describe_count(counts.refused, 'request')} rejected"
        )

    return Source(
        answer, answer.names_file, step=_Idle().step, stop=receivers.close, describe=describe
    )


class _Idle:
    """Waits for requests, and regularly returns free memory to the kernel."""

    def __init__(self) -> None:
        self._next = 0.0

    def step(self, seconds: float) -> None:
        time.sleep(seconds)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _GIVE_BACK_S
            give_back_memory()


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]


def _announce(protocol: str, endpoint: str, port: int) -> None:
    for line in describe_endpoint(protocol, _host(endpoint), port):
        say(line, err=True)


def describe_endpoint(protocol: str, host: str, port: int) -> Iterator[str]:
    """Yields a line with the receiver's address, and a warning if other hosts can reach it."""
    yield f"receiving OTLP profiles over {protocol} at {host}:{port}"
    if not is_loopback(host):
        yield f"other hosts that can reach {host}:{port} can also send profiles"


def open_sampler(
    stack: ExitStack, store: SampleStore, answer: StoreAnswers, choose: Choose, sampling: Sampling
) -> Source:
    """Starts sampling this host; raises ``HostError`` if that is not possible."""
    access, clock = Access(), Clock()

    def add(window: Window) -> None:
        store.add(choose([window]))

    pipeline = open_live(
        sampling.config(access, sampling.find_targets(access), None),
        LIVE_SCHEDULE,
        add,
        access=access,
        clock=clock,
        resources=open_resources(access, clock, {}),
        symbolizer=open_symbols(access),
        user_names=sampling.open_user_names(),
        loader=sampling.loader,
    )
    stack.callback(pipeline.close)

    def describe() -> str:
        account = pipeline.account()
        count = describe_count(account.received, "sample")
        return f"received {count}, lost {describe_losses(account.lost)}"

    return Source(
        answer,
        answer.names_file,
        pipeline.start,
        pipeline.step,
        pipeline.wake,
        pipeline.stop,
        describe=describe,
    )
