"""The agent's life cycle: start, sample, reload on SIGHUP, deliver pending samples, stop."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Final

from otel_kprofiler.agent.agent_settings import AgentConfig, find_fixed
from otel_kprofiler.agent.agent_status import describe_agent, open_health
from otel_kprofiler.agent.announcements import describe_start
from otel_kprofiler.agent.cpu_time import CpuTime, read_cpu_time
from otel_kprofiler.agent.leftovers import Leftovers
from otel_kprofiler.agent.limits import Governor, Meter, next_look_s
from otel_kprofiler.agent.memory import give_back_memory, limit_allocator, settle
from otel_kprofiler.agent.reload import ConfigReader, Lottery
from otel_kprofiler.agent.running_exporters import (
    RunningExporter,
    close_exporters,
    open_changed,
    put_in_place,
)
from otel_kprofiler.agent.systemd import Notifier
from otel_kprofiler.agent.targets import AgentTargets
from otel_kprofiler.agent.telemetry import Readings, Telemetry
from otel_kprofiler.agent.watchdog import Watchdog
from otel_kprofiler.clock import Clock
from otel_kprofiler.delivery import Reporter
from otel_kprofiler.errors import ExportError, HostError, KProfilerError, SamplerError
from otel_kprofiler.host import (
    PURPOSES,
    Access,
    Privileges,
    check_imports_without_capabilities,
    run_unprivileged,
)
from otel_kprofiler.model import Account
from otel_kprofiler.pipeline import (
    DRAIN_INTERVAL_S,
    IDLE_S,
    LONGEST_DRAIN_INTERVAL_S,
    Pipeline,
    PipelineOptions,
    change_attributes,
    open_live,
    open_resources,
    open_symbols,
)
from otel_kprofiler.sampling import EbpfSampler
from otel_kprofiler.stopping import DEFAULT_S, stop_within
from otel_kprofiler.symbols import KernelSymbolizer, SymbolLoader, open_user_names

if TYPE_CHECKING:
    from otel_kprofiler.agent.health import HealthServer

_DELIVERY_SHARE: Final = 0.5
"""Fraction of the shutdown timeout reserved for delivering pending samples."""
_CLOSING_SHARE: Final = 0.2
"""Fraction of the shutdown timeout reserved for aborting exports and sending the last metrics."""
_CLOSED_SHARE: Final = 0.1
"""Fraction of the shutdown timeout reserved for printing the final sample counts."""
_CALLS_PER_REPORT: Final = 16  # number of samples between progress reports during a step

_log = logging.getLogger(__name__)


def prepare() -> KernelSymbolizer:
    """Do the slow work that needs no configuration. Call before any thread starts.

    Returns the kernel symbolizer for an :class:`Agent`. Close it if no agent is created.
    """
    limit_allocator()
    return open_symbols(Access())


class Agent:
    """Runs in the main thread until SIGTERM or SIGINT, reloading its configuration on SIGHUP.

    Args:
        symbolizer: the kernel symbolizer from :func:`prepare`; the agent closes it.
        load: rereads the configuration on SIGHUP. Raises ``KProfilerError`` on failure.
        on_config: called with each reloaded configuration once it is in effect.
    """

    def __init__(
        self,
        config: AgentConfig,
        symbolizer: KernelSymbolizer,
        *,
        load: Callable[[], AgentConfig] | None = None,
        on_config: Callable[[AgentConfig], None] | None = None,
        access: Access | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self._config = config
        self._prepared: KernelSymbolizer | None = symbolizer  # None once sampling has started
        self._on_config = on_config
        self._access = access or Access()
        self._notifier = notifier or Notifier()
        self._reader = ConfigReader(load, self._notifier.reloading, self._wake) if load else None
        self._lottery = Lottery()
        self._is_sampling = True
        self._clock = Clock()
        self._next_sync = float("inf")
        self._stop_signal: signal.Signals | None = None
        self._stop_by = 0.0
        self._exporters: dict[str, RunningExporter] = {}
        self._leftovers = Leftovers()
        self._reporter: Reporter | None = None
        self._pipeline: Pipeline[EbpfSampler] | None = None
        self._targets: AgentTargets | None = None  # the pipeline uses this and the next two fields
        self._symbolizer: KernelSymbolizer | None = None
        self._user_names: SymbolLoader | None = None
        self._health: HealthServer | None = None
        self._telemetry = Telemetry(Readings(
            self.account, self._generation, self._count_lost_symbols, self._read_cpu_time,
            lambda: self._pipeline.budgets.coarse if self._pipeline else {},
        ))  # fmt: skip
        self._watchdog = Watchdog()
        self._meter, self._governor = Meter(), Governor()
        self._next_measure = 0.0
        self._calls = 0  # calls to _alive_sometimes since the last progress report
        self._privileges: Privileges | None = None

    def run(self) -> Account:
        """Run until a stop signal, and return the final sample counts.

        Raises:
            HostError: this host cannot be profiled and ``error_mode`` is ``propagate``, or threads
                without capabilities cannot read this installation's files.
            SamplerError: the sampler cannot be loaded and ``error_mode`` is ``propagate``.
            ExportError: an exporter's files are unusable.
        """
        config = self._config
        self._privileges = Privileges(drop_all=config.drop_all)
        check_imports_without_capabilities()
        # Threads started by C libraries inherit the capabilities of the calling thread.
        self._reporter = reporter = run_unprivileged(self._open_reporter)
        try:
            self._health = self._open_health(config, waits=True)
            with self._signals():
                self._start(reporter, config)
                if self._pipeline:
                    self._pipeline.step()  # starts the first export, which overlaps the next lines
                run_unprivileged(lambda: self._telemetry.configure(config))
                self._notifier.ready(self._status())
                settle()
                with self._watchdog.watching():
                    while self._stop_signal is None:
                        self._go_round()
                self._announce_stop()
                self._notifier.stopping()
                if self._pipeline:
                    self._pipeline.stop(self._time_left_s(_DELIVERY_SHARE + _CLOSING_SHARE))
                reporter.shutdown(self._time_left_s(_CLOSING_SHARE) * 1000)
                return self.account()
        finally:
            self._telemetry.close(self._time_left_s())
            reporter.shutdown(0)
            if self._pipeline:
                with stop_within(min(DEFAULT_S, self._time_left_s(_CLOSED_SHARE))):
                    self._pipeline.close()
            if self._health:
                self._health.close()
            self._privileges.close()

    def _announce_stop(self) -> None:
        assert self._stop_signal  # noqa: S101 - the loop ends with it
        name, limit_s = self._stop_signal.name, self._config.shutdown_timeout_s
        _log.info("stopping on %s; delivering pending samples for at most %g s", name, limit_s)

    def _time_left_s(self, kept_share: float = 0.0) -> float:
        """Returns the seconds left for the shutdown, less a reserved fraction of the timeout."""
        timeout_s = self._config.shutdown_timeout_s
        return max(0.0, self._stop_by - kept_share * timeout_s - time.monotonic())

    def _open_reporter(self) -> Reporter:
        wanted = self._config.exporters
        opened = open_changed({}, wanted)
        self._exporters = put_in_place({}, wanted, opened, self._telemetry.on_export)
        self._leftovers.look(wanted)
        return Reporter([running.queue for running in self._exporters.values()])

    def account(self) -> Account:
        """Returns how many samples have been taken, exported and lost so far. Thread-safe."""
        if self._pipeline:
            return self._pipeline.account()
        return Account.of_kinds({}, self._reporter.accounts() if self._reporter else ())

    def _generation(self) -> int:
        return self._symbolizer.snapshot.generation if self._symbolizer else 0

    def _read_cpu_time(self) -> CpuTime:
        return read_cpu_time(self._pipeline.sampler if self._pipeline else None)

    def _count_lost_symbols(self) -> Mapping[str, int]:
        return self._symbolizer.count_lost_records() if self._symbolizer else {}

    def _start(self, reporter: Reporter, config: AgentConfig) -> None:
        pipeline = None
        prepared, self._prepared = self._prepared, None
        try:
            symbolizer = prepared or open_symbols(self._access)
            self._user_names = open_user_names(config.user_symbols)
            self._targets = AgentTargets(self._access, config)
            pipeline = open_live(
                self._targets.sampler,
                config.schedule,
                reporter,
                access=self._access,
                clock=self._clock,
                resources=open_resources(
                    self._access,
                    self._clock,
                    config.resource,
                    service_sources=config.service_sources,
                ),
                symbolizer=symbolizer,
                user_names=self._user_names,
                loader=config.loader,
                options=config.apply_to(
                    PipelineOptions(exporters=reporter.accounts, pause=self._alive_sometimes)
                ),
            )
            pipeline.start()
        except (HostError, SamplerError) as error:
            if pipeline:
                pipeline.close()
            if config.must_sample:
                raise
            _log.error("no samples will be taken: %s", error.with_fix())
            return
        self._pipeline, self._symbolizer = pipeline, symbolizer
        self._configure_timers(config)
        self._draw(time.monotonic())
        exporters = [running.queue.exporter for running in self._exporters.values()]
        names = config.user_symbols.detail
        _log.info("%s", describe_start(pipeline.sampler, exporters, names, self._access))
        if self._privileges:
            for name in self._privileges.reduce_this_thread():
                _log.info("dropped %s, which is needed for %s", name, PURPOSES[name])

    def _go_round(self) -> None:
        if self._pipeline:
            self._pipeline.step(longest_s=LONGEST_DRAIN_INTERVAL_S, idle_s=self._find_idle_s())
            if self._targets:
                self._targets.follow(self._pipeline.sampler)
        else:
            time.sleep(DRAIN_INTERVAL_S)
        self._alive()
        now = time.monotonic()
        sync_s = self._config.clock_sync_interval_s
        if sync_s and now >= self._next_sync:
            self._next_sync = now + sync_s
            _log.debug("measured the clock offset again; it changed by %d ns", self._clock.sync())
        self._draw(now)
        if self._reader:
            self._reload(self._reader)

    def _find_idle_s(self) -> float:
        """Returns the time, in seconds, for which the loop may sleep if there are no samples."""
        if self._targets and self._targets.follows:
            return 0.0
        measures_s = self._next_measure - time.monotonic() if any(self._config.limits) else IDLE_S
        return max(0.0, min(IDLE_S, measures_s, self._notifier.longest_pause_s))

    def _alive(self) -> None:
        now = time.monotonic()
        self._watchdog.alive()
        self._notifier.alive(now)
        if now >= self._next_measure:
            self._stay_within_limits(now)

    def _alive_sometimes(self) -> None:
        """Report progress on only some calls, because this method is called for each sample."""
        self._calls = (self._calls + 1) % _CALLS_PER_REPORT
        if not self._calls:
            self._alive()

    def _stay_within_limits(self, now: float) -> None:
        config = self._config
        limits, interval_s = config.limits, config.monitor_interval_s
        self._next_measure = now + interval_s
        if self._pipeline is None or not any(limits):
            return
        usage, settings = self._meter.read(), self._pipeline.sampler.config
        self._next_measure = now + next_look_s(usage, limits, interval_s)
        wanted = config.sampler.samples_per_second
        rate = self._governor.decide(usage, limits, settings.samples_per_second, wanted)
        if limits.rss_bytes and usage.rss_bytes > limits.rss_bytes:
            give_back_memory()
        if rate == settings.samples_per_second:
            return
        _log.warning(
            "the agent is using %.1f%% of a core and %d MB; changing its sampling rate from %d to "
            "%d per second",
            100 * usage.cpu, usage.rss_bytes >> 20, settings.samples_per_second, rate,
        )  # fmt: skip
        changed_ns = self._pipeline.sampler.reconfigure(replace(settings, samples_per_second=rate))
        self._pipeline.change_windows(changed_ns, config.schedule)

    def _draw(self, now: float) -> None:
        """Decide at random whether to sample, with the probability ``probabilistic_threshold``."""
        wanted = self._lottery.draw(now)
        if self._pipeline is None or wanted in (None, self._is_sampling):
            return
        self._is_sampling = bool(wanted)
        _log.debug("sampling is %s during this probabilistic_interval", "on" if wanted else "off")
        if wanted:
            self._pipeline.sampler.resume()
        else:
            self._pipeline.sampler.pause()

    def _reload(self, reader: ConfigReader) -> None:
        config = reader.poll()
        if config is None:
            return
        problem = config if isinstance(config, KProfilerError) else None
        if not isinstance(config, KProfilerError):
            try:
                self._change(config)
            except KProfilerError as error:
                problem = error
        if problem:
            # Format here, so that the filter for repeated messages does not drop distinct problems.
            fix = f"\nfix: {problem.hint}" if problem.hint else ""
            _log.error(f"reload rejected; the old configuration remains in effect: {problem}{fix}")
            first = str(problem).partition("\n")[0]
            self._notifier.ready(f"{self._status()}; last reload rejected: {first}")
            return
        self._notifier.ready(self._status())

    def _change(self, config: AgentConfig) -> None:
        """Apply a configuration, or raise an error and change nothing."""
        old, reporter = self._config, self._reporter
        health = self._health
        assert reporter  # noqa: S101 - opened before the loop
        opened = run_unprivileged(lambda: open_changed(self._exporters, config.exporters))
        try:
            if config.health_endpoint != old.health_endpoint:
                health = self._open_health(config)
            self._change_receiver(old, config, reporter)
        except BaseException:
            close_exporters(opened)
            if health and health is not self._health:
                health.close()
            raise
        self._exporters = put_in_place(
            self._exporters, config.exporters, opened, self._telemetry.on_export
        )
        reporter.replace([running.queue for running in self._exporters.values()])
        run_unprivileged(lambda: self._leftovers.look(config.exporters))
        if self._health and health is not self._health:
            self._health.close()
        self._health = health
        self._config = config
        try:
            run_unprivileged(lambda: self._telemetry.configure(config))
        except ExportError as error:
            _log.warning("the agent's own metrics keep their previous settings: %s", error)
        if self._on_config:
            self._on_config(config)
        _log.info("configuration reloaded; new exporters: %s", ", ".join(opened) or "none")

    def _change_receiver(self, old: AgentConfig, new: AgentConfig, reporter: Reporter) -> None:
        if self._pipeline is None:
            # The condition that prevented the start may no longer hold.
            self._start(reporter, new)
            return
        pipeline = self._pipeline
        # longer than configured if a limit has lowered the rate
        period_ns = pipeline.sampler.period_ns
        targets = AgentTargets(self._access, new)
        changed_ns = pipeline.sampler.reconfigure(targets.sampler)
        self._targets = targets
        if pipeline.sampler.period_ns != period_ns or new.schedule != old.schedule:
            pipeline.change_windows(changed_ns, new.schedule)
        pipeline.options = new.apply_to(pipeline.options)
        if (new.resource, new.service_sources) != (old.resource, old.service_sources):
            change_attributes(pipeline, self._access, new.resource, new.service_sources)
        self._configure_timers(new)
        fixed = find_fixed(old, new)
        if fixed:
            _log.warning("these changes take effect only after a restart: %s", ", ".join(fixed))

    def _configure_timers(self, config: AgentConfig) -> None:
        self._lottery.set(config.sampling_percent, config.sampling_interval_s)
        self._next_sync = min(self._next_sync, time.monotonic() + config.clock_sync_interval_s)

    def _status(self) -> str:
        return "sampling" if self._pipeline else "running without samples"

    def _open_health(self, config: AgentConfig, *, waits: bool = False) -> HealthServer | None:
        probes = {"/livez": self._watchdog.find_stall, "/readyz": self._find_unready}
        return open_health(config.health_endpoint, probes, self._describe, waits=waits)

    def _describe(self) -> dict[str, object]:
        return describe_agent(
            status=self._status(),
            account=self.account(),
            queues={name: running.queue for name, running in self._exporters.items()},
            leftovers=self._leftovers.problems,
            pipeline=self._pipeline,
            user_names=self._user_names,
            stalls=self._watchdog.stalls,
            cpu_time=self._read_cpu_time(),
        )

    def _find_unready(self) -> list[str]:
        return [] if self._pipeline else ["no samples are taken"]

    def _wake(self) -> None:
        if self._pipeline:
            self._pipeline.wake()

    def _request_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._stop_signal is not None:
            # On a second signal, exit without waiting for the export queues.
            raise SystemExit(128 + number)
        self._stop_signal = signal.Signals(number)
        self._stop_by = time.monotonic() + self._config.shutdown_timeout_s
        if self._pipeline:
            self._pipeline.request_stop()

    def request_reload(self, _number: int, _frame: FrameType | None) -> None:
        """Reread the configuration soon; a signal handler."""
        if self._reader:
            self._reader.request()
            self._wake()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        handlers = {
            signal.SIGTERM: self._request_stop,
            signal.SIGINT: self._request_stop,
            signal.SIGHUP: self.request_reload,
        }
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
