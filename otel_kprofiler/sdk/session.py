"""Runs the embedded profiler's sampling pipeline and its drain thread."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from opentelemetry.sdk.resources import Resource

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import Account, ExporterAccount, RawSample, Window
from otel_kprofiler.pipeline import (
    IDLE_S,
    PipelineOptions,
    describe_left_out,
    describe_sampling,
    open_live,
    open_symbols,
)
from otel_kprofiler.sampling import SamplerConfig
from otel_kprofiler.sdk.kernel_entries import name_entries
from otel_kprofiler.sdk.label_sets import LabelCounts
from otel_kprofiler.sdk.local_roots import MAX_NAMES, RootNames
from otel_kprofiler.sdk.own_contexts import OwnContexts
from otel_kprofiler.sdk.pacing import Pacer
from otel_kprofiler.sdk.plan import Plan, complete_sampler_config, make_resources, set_service
from otel_kprofiler.symbols import KernelSymbolizer, open_user_names

DRAIN_THREAD: Final = "kprofiler-drain"
_FLUSH_STEPS: Final = 50
_FLUSH_STEP_S: Final = 0.01
_RING_BYTES: Final = 64 * 1024
"""Size of a CPU's ring (about 600 records); small, because each service has separate rings."""

_log = logging.getLogger(__name__)


