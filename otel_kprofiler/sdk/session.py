"""One run of the embedded profiler: what is open in the kernel, and the thread that drains it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from opentelemetry.sdk.resources import Resource

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import Account, ExporterAccount, Window
from otel_kprofiler.pipeline import open_live, open_symbols
from otel_kprofiler.sdk.links import SpanLinks
from otel_kprofiler.sdk.pacing import Pacer
from otel_kprofiler.sdk.plan import Plan, complete_sampler_config, make_resources, set_service
from otel_kprofiler.symbols import Symbolizer

DRAIN_THREAD: Final = "kprofiler-drain"
_FLUSH_STEPS: Final = 50
_FLUSH_STEP_S: Final = 0.01
_RING_BYTES: Final = 64 * 1024
"""Room for about 600 records of BPF programs per CPU; each process of a service has such rings."""

_log = logging.getLogger(__name__)


class Session:
    """Samples from its constructor until :meth:`stop`.

    The pipeline belongs to a daemonic thread; the methods here may be called from any other.

    Args:
        plan: what to profile.
        service: the Resource of the service.
        sink: takes each window, in the draining thread.
        exporters: what became of the samples that the sink was given.
        earlier: samples that it was given before.
        inherited: the symbols of the parent, in a forked child.

    Attributes:
        symbolizer: names kernel addresses.
        links: tells the spans of threads; None if that is not wanted.
        failure: why the thread has ended by itself; empty if it has not.

    Raises:
        HostError: this host, or this user on it, cannot be profiled.
        SamplerError: the kernel program cannot be loaded.
    """

    def __init__(
        self,
        plan: Plan,
        service: Resource,
        sink: Callable[[Window], None],
        *,
        exporters: Callable[[], tuple[ExporterAccount, ...]] = tuple,
        earlier: int = 0,
        inherited: Symbolizer | None = None,
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
        self._pipeline = open_live(
            config,
            plan.schedule,
            self._count_window,
            access=access,
            clock=clock,
            resources=make_resources(plan, access, clock),
            symbolizer=self.symbolizer,
            exporters=exporters,
            loader=plan.loader,
            pause=Pacer(),
        )
        self._sampler = self._pipeline.sampler
        self.failure = ""
        self.links: SpanLinks | None = None
        self._plan, self._access = plan, access
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=DRAIN_THREAD, daemon=True)
        try:
            self.set_service(service)
            self._pipeline.start()
            if plan.span_links:
                self.links = SpanLinks(self._sampler.spans)
                self.links.start()
            self._thread.start()
        except BaseException:
            if self.links is not None:
                self.links.stop()
            self._pipeline.close()
            raise

    def set_service(self, service: Resource) -> None:
        """Give the profiles another Resource of the service; from the sink only."""
        set_service(self._pipeline.resources, self._plan, service, self._access)

    def flush_window(self, timeout_s: float) -> bool:
        """Close the window that is open; False if that takes longer."""
        return self._call(self._flush_window, timeout_s)

    def pause(self, timeout_s: float = 1.0) -> bool:
        """Take no samples until :meth:`resume`."""
        return self._call(self._sampler.pause, timeout_s)

    def resume(self, timeout_s: float = 1.0) -> bool:
        """Take samples again."""
        return self._call(self._sampler.resume, timeout_s)

    def account(self) -> Account:
        """Where the samples are, as of one instant."""
        return self._pipeline.account()._replace(earlier=self._earlier)

    def stop(self, timeout_s: float) -> None:
        """Stop sampling and hand over the last window, for as long as the time allows."""
        self._stopping = True
        if self._thread.is_alive():
            self._pipeline.wake()
            self._thread.join(timeout_s)

    def _call(self, command: Callable[[], None], timeout_s: float) -> bool:
        """Have the draining thread do something; False if it does not get to it in time."""
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
                self._pipeline.step(self._interval_s)
                if self.links is not None:
                    self.links.look()
                while not self._commands.empty():
                    self._commands.get()()
            self._pipeline.stop()
        except Exception as error:  # noqa: BLE001 - logged; the service goes on without profiles
            self.failure = f"{type(error).__name__}: {error}"
            _log.exception("profiling has ended by an error")
        finally:
            # In this order: a thread that comes for a slot finds the map open, or no hook.
            if self.links is not None:
                self.links.stop()
            self._pipeline.close()

    def _flush_window(self) -> None:
        self._pipeline.change_windows(self._clock.boot_ns(), self._schedule)
        closed = self._windows
        for _ in range(_FLUSH_STEPS):
            self._pipeline.step(_FLUSH_STEP_S)
            if self._windows != closed:
                return

    def _count_window(self, window: Window) -> None:
        self._windows += 1
        self._sink(window)
