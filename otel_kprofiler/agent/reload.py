"""What changes while the agent runs: the configuration on SIGHUP, and whether to sample."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from otel_kprofiler.errors import KProfilerError

if TYPE_CHECKING:
    from otel_kprofiler.agent.settings import AgentConfig


class ConfigReader:
    """Reads the configuration again when asked to, while the caller goes on.

    Belongs to one thread, and the signal handlers that run in it.

    Args:
        load: reads and checks the configuration; runs in a thread.
        on_begin: told when a reading begins.
        on_end: called in that thread when the outcome is there.
    """

    def __init__(
        self,
        load: Callable[[], AgentConfig],
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._load = load
        self._on_begin = on_begin
        self._on_end = on_end
        self._wanted = False
        self._thread: threading.Thread | None = None
        self._outcome: AgentConfig | KProfilerError | None = None

    def request(self) -> None:
        """Read the configuration soon; once for all requests before the reading begins."""
        self._wanted = True

    def poll(self) -> AgentConfig | KProfilerError | None:
        """What has been read, once, or why it cannot be used; None as long as there is nothing."""
        if self._thread and not self._thread.is_alive():
            self._thread, outcome = None, self._outcome
            return outcome
        if self._wanted and self._thread is None:
            self._wanted = False
            self._on_begin()
            thread = threading.Thread(target=self._read, name="kprofiler-config", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit of threads
                return KProfilerError(f"the configuration cannot be read: {error}")
            self._thread = thread
        return None

    def _read(self) -> None:
        try:
            self._outcome = self._load()
        except KProfilerError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 - told like any other reason
            self._outcome = KProfilerError(f"reading the configuration failed: {error!r}")
        self._on_end()


class Lottery:
    """Decides at random for each interval whether this host samples.

    As opentelemetry-ebpf-profiler does: of many hosts with the same settings, ``threshold``
    percent sample at any time.

    Args:
        random_unit: source of numbers in [0, 1).
    """

    def __init__(self, random_unit: Callable[[], float] = random.random) -> None:
        self._random_unit = random_unit
        self._threshold = 100
        self._interval_s = 60.0
        self._next = 0.0

    def set(self, threshold: int, interval_s: float) -> None:
        """Change the chance, in percent, and the interval; the next draw comes at once."""
        if (threshold, interval_s) != (self._threshold, self._interval_s):
            self._threshold, self._interval_s = threshold, interval_s
            self._next = 0.0

    def draw(self, now: float) -> bool | None:
        """Whether to sample from now on; None while the last draw holds.

        Args:
            now: monotonic time in seconds.
        """
        if now < self._next:
            return None
        self._next = now + self._interval_s
        return self._random_unit() * 100 < self._threshold