class Session:
    """Takes samples from its construction until :meth:`stop`.

    The pipeline runs in a daemon thread, but the methods may be called from any other thread. The
    constructor raises ``HostError`` or ``SamplerError`` if this host cannot be profiled.

    Args:
        sink: receives each window, in the daemon thread.
        exporters: returns sample counts by outcome, for each exporter that receives windows from
            the sink.
        earlier: the number of samples that the sink received from earlier sessions, by kind.
        inherited: in a forked child, the parent's kernel symbolizer.

    Attributes:
        root_names: names samples after local roots; None if links or names are disabled.
        failure: why the daemon thread exited unexpectedly; empty if there was no failure.
    """

    def __init__(
        self,
        plan: Plan,
        service: Resource,
        sink: Callable[[Window], None],
        *,
        exporters: Callable[[], tuple[ExporterAccount, ...]] = tuple,
        earlier: Mapping[str, int] = MappingProxyType({}),
        inherited: KernelSymbolizer | None = None,
    ) -> None:
        access, clock = Access(), Clock()
        config = complete_sampler_config(plan)
        self.symbolizer = open_symbols(access, inherited=inherited, ring_bytes=_RING_BYTES)
        self._clock = clock
        self._schedule = plan.schedule
        self._interval_s = config.drain_interval_s
        self._windows = 0
        self._earlier = earlier
        self._sink = sink
        wants_roots = plan.span_links and (plan.local_root_names or plan.baggage_keys)
        self.root_names = (
            RootNames(
                max_names=MAX_NAMES if plan.local_root_names else 0,
                baggage_keys=plan.baggage_keys,
            )
            if wants_roots
            else None
        )
        self._labels = LabelCounts()
        self._pipeline = open_live(
            config,
            plan.schedule,
            self._count_window,
            access=access,
            clock=clock,
            resources=make_resources(plan, access, clock),
            symbolizer=self.symbolizer,
            user_names=open_user_names(plan.user_symbols),
            loader=plan.loader,
            options=PipelineOptions(
                exporters=exporters,
                pause=Pacer(),
                on_drained=self._look,
                find_labels=self._labels.find,
            ),
        )
        self._sampler = self._pipeline.sampler
        self.failure = ""
        self._own_contexts: OwnContexts | None = None
        self._plan, self._access = plan, access
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=DRAIN_THREAD, daemon=True)
        try:
            self.set_service(service)
            self._pipeline.start()
            self._follows_spans = self._sampler.follows_spans
            _log.info("%s", _describe_start(plan, self._sampler.config))
            if plan.span_links:
                self._own_contexts = OwnContexts(
                    access,
                    self._sampler.contexts if self._sampler.reads_contexts else None,
                    follows_spans=self._follows_spans,
                )
                self._own_contexts.prepare()
            if self.root_names is not None:
                self.root_names.start()
            self._thread.start()
        except BaseException:
            self._forget_roots()
            self._pipeline.close()
            raise

    def set_service(self, service: Resource) -> None:
        """Change the service's Resource. Call only from the sink."""
        set_service(self._pipeline.resources, self._plan, service, self._access)

    def flush_window(self, timeout_s: float) -> bool:
        """Close the current window. Return False on timeout."""
        return self._call(self._flush_window, timeout_s)

    def pause(self, timeout_s: float = 1.0) -> bool:
        """Pause sampling until :meth:`resume`. Return False on timeout.

        While sampling is paused, :meth:`account` includes all samples taken.
        """
        return self._call(self._pause_sampler, timeout_s)

    def resume(self, timeout_s: float = 1.0) -> bool:
        """Resume sampling. Return False on timeout."""
        return self._call(self._sampler.resume, timeout_s)

    def account(self) -> Account:
        """Returns consistent counts of all samples, by outcome."""
        account = self._pipeline.account()
        return Account.of_kinds(account.kinds, account.exporters, self._earlier)

    def describe(self) -> dict[str, Any]:
        """Returns counts of samples, Python frames, labels and links, as plain values."""
        labels = {"possible": self._follows_spans, **self._labels.as_dict()}
        described = {
            "account": self.account().as_dict(),
            "python_frames": self._pipeline.python.describe() if self._pipeline.python else {},
            "labels": labels,
        }
        if self._plan.span_links:
            described["span_links"] = self._describe_links()
        return described

    def _describe_links(self) -> dict[str, Any]:
        names = {"local_roots": self.root_names.as_dict()} if self.root_names else {}
        contexts = self._own_contexts
        described = contexts.as_dict() if contexts and contexts.is_needed else {}
        if not self._follows_spans:
            return {"source": "thread_contexts", **described, **names}
        more = {"other_classes": described} if described else {}
        return {"source": "interpreter", "possible": True, "problem": "", **more, **names}

    def stop(self, timeout_s: float) -> None:
        """Stop sampling and pass the last window to the sink, waiting up to the timeout."""
        self._stopping = True
        if self._thread.is_alive():
            self._pipeline.wake()
            self._thread.join(timeout_s)

    def _call(self, command: Callable[[], None], timeout_s: float) -> bool:
        """Run a command in the daemon thread. Return False on timeout, or if the thread exited."""
        done = threading.Event()

        def do() -> None:
            command()
            done.set()

        if not self._thread.is_alive():
            return False
        self._commands.put(do)
        self._pipeline.wake()
        return done.wait(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._pipeline.step(self._interval_s, idle_s=IDLE_S)
                if self._own_contexts is not None:
                    self._own_contexts.prepare()
                while not self._commands.empty():
                    self._commands.get()()
            self._pipeline.stop()
        # a processor may raise SystemExit, which ends a thread silently
        except BaseException as error:  # noqa: BLE001 - logged; the service continues
            self.failure = f"{type(error).__name__}: {error}"
            _log.exception("profiling has ended because of an error")
        finally:
            self._forget_roots()
            self._pipeline.close()

    def _look(self, samples: Sequence[RawSample]) -> None:
        if self._own_contexts is not None:
            self._own_contexts.look(samples)
        if self.root_names is not None:
            self.root_names.look(samples)

    def _forget_roots(self) -> None:
        if self.root_names is not None:
            self.root_names.stop()

    def _pause_sampler(self) -> None:
        self._sampler.pause()
        self._pipeline.step(0)

    def _flush_window(self) -> None:
        self._pipeline.change_windows(self._clock.boot_ns(), self._schedule)
        closed = self._windows
        for _ in range(_FLUSH_STEPS):
            self._pipeline.step(_FLUSH_STEP_S)
            if self._windows != closed:
                return

    def _count_window(self, window: Window) -> None:
        self._windows += 1
        if self.root_names is not None:
            window = self.root_names.name(window)
        self._sink(name_entries(self._labels.limit(window)))


def _describe_start(plan: Plan, config: SamplerConfig) -> str:
    target = {"self": "this process", "children": "this process and its descendants"}
    left_out = describe_left_out(config, plan.user_symbols.detail)
    return f"profiling {target.get(plan.target, 'the host')}: {describe_sampling(config)}{left_out}"
