"""The profiler provider and its processors, modelled on the SDK's tracer provider."""

import abc
import atexit
import logging
import os
import time
from collections.abc import Sequence
from typing import Final, Protocol

from opentelemetry.sdk.resources import Resource

from otel_kprofiler import forks
from otel_kprofiler.bpf import without_signals
from otel_kprofiler.delivery import Reporter
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import ExportQueue, Ledgers, ProfileExporter, export_all
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from otel_kprofiler.model import Encoding, ExporterAccount, LossCause, SampleCounts, Window
from otel_kprofiler.otlp import Encoded, encode_window
from otel_kprofiler.sdk import exits
from otel_kprofiler.sdk.exporters import ExporterFactory
from otel_kprofiler.sdk.pacing import Pacer
from otel_kprofiler.sdk.resource import ServiceResource
from otel_kprofiler.sdk.signals import put_off_sigterm

EXIT_TIMEOUT_MILLIS: Final = 2_000
"""How long exporting pending samples may delay interpreter exit, in milliseconds."""

_log = logging.getLogger(__name__)

_abandoned: list[object] = []
"""Objects kept alive in forked children; freeing them would close the parent's connections."""


class ProfileProcessor(abc.ABC):
    """Receives windows from profilers, on one thread per profiler."""

    @abc.abstractmethod
    def on_window(self, window: Window) -> None:
        """Process a closed window."""

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until all windows received so far are exported or lost. Return False on timeout."""
        return True

    @abc.abstractmethod
    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Export pending samples within the timeout; idempotent."""

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """Returns the number of samples by outcome, for each exporter and sample kind."""
        return ()

    def after_fork_in_child(self) -> None:  # noqa: B027 - not every processor has threads
        """Reset the processor in a forked child, where inherited locks might never be released."""


class BatchProfileProcessor(ProfileProcessor):
    """Exports windows in a dedicated thread; never blocks the profiler.

    Args:
        exporter: an exporter, or a factory that each forked child calls to open its own exporter.
            Without a factory, forked children export nothing. Samples that a child takes before it
            has opened an exporter are counted as not offered.
        max_queue_size: the maximum number of queued batches. If the queue is full, the oldest batch
            is dropped, and its samples are counted as lost.
    """

    def __init__(
        self, exporter: ProfileExporter | ExporterFactory, *, max_queue_size: int = 1000
    ) -> None:
        self._make = None if isinstance(exporter, ProfileExporter) else exporter
        self._max_queue_size = max_queue_size
        opened = exporter if isinstance(exporter, ProfileExporter) else exporter()
        self._name = opened.name
        self._is_open, self._problem = True, ""
        self._reporter = _open_reporter([self._open(opened)])

    def on_window(self, window: Window) -> None:
        """Encode the window and queue it for export."""
        try:
            if not self._is_open and self._make is not None:
                self._open_in_child(self._make)
        finally:
            self._reporter(window)

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until all windows received so far are exported or lost. Return False on timeout."""
        return self._reporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Export pending samples within the timeout; idempotent."""
        self._reporter.shutdown(timeout_millis)

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """Returns the outcomes of the samples passed to the exporter."""
        return self._reporter.accounts()

    def after_fork_in_child(self) -> None:
        """Leave pending batches to the parent.

        The child opens a new exporter for its first window.
        """
        _abandoned.append(self._reporter)
        self._is_open = False
        self._reporter = _open_reporter([], expected=[self._name])

    def _open_in_child(self, make: ExporterFactory) -> None:
        try:
            exporter = make()
        except ExportError as error:
            problem = error.with_fix()
            if problem != self._problem:
                _log.error("a forked child exports no samples: %s (logged once)", problem)
            self._problem = problem
            return
        self._is_open = True
        self._reporter.replace([self._open(exporter)])

    def _open(self, exporter: ProfileExporter) -> ExportQueue:
        with without_signals():
            return ExportQueue(exporter, size=self._max_queue_size)


class SimpleProfileProcessor(ProfileProcessor):
    """Exports each window immediately, in the profiler's thread, for tests and console output.

    Nothing drains the ring during an export, so samples are lost if the exporter blocks for long.
    """

    def __init__(self, exporter: ProfileExporter) -> None:
        self._exporter = exporter
        self._lock = ProcessLock()
        self._begin()

    def on_window(self, window: Window) -> None:
        """Encode and export the window."""
        encoded = _encode_gently(window, self._exporter.encoding)
        with self._lock:
            self._ledgers.lose(encoded.too_large, LossCause.TOO_LARGE)
            self._account = self._sum()
        for batch in encoded.batches:
            with self._lock:
                for _, result in export_all(self._exporter, [batch], None):
                    self._ledgers.conclude(result)
                self._account = self._sum()

    def _begin(self) -> None:
        self._ledgers = Ledgers()
        self._account = self._sum()

    def _sum(self) -> ExporterAccount:
        name = self._exporter.name
        kinds = {
            kind: ExporterAccount(name, kind_counts.exported, kind_counts.lost)
            for kind, kind_counts in self._ledgers.counts().kinds.items()
        }
        return ExporterAccount.of_kinds(name, kinds)

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Flush the exporter."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown(timeout_millis)

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """Returns the outcomes of the samples passed to the exporter."""
        return (self._account,)

    def after_fork_in_child(self) -> None:
        """Reset the sample counts in a forked child."""
        self._begin()


def _open_reporter(queues: Sequence[ExportQueue], expected: Sequence[str] = ()) -> Reporter:
    return Reporter(queues, encoder=_encode_gently, background=False, expected=expected)


