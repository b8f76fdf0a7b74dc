"""The provider of profiles and its processors: names and life cycle of the other signals' SDKs."""

from __future__ import annotations

import abc
import logging
import os
import threading
import time
from collections import Counter
from typing import Final, Protocol

from opentelemetry.sdk.resources import Resource

from otel_kprofiler import forks
from otel_kprofiler.delivery import Reporter
from otel_kprofiler.export import ExportQueue, ProfileExporter
from otel_kprofiler.forks import ForkAware, ForkStep
from otel_kprofiler.model import Encoding, ExporterAccount, LossCause, Losses, Window
from otel_kprofiler.otlp import Encoded, encode_window
from otel_kprofiler.sdk import exits
from otel_kprofiler.sdk.exporters import ExporterFactory
from otel_kprofiler.sdk.pacing import Pacer
from otel_kprofiler.sdk.resource import ServiceResource

EXIT_TIMEOUT_MILLIS: Final = 2_000
"""How long the end of the interpreter may be held up by what is left to export."""

_log = logging.getLogger(__name__)

_abandoned: list[object] = []
"""In a forked child: what would close connections of the parent if it were collected."""


class ProfileProcessor(abc.ABC):
    """Takes the windows of profilers. Windows come from one thread for each profiler."""

    @abc.abstractmethod
    def on_window(self, window: Window) -> None:
        """A window has been closed."""

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until all that came is exported or lost; False if time ran out."""
        return True

    @abc.abstractmethod
    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Export what is left within the time; idempotent."""

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """What became of the samples, by exporter."""
        return ()

    def after_fork_in_child(self) -> None:  # noqa: B027 - not every processor has threads
        """Begin anew in a forked child, where no other thread lives; locks may be held for ever."""


class BatchProfileProcessor(ProfileProcessor):
    """Exports each window from a thread of its own; never blocks who hands it over.

    Args:
        exporter: where to; or what makes it, so that a forked child can make one of its own.
            With an exporter itself, nothing is exported in children.
        max_queue_size: batches that may wait; the oldest gives way and is counted.
    """

    def __init__(
        self, exporter: ProfileExporter | ExporterFactory, *, max_queue_size: int = 1000
    ) -> None:
        self._make = None if isinstance(exporter, ProfileExporter) else exporter
        self._max_queue_size = max_queue_size
        opened = exporter if isinstance(exporter, ProfileExporter) else exporter()
        self._reporter: Reporter | None = self._open(opened)

    def on_window(self, window: Window) -> None:
        """Encode the window, and leave it to the thread."""
        if self._reporter is None and self._make is not None:
            self._reporter = self._open(self._make())
        if self._reporter is not None:
            self._reporter(window)

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until all that came is exported or lost; False if time ran out."""
        return self._reporter is None or self._reporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Export what is left within the time; idempotent."""
        if self._reporter is not None:
            self._reporter.shutdown(timeout_millis)

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """What became of the samples."""
        return self._reporter.accounts() if self._reporter else ()

    def after_fork_in_child(self) -> None:
        """Leave everything to the parent; open an exporter for the first window of the child."""
        _abandoned.append(self._reporter)
        self._reporter = None

    def _open(self, exporter: ProfileExporter) -> Reporter:
        queue = ExportQueue(exporter, size=self._max_queue_size)
        return Reporter([queue], encoder=_encode_gently, background=False)


