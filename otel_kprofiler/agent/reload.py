"""Rereads the configuration at run time, and decides at random whether to sample this host."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from otel_kprofiler.errors import KProfilerError

if TYPE_CHECKING:
    from otel_kprofiler.agent.agent_settings import AgentConfig


class ConfigReader:
    """Rereads the configuration in a background thread, which calls ``load``, then ``on_end``.

    Only one thread and its signal handlers may use a reader.
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
        """Request that the configuration be reread.

        Requests made before the next read starts are merged.
        """
        self._wanted = True

    def poll(self) -> AgentConfig | KProfilerError | None:
        """Start reading the configuration file if a reload was requested.

        Return the result of a read that has finished, or None. Each result is returned only once.
        """
        if self._thread and not self._thread.is_alive():
            self._thread, outcome = None, self._outcome
            return outcome
        if self._wanted and self._thread is None:
            self._wanted = False
            self._on_begin()
            thread = threading.Thread(target=self._read, name="kprofiler-config", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the thread limit has been reached
                return KProfilerError(f"the configuration cannot be read: {error}")
            self._thread = thread
        return None

    def _read(self) -> None:
        try:
            self._outcome = self._load()
        except KProfilerError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 - reported like any other problem
            self._outcome = KProfilerError(f"reading the configuration failed: {error!r}")
        self._on_end()


class Lottery:
    """Decides at random, for each interval, whether this host samples.

    As in opentelemetry-ebpf-profiler, about ``threshold`` percent of all hosts sample at any time.
    ``random_unit`` returns random numbers in [0, 1).
    """

    def __init__(self, random_unit: Callable[[], float] = random.random) -> None:
        self._random_unit = random_unit
        self._threshold = 100
        self._interval_s = 60.0
        self._next = 0.0

    def set(self, threshold: int, interval_s: float) -> None:
        """Set the threshold (percent) and the interval. A change starts a new interval."""
        if (threshold, interval_s) != (self._threshold, self._interval_s):
            self._threshold, self._interval_s = threshold, interval_s
            self._next = 0.0

    def draw(self, now: float) -> bool | None:
        """Returns whether to sample in a new interval; None while the last interval continues."""
        if now < self._next:
            return None
        self._next = now + self._interval_s
        return self._random_unit() * 100 < self._threshold
