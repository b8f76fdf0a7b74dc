"""The agent's life: start, sample until told to stop, deliver what is left."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from otel_kprofiler.agent.exporters import open_queues
from otel_kprofiler.agent.health import HealthServer
from otel_kprofiler.agent.systemd import Notifier
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import HostError, SamplerError
from otel_kprofiler.host import Access
from otel_kprofiler.pipeline import DRAIN_INTERVAL_S, Pipeline
from otel_kprofiler.profiles import WindowSchedule
from otel_kprofiler.reporting import Account, Reporter
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.sources import open_live

if TYPE_CHECKING:
    from otel_kprofiler.config import Config, Receiver

_log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_MILLIS: Final = 10_000
"""How long the last windows may take to be delivered; systemd waits 90 s by default."""
STALLED_AFTER_S: Final = 30.0
"""The agent is not alive any more when its loop has not run for so long."""
FIRST_WINDOW_NS: Final = 1_000_000_000


def sampler_config(receiver: Receiver) -> SamplerConfig:
    """The sampler's settings out of the configuration."""
    return SamplerConfig(
        samples_per_second=receiver.samples_per_second,
        stacks=receiver.stacks,
        pin_cpu_ids=receiver.cpus,
        max_frames=receiver.max_frames,
        target_pids=tuple(receiver.target_pids),
        send_idle_frames=receiver.send_idle_frames,
        min_process_age_ns=int(receiver.filter_min_process_age),
        map_scale_factor=receiver.map_scale_factor,
    )


def window_schedule(receiver: Receiver) -> WindowSchedule:
    """The length of windows out of the configuration."""
    return WindowSchedule(
        int(receiver.reporter_interval), receiver.reporter_jitter, FIRST_WINDOW_NS
    )


class Agent:
    """Runs one configuration until SIGTERM or SIGINT. Belongs to the main thread.

    Args:
        config: what to do.
        access: the host's files.
        notifier: told about the life cycle.
    """

    def __init__(
        self,
        config: Config,
        *,
        access: Access | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self._config = config
        self._access = access or Access()
        self._notifier = notifier or Notifier()
        self._clock = Clock()
        self._stop_signal: signal.Signals | None = None
        self._pipeline: Pipeline[EbpfSampler] | None = None
        self._looped_at = time.monotonic()

    def run(self) -> Account:
        """Run until told to stop; returns the account of all samples.

        Raises:
            HostError: this host cannot be profiled, and ``error_mode`` is ``propagate``.
            SamplerError: the sampler cannot be loaded, likewise.
            ExportError: an exporter's files are unusable.
        """
        reporter = Reporter(open_queues(self._config))
        health = self._open_health()
        try:
            with self._signals():
                self._start(reporter)
                self._notifier.ready("sampling" if self._pipeline else "up without samples")
                self._loop()
                self._notifier.stopping()
                if self._pipeline:
                    self._pipeline.stop()
                reporter.shutdown(SHUTDOWN_TIMEOUT_MILLIS)
                return self._account(reporter)
        finally:
            reporter.shutdown(0)
            if self._pipeline:
                self._pipeline.close()
            if health:
                health.close()

    def _start(self, reporter: Reporter) -> None:
        receiver = self._config.receiver
        try:
            pipeline = open_live(
                sampler_config(receiver),
                window_schedule(receiver),
                reporter,
                access=self._access,
                clock=self._clock,
                attributes=_attributes(receiver),
            )
            pipeline.start()
        except (HostError, SamplerError) as error:
            if receiver.error_mode == "propagate":
                raise
            _log.error("no samples will be taken: %s (fix: %s)", error, error.hint)
            return
        self._pipeline = pipeline

    def _loop(self) -> None:
        receiver = self._config.receiver
        sync_s = receiver.clock_sync_interval.seconds
        next_sync = time.monotonic() + sync_s
        while self._stop_signal is None:
            if self._pipeline:
                self._pipeline.step()
            else:
                time.sleep(DRAIN_INTERVAL_S)
            self._looped_at = now = time.monotonic()
            self._notifier.alive(now)
            if sync_s and now >= next_sync:
                next_sync = now + sync_s
                moved_ns = self._clock.sync()
                _log.debug("clock synchronised, moved by %d ns", moved_ns)

    def _account(self, reporter: Reporter) -> Account:
        if self._pipeline:
            return self._pipeline.account(reporter.accounts())
        return Account(0, 0, {}, 0, reporter.accounts())

    def _open_health(self) -> HealthServer | None:
        endpoint = self._config.service.health.endpoint
        if not endpoint:
            return None
        return HealthServer(endpoint, {"/livez": self._find_stall, "/readyz": self._find_unready})

    def _find_stall(self) -> list[str]:
        idle_s = time.monotonic() - self._looped_at
        return [f"the loop has not run for {idle_s:.0f} s"] if idle_s > STALLED_AFTER_S else []

    def _find_unready(self) -> list[str]:
        return [] if self._pipeline else ["no samples are taken"]

    def _request_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._stop_signal is not None:
            # Told twice: the queue is not waited for any longer.
            raise SystemExit(128 + number)
        self._stop_signal = signal.Signals(number)
        if self._pipeline:
            self._pipeline.wake()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self._request_stop)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _attributes(receiver: Receiver) -> dict[str, str | bool | int | float | tuple[str, ...]]:
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in receiver.resource.items()
    }