class SimpleProfileProcessor(ProfileProcessor):
    """Exports each window at once, in the thread that hands it over; for tests and consoles.

    Sampling goes on meanwhile, but the ring fills: an exporter that blocks for long costs samples.

    Args:
        exporter: where to.
    """

    def __init__(self, exporter: ProfileExporter) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        self._account = ExporterAccount(exporter.name, 0, {}, 0)

    def on_window(self, window: Window) -> None:
        """Encode and export the window."""
        encoded = _encode_gently(window, self._exporter.encoding)
        if encoded.too_large:
            with self._lock:
                self._count(0, {LossCause.TOO_LARGE: encoded.too_large})
        for batch in encoded.batches:
            with self._lock:
                result = self._exporter.export(batch)
                self._count(result.exported, result.lost)

    def _count(self, exported: int, lost: Losses) -> None:
        exported += self._account.exported
        lost = Counter(self._account.lost) + Counter(lost)
        self._account = self._account._replace(exported=exported, lost=lost)

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Flush the exporter."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown(timeout_millis)

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """What became of the samples."""
        return (self._account,)

    def after_fork_in_child(self) -> None:
        """The exporter's lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        self._account = ExporterAccount(self._exporter.name, 0, {}, 0)


def _encode_gently(window: Window, encoding: Encoding) -> Encoded:
    pacer = Pacer()
    pacer.rest()  # closing the window was work, too
    encoded = encode_window(window, **encoding._asdict(), pause=pacer)
    pacer.rest()  # so will be freeing it
    return encoded


class Source(Protocol):
    """A profiler, as its provider sees it."""

    def flush_window(self, timeout_millis: float) -> bool:
        """Close the window that is open; False if that took too long."""

    def stop(self, timeout_millis: float) -> None:
        """Stop; hand over the last window."""


class ProfilerProvider(ForkAware):
    """Hands the windows of profilers to processors, under one Resource. Thread-safe.

    Args:
        resource: of the service; by default that of the global TracerProvider, else of the
            global MeterProvider, also if they are set later, else ``Resource.create()``.
        shutdown_on_exit: shut down when the process ends by itself, within two seconds.
    """

    def __init__(self, resource: Resource | None = None, *, shutdown_on_exit: bool = True) -> None:
        self._resource = ServiceResource(resource)
        self._lock = threading.Lock()
        self._processors: tuple[ProfileProcessor, ...] = ()
        self._handed_over = 0
        self._not_offered: dict[ProfileProcessor, int] = {}
        self._sources: tuple[Source, ...] = ()
        self._closed = False
        self._shutdown_on_exit = shutdown_on_exit
        if shutdown_on_exit:
            exits.call_at_exit(self._exit)
        self._pid = os.getpid()
        forks.register(ForkStep.RENEW, self)

    @property
    def resource(self) -> Resource:
        """The Resource of all profiles from now on; the same object as long as it is the same."""
        return self._resource.get()

    def add_profile_processor(self, profile_processor: ProfileProcessor) -> None:
        """Hand every window to this processor, too."""
        with self._lock:
            self._processors = (*self._processors, profile_processor)
            self._not_offered[profile_processor] = self._handed_over

    def on_window(self, window: Window) -> None:
        """Take a window of a profiler; a processor that fails does not harm the others."""
        with self._lock:
            self._handed_over += window.sample_count
            processors = self._processors
        for processor in processors:
            try:
                processor.on_window(window)
            except Exception:  # noqa: BLE001 - logged; profiling goes on
                _log.exception("a processor failed at a window of %d samples", window.sample_count)

    def attach(self, source: Source) -> None:
        """A profiler has started."""
        with self._lock:
            self._sources = (*self._sources, source)

    def detach(self, source: Source) -> None:
        """A profiler has stopped."""
        with self._lock:
            self._sources = tuple(one for one in self._sources if one is not source)

    @property
    def handed_over(self) -> int:
        """Samples of all windows so far."""
        return self._handed_over

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """What became of the samples, by exporter; see :attr:`handed_over` for their sum."""
        return tuple(
            account._replace(not_offered=account.not_offered + not_offered)
            for processor, not_offered in self._not_offered.copy().items()
            for account in processor.accounts()
        )

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Export all that has been sampled so far; False if time ran out."""
        deadline = time.monotonic() + timeout_millis / 1000
        flushed = [source.flush_window(_millis_to(deadline)) for source in self._sources]
        flushed += [one.force_flush(_millis_to(deadline)) for one in self._processors]
        return all(flushed)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Stop the profilers and export what is left within the time; idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        deadline = time.monotonic() + timeout_millis / 1000
        for source in self._sources:
            source.stop(_millis_to(deadline))
        for processor in self._processors:
            processor.shutdown(_millis_to(deadline))
        exits.cancel(self._exit)

    def before_fork(self) -> None:
        """Remember what the parent shares with its other signals."""
        self._resource.before_fork()

    def after_fork_in_child(self) -> None:
        """Begin anew in a forked child: the profilers of the parent are not here."""
        self._lock = threading.Lock()
        self._resource.after_fork_in_child()
        self._sources = ()
        self._pid = os.getpid()
        self._handed_over = 0
        self._not_offered = dict.fromkeys(self._processors, 0)
        for processor in self._processors:
            processor.after_fork_in_child()
        if self._shutdown_on_exit:
            exits.call_at_exit_of_child(self._exit)

    def _exit(self) -> None:
        if self._pid == os.getpid():
            self.shutdown(EXIT_TIMEOUT_MILLIS)


_global_lock = threading.Lock()
_global: ProfilerProvider | None = None


def set_profiler_provider(profiler_provider: ProfilerProvider) -> None:
    """Set the global provider; once only, as for the other signals."""
    global _global  # noqa: PLW0603 - what a global provider is
    with _global_lock:
        if _global is not None:
            _log.warning("Overriding of current ProfilerProvider is not allowed")
            return
        _global = profiler_provider


def get_profiler_provider() -> ProfilerProvider:
    """The global provider; one without processors if none was set."""
    global _global  # noqa: PLW0603 - what a global provider is
    with _global_lock:
        if _global is None:
            _global = ProfilerProvider()
        return _global


def _millis_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1000
