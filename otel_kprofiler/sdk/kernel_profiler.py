"""The embedded profiler: start, pause, stop, and restart in forked children."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Self

from opentelemetry.sdk.resources import Resource

from otel_kprofiler import forks
from otel_kprofiler.bpf import without_signals
from otel_kprofiler.errors import ConfigError, KProfilerError
from otel_kprofiler.export import ClientSettings
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from otel_kprofiler.model import MAX_FRAMES, PYTHON_FRAMES, AttributeValue, Window
from otel_kprofiler.pipeline import FIRST_WINDOW_NS, WindowSchedule
from otel_kprofiler.sampling import OffCpuConfig, SamplerConfig
from otel_kprofiler.sdk.ancestors import describe_sampling_ancestor
from otel_kprofiler.sdk.environment import Wanted, read_environment, read_options
from otel_kprofiler.sdk.exporters import ExporterFactory
from otel_kprofiler.sdk.green_threads import refuse_green_threads, watch
from otel_kprofiler.sdk.later import LaterStart, warn_without_threads
from otel_kprofiler.sdk.pauses import Pauses
from otel_kprofiler.sdk.plan import Plan, Target
from otel_kprofiler.sdk.provider import (
    EXIT_TIMEOUT_MILLIS,
    BatchProfileProcessor,
    ProfilerProvider,
    get_profiler_provider,
)
from otel_kprofiler.sdk.publishing import publish_context, publish_service
from otel_kprofiler.sdk.refusals import make_second_error, refuse_subinterpreters
from otel_kprofiler.sdk.session import Session
from otel_kprofiler.sdk.signals import come_before_sigterm
from otel_kprofiler.sdk.thread_contexts import describe_threads
from otel_kprofiler.sdk.thread_states import renew_thread_id
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.workers import is_before_workers

OnError = Literal["raise", "warn"]

_STOP_MILLIS: Final = 10_000

_log = logging.getLogger(__name__)


class KernelProfiler(ForkAware):
    """Profiles this process, its descendants or the host. Thread-safe.

    Only one profiler may run at a time::

        from otel_kprofiler.sdk import KernelProfiler

        KernelProfiler.from_env().start()

    By default, :meth:`start` never raises: if privileges are missing, it logs a single warning that
    names them, and the service continues. At interpreter exit, pending samples are exported within
    two seconds.

    Args:
        provider: receives the profiles; by default, the global provider.
        samples_per_second: the sampling rate per CPU, 1 to 10000.
        stacks: the stacks to collect; with ``kernel``, time in user mode is not sampled.
        target: what to profile: this process, this process and its descendants, or the host.
        max_frames: the maximum number of frames in a kernel or user stack, 1 to 127.
        python_frames: the maximum number of Python frames per stack, 0 to 127; 0 disables them.
        off_cpu: whether to also sample where the target's threads wait off-CPU, and for what.
        reporter_interval_s: the length of a window, in seconds.
        attributes: the profiles' resource attributes, which override the service's attributes.
        span_links: whether to link samples to the span that was active in their thread.
        link_unsampled_spans: whether to also link samples to spans that are not sampled.
        local_root_names: whether to label linked samples with the name of their local root span,
            using a span processor in the global TracerProvider.
        baggage_keys: the keys of the baggage entries to add to samples as labels. Each label
            contains the entry's value at the start of the local root span.
        publish_context: whether to publish the Resource for profilers outside this process (OTEP
            4719).
        publish_thread_contexts: whether to also publish each thread's current span (OTEP 4947).
        restart_in_children: whether to start a profiler in each forked child.
        export_on_sigterm: whether :meth:`start` calls :meth:`export_on_sigterm`.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        provider: ProfilerProvider | None = None,
        *,
        samples_per_second: int = 19,
        stacks: Literal["kernel", "user", "both"] = "both",
        target: Target = "self",
        max_frames: int = MAX_FRAMES,
        python_frames: int = PYTHON_FRAMES,
        off_cpu: bool = False,
        reporter_interval_s: float = 5.0,
        attributes: Mapping[str, AttributeValue] | None = None,
        span_links: bool = True,
        link_unsampled_spans: bool = False,
        local_root_names: bool = True,
        baggage_keys: Sequence[str] = (),
        publish_context: bool = True,
        publish_thread_contexts: bool = True,
        restart_in_children: bool = True,
        export_on_sigterm: bool = False,
    ) -> None:
        self._plan = Plan(
            target=target,
            sampler=SamplerConfig(
                samples_per_second=samples_per_second,
                stacks=stacks,
                max_frames=max_frames,
                python_frames=python_frames,
                off_cpu=OffCpuConfig(leaves_out="process") if off_cpu else None,
            ),
            schedule=WindowSchedule(
                int(reporter_interval_s * 1e9), jitter=0.2, first_ns=FIRST_WINDOW_NS
            ),
            attributes=dict(attributes or {}),
            span_links=span_links,
            link_unsampled_spans=link_unsampled_spans,
            local_root_names=local_root_names,
            baggage_keys=tuple(baggage_keys),
            publish_context=publish_context,
            publish_thread_contexts=publish_thread_contexts,
            restart_in_children=restart_in_children,
            export_on_sigterm=export_on_sigterm,
        )
        self._given_provider = provider
        self._exporters: tuple[ExporterFactory, ...] = ()
        self._provider: ProfilerProvider | None = None
        self._session: Session | None = None
        self._resource = Resource.get_empty()
        self._inherited: KernelSymbolizer | None = None
        self._lock = ProcessLock()
        self._later = LaterStart(functools.partial(self.start, "warn"), self._lock)
        self._pauses = Pauses(self._lock, lambda: self._session)
        self._samples = self._linked = 0
        self._account: dict[str, object] = {}
        self._disabled = ""
        self._problem = ""
        self._mistakes: ConfigError | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Create a profiler from ``OTEL_KPROFILER_*`` and OpenTelemetry's environment variables.

        ``OTEL_PROFILES_EXPORTER`` selects the exporters; see
        :mod:`otel_kprofiler.sdk.environment_variables`. If ``OTEL_CONFIG_FILE`` is set, the
        ``otlp`` exporter uses the settings of the first OTLP exporter in that file. Logs a warning
        about unknown variables. :meth:`start` reports all invalid values at once.
        """
        if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            disabled = cls()
            disabled._disabled = "OTEL_SDK_DISABLED"
            return disabled
        return cls._read(functools.partial(read_environment, environ))

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, Any],
        *,
        otlp: ClientSettings | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """Create a profiler from options instead of ``OTEL_KPROFILER_*``.

        Args:
            options: the values by key; :meth:`start` reports all invalid values at once.
            otlp: the settings of the ``otlp`` exporter; by default, read as in :meth:`from_env`.
            environ: the environment variables that select the exporters, as for :meth:`from_env`.
        """
        return cls._read(functools.partial(read_options, options, otlp, environ))

    @classmethod
    def _read(cls, read: Callable[[], Wanted]) -> Self:
        profiler = cls()
        try:
            plan, exporters = read()
        except ConfigError as error:
            profiler._mistakes = error
            return profiler
        profiler._plan = plan or profiler._plan
        profiler._exporters = exporters
        if not exporters:
            profiler._disabled = "OTEL_PROFILES_EXPORTER=none"
        return profiler

    def start(self, on_error: OnError = "warn") -> Self:
        """Start profiling, unless this profiler is already running or is disabled.

        Also restarts a profiler that an error has ended.

        If profiling is impossible, ``warn`` logs the reason and the fix. With ``raise``, an
        exception is raised instead.

        Raises:
            ConfigError: an environment variable has an invalid value. The message lists all
                problems.
            HostError: this host cannot be profiled, or this user is not permitted to profile it.
            SamplerError: the BPF program cannot be loaded.
            ExportError: an exporter cannot be opened.
        """
        forks.catch_up()
        if self._session is not None and self._session.failure:
            self.stop()
        with self._lock:
            if self._session is not None or self._disabled:
                return self
            try:
                with without_signals(), forks.delay():
                    self._start()
            except KProfilerError as error:
                self._problem = error.message
                if on_error == "raise":
                    raise
                _log.warning("cannot collect kernel profiles: %s", error.with_fix())
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"
                if on_error == "raise":
                    raise
                _log.exception("cannot collect kernel profiles because of an unexpected error")
        return self

    def stop(self, timeout_millis: float = _STOP_MILLIS) -> None:
        """Stop profiling and pass the last window to the provider; idempotent.

        A profiler that opened its own exporters (:meth:`from_env`) exports pending samples and
        shuts the exporters down, within the timeout.
        """
        global _running  # noqa: PLW0603 - one per process
        deadline = time.monotonic() + timeout_millis / 1000
        forks.catch_up()
        with self._lock:
            self._later.cancel()
            session, provider = self._session, self._provider
            self._session = self._provider = None
            if _running is self:
                _running = None
            forks.unregister(self)
        if session is not None and provider is not None:
            session.stop(timeout_millis / 1000)
            publish_context(self._plan, self._find_resource, sampling=False)
            provider.detach(self)
            self._problem = session.failure
            if self._exporters:
                provider.shutdown(max(0.0, deadline - time.monotonic()) * 1000)
            self._account = session.account().as_dict()

    def stop_before_patching(self) -> None:
        """Stop before gevent patches threads, and log why; see :mod:`.green_threads`."""
        with self._lock:  # waits for a start in progress
            is_active = self._session is not None or self._later.due
        if is_active:
            self.stop(EXIT_TIMEOUT_MILLIS)
            self._later.join(EXIT_TIMEOUT_MILLIS / 1000)
            self.start()

    def export_on_sigterm(self) -> None:
        """Export pending samples on SIGTERM, then let the signal take effect.

        Without a handler, SIGTERM terminates a Python process immediately, and up to one window of
        samples is lost. After this call, pending samples are exported for up to two seconds before
        the signal terminates the process. If the service has a handler, that handler runs without
        delay, while the samples are exported in the background.

        Call this method in the main thread, before a server such as uvicorn installs its own
        handler. Many servers restore the earlier handler at shutdown, and then raise the signal
        again. Python runs signal handlers between bytecode instructions in the main thread, so
        SIGTERM has no effect while the main thread is blocked in native code.

        Raises:
            ValueError: the calling thread is not the main thread.
        """
        come_before_sigterm(flush=self._flush_provider, end=self._shut_down_provider)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Pause sampling inside a ``with`` block. Blocks may overlap, even in different threads."""
        return self._pauses.block()

    def flush_window(self, timeout_millis: float) -> bool:
        """Pass the samples taken so far to the provider.

        Returns False on timeout, and True if the profiler is not running.
        """
        forks.catch_up()
        session = self._session
        return session is None or session.flush_window(timeout_millis / 1000)

    def stats(self) -> dict[str, Any]:
        """Returns the state and counters of this profiler as plain values.

        Each ``problem`` states why data is missing, and is empty if nothing is missing.

        - ``state``: ``running``, ``paused``, ``stopped`` or ``disabled``.
        - ``problem``: the reason why the profiler is not running.
        - ``samples``, ``linked``: number of samples in closed windows, and of those with a link.
        - ``account``: the number of samples by outcome, such as exported or lost.
        - ``thread_contexts``: ``published``, ``problem`` and ``failures``.

        The other keys exist only while the profiler is running:

        - ``python_frames``: ``problem`` and ``stacks`` (counts by outcome).
        - ``labels``: ``possible``, ``samples`` (with labels) and ``left_out`` (counts by reason).
        - ``span_links``: ``source`` (``interpreter`` or ``thread_contexts``), ``possible``,
          ``problem`` and ``unlinked_share`` (the fraction of samples without a link, 0 to 1).
          ``local_roots`` counts samples with a name, samples without a name by reason, and tracked,
          forgotten and failed spans. ``other_classes`` describes spans from other SDKs, if any.
        """
        forks.catch_up()
        session = self._session
        state = "paused" if self._pauses else "running"
        if session is None or session.failure:
            state = "disabled" if self._disabled else "stopped"
        stats: dict[str, Any] = {
            "state": state,
            "problem": self._disabled or (session.failure if session else self._problem),
            "samples": self._samples,
            "linked": self._linked,
            "thread_contexts": describe_threads(),
        }
        if session is None:
            stats["account"] = self._account
        else:
            stats |= session.describe()
            if "span_links" in stats:
                stats["span_links"]["unlinked_share"] = 1 - self._linked / max(self._samples, 1)
        return stats

    def _start(self) -> None:
        global _running  # noqa: PLW0603 - one per process
        if self._mistakes is not None:
            raise self._mistakes
        refuse_subinterpreters()
        if _running is not None and _running is not self:
            raise make_second_error()
        watch(self)
        if is_before_workers():
            forks.register(ForkStep.RESTART, self)
            self._problem = self._later.in_workers()
            return
        self._later.due = False
        if ancestor := describe_sampling_ancestor():
            self._problem = ancestor
            service = self._provider or self._given_provider or get_profiler_provider()
            publish_service(self._plan, lambda: service.resource, sampling=False)
            return
        renew_thread_id()
        warn_without_threads()
        inherited = self._provider  # the parent's provider in a forked child, else None
        new = ProfilerProvider() if self._exporters and inherited is None else self._given_provider
        provider = self._provider = inherited or new or get_profiler_provider()
        self._resource = provider.resource
        self._publish(sampling=True)
        try:
            refuse_green_threads()
            if inherited is None:
                for exporter in self._exporters:
                    provider.add_profile_processor(BatchProfileProcessor(exporter))
            take = functools.partial(self._take, provider)
            self._session = Session(
                self._plan,
                self._resource,
                take,
                exporters=provider.accounts,
                earlier=provider.handed_over,
                inherited=self._inherited,
            )
        except BaseException:
            self._provider = None
            self._publish(sampling=False)
            if self._exporters:
                provider.shutdown(0)
            raise
        if self._pauses:
            self._session.pause()
        self._publish(sampling=True)  # republish: readers check that sampling is active
        provider.attach(self)
        self._problem = ""
        _running = self
        forks.register(ForkStep.RESTART, self)
        if self._plan.export_on_sigterm:
            try:
                self.export_on_sigterm()
            except ValueError:
                _log.warning("samples will not be sent on SIGTERM: call start() in the main thread")

    def _flush_provider(self) -> None:
        if (provider := self._provider) is not None:
            provider.force_flush(EXIT_TIMEOUT_MILLIS)

    def _shut_down_provider(self) -> None:
        if (provider := self._provider) is not None:
            provider.shutdown(EXIT_TIMEOUT_MILLIS)

    def _publish(self, *, sampling: bool) -> None:
        publish_service(self._plan, self._find_resource, sampling=sampling)

    def _find_resource(self) -> Resource:
        return self._resource if (provider := self._provider) is None else provider.resource

    def _take(self, provider: ProfilerProvider, window: Window) -> None:
        linked = [sample for _, sample in window.samples if sample.link is not None]
        self._samples += window.sample_count
        self._linked += sum(len(sample.timestamps_unix_ns) for sample in linked)
        provider.on_window(window)
        self._renew_resource(provider)

    def _renew_resource(self, provider: ProfilerProvider) -> None:
        """From the next window on, use the service's current Resource."""
        resource, session = provider.resource, self._session
        if session is None or resource == self._resource:
            return
        self._resource = resource
        session.set_service(resource)
        self._publish(sampling=True)

    def after_fork_in_child(self) -> None:
        """Reset the profiler in a forked child, and schedule its restart if configured."""
        global _running  # noqa: PLW0603 - one per process
        _running = None
        renew_thread_id()
        _abandoned.append(self._session)
        self._inherited = self._session.symbolizer if self._session else None
        self._session = None
        self._pauses.after_fork_in_child()
        self._samples = self._linked = 0
        if self._later.due:
            self._later.soon()
        elif self._plan.target != "self":
            self._problem = f"sampled by process {os.getppid()} (target {self._plan.target})"
        elif self._plan.restart_in_children:
            self._later.soon()
        else:
            self._problem = "not restarted in a forked child"


_running: KernelProfiler | None = None
_abandoned: list[object] = []