def _encode_gently(window: Window, encoding: Encoding) -> Encoded:
    pacer = Pacer()
    pacer.rest()  # closing the window held the GIL
    encoded = encode_window(window, **encoding._asdict(), pause=pacer)
    pacer.rest()  # freeing the window holds the GIL
    return encoded


class Source(Protocol):
    """The profiler methods that its provider calls."""

    def flush_window(self, timeout_millis: float) -> bool:
        """Close the current window. Return False on timeout."""

    def stop(self, timeout_millis: float) -> None:
        """Stop profiling, and pass the last window to the provider."""


class ProfilerProvider(ForkAware):
    """Passes profilers' windows to processors, under one Resource. Thread-safe.

    Args:
        resource: the service's Resource. By default, the Resource of the global TracerProvider or
            MeterProvider, even if it is set later; failing that, ``Resource.create()``.
        shutdown_on_exit: whether to shut down at process exit, within two seconds.
    """

    def __init__(self, resource: Resource | None = None, *, shutdown_on_exit: bool = True) -> None:
        self._resource = ServiceResource(resource)
        self._lock = ProcessLock()
        self._processors: tuple[ProfileProcessor, ...] = ()
        self._handed_over = SampleCounts()
        self._not_offered: dict[ProfileProcessor, SampleCounts] = {}
        self._sources: tuple[Source, ...] = ()
        self._closed = False
        self._shutdown_on_exit = shutdown_on_exit
        if shutdown_on_exit:
            exits.call_at_exit(self._exit)
        self._pid = os.getpid()
        forks.register(ForkStep.RENEW, self)

    @property
    def resource(self) -> Resource:
        """Returns the current Resource for all profiles; the same object until it changes."""
        forks.catch_up()
        return self._resource.get()

    def add_profile_processor(self, profile_processor: ProfileProcessor) -> None:
        """Add a processor, which receives all later windows."""
        forks.catch_up()
        with self._lock:
            self._processors = (*self._processors, profile_processor)
            self._not_offered[profile_processor] = self._handed_over.copy()

    def on_window(self, window: Window) -> None:
        """Pass a window to all processors, even if one of them raises an exception."""
        forks.catch_up()
        with self._lock:
            self._handed_over.update(window.sample_counts)
            processors = self._processors
        for processor in processors:
            try:
                processor.on_window(window)
            except Exception:  # noqa: BLE001 - logged; profiling continues
                _log.exception("a processor failed on a window of %d samples", window.sample_count)

    def attach(self, source: Source) -> None:
        """Add a profiler that has started."""
        with self._lock:
            self._sources = (*self._sources, source)

    def detach(self, source: Source) -> None:
        """Remove a profiler that has stopped."""
        with self._lock:
            self._sources = tuple(
                registered for registered in self._sources if registered is not source
            )

    @property
    def handed_over(self) -> SampleCounts:
        """Returns the number of samples in all windows received so far, by kind."""
        forks.catch_up()
        with self._lock:
            return self._handed_over.copy()

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """Returns the outcomes of all :attr:`handed_over` samples, for each exporter."""
        forks.catch_up()
        return tuple(
            account.add_not_offered(not_offered)
            for processor, not_offered in self._not_offered.copy().items()
            for account in processor.accounts()
        )

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Export all samples taken so far. Return False on timeout."""
        forks.catch_up()
        deadline = time.monotonic() + timeout_millis / 1000
        flushed = [source.flush_window(_millis_to(deadline)) for source in self._sources]
        flushed += [processor.force_flush(_millis_to(deadline)) for processor in self._processors]
        return all(flushed)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Stop the profilers and export pending samples within the timeout; idempotent."""
        forks.catch_up()
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        deadline = time.monotonic() + timeout_millis / 1000
        for source in self._sources:
            source.stop(_millis_to(deadline))
        for processor in self._processors:
            processor.shutdown(_millis_to(deadline))
        atexit.unregister(self._exit)  # the handler would keep this provider alive

    def before_fork(self) -> None:
        """Record the Resource that profiles share with the parent's other signals."""
        self._resource.before_fork()

    def after_fork_in_child(self) -> None:
        """Reset the provider in a forked child, which does not inherit the parent's profilers."""
        self._resource.after_fork_in_child()
        self._sources = ()
        self._pid = os.getpid()
        self._handed_over = SampleCounts()
        self._not_offered = {processor: SampleCounts() for processor in self._processors}
        for processor in self._processors:
            processor.after_fork_in_child()
        if self._shutdown_on_exit:
            exits.call_at_exit_of_child(self._exit)

    def _exit(self) -> None:
        if self._pid == os.getpid():
            with put_off_sigterm():
                self.shutdown(EXIT_TIMEOUT_MILLIS)


_global_lock = ProcessLock()
_global: ProfilerProvider | None = None


def set_profiler_provider(profiler_provider: ProfilerProvider) -> None:
    """Set the global provider.

    As for OpenTelemetry's other signals, the provider can be set only once.
    """
    global _global  # noqa: PLW0603 - the global provider
    with _global_lock:
        if _global is not None:
            _log.warning("Overriding of current ProfilerProvider is not allowed")
            return
        _global = profiler_provider


def get_profiler_provider() -> ProfilerProvider:
    """Returns the global provider; by default, a provider without processors."""
    global _global  # noqa: PLW0603 - the global provider
    with _global_lock:
        if _global is None:
            _global = ProfilerProvider()
        return _global


def _millis_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1000
