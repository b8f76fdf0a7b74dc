"""Polls a ClickHouse table for the newest profiles, for ``top --from``."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Self

from otel_kprofiler.analysis import Filter
from otel_kprofiler.cli.cpu_meter import CpuMeter
from otel_kprofiler.cli.top_page import Status
from otel_kprofiler.cli.top_state import GROUPING_KEYS
from otel_kprofiler.cli.top_windows import Part, Shown
from otel_kprofiler.clickhouse import Need, ProfileStore, Range, Selection, need_of, parse_address
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import ProfileKind, sum_losses

_log: Final = logging.getLogger(__name__)
_PAUSE_S: Final = 1.0
"""Minimum pause between reads, in seconds. A pause is at least as long as the preceding read."""
_STEP_S: Final = 0.1
_END_S: Final = 1.0
"""Time limit for a pending read at exit, in seconds."""


class Table:
    """Reads a ClickHouse table in a separate thread. Exiting the context stops the thread.

    Reads cover the last ``window_s`` seconds. Raises ``DependencyError`` if the client library is
    missing, and ``KProfilerError`` if the address is invalid or the server does not respond.

    Attributes:
        seconds: length of the time range that has been read so far.
        on_woken: callback that is never called, because every step is short.
    """

    def __init__(
        self,
        source: str,
        chosen: Filter,
        kind: ProfileKind,
        window_s: float,
        *,
        idle: bool,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        address = parse_address(source, os.environ)
        self._chosen = replace(chosen, kinds=(kind.name,)).with_attributes(address.attributes)
        self._need = Need.of_attributes(self._chosen.attributes)
        for by in GROUPING_KEYS.values():
            self._need |= need_of(self._chosen, by)
        self._length_ns, self._idle, self._now = round(window_s * 1e9), idle, now
        self._store = ProfileStore(address)
        self.status = Status(address.place, "", kind.name)
        self.seconds = 0.0
        self.on_woken: Callable[[], None] | None = None
        self._shown = Shown(())
        self._first_ns = 0
        self._is_over, self._woken = threading.Event(), threading.Event()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kprofiler-table", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._store.close()

    def start(self) -> None:
        """Start the thread that reads the table."""
        self._thread.start()

    def shown(self) -> Shown:
        """Returns the samples from the last successful read."""
        return self._shown

    def wake(self) -> None:
        """Wake :meth:`step`; may be called from any thread or signal handler."""
        self._woken.set()

    def request_end(self) -> None:
        """Stop reading, and wake :meth:`step`; callable from any thread or signal handler."""
        self._is_over.set()
        self._woken.set()

    def step(self) -> bool:
        """Wait briefly, and return whether to redraw. If the first read failed, raise its error."""
        is_woken = self._woken.wait(_STEP_S)
        if is_woken:  # clearing without this check could lose a concurrent wake-up
            self._woken.clear()
        if self._problem:
            raise self._problem
        return is_woken

    def _run(self) -> None:
        meter = CpuMeter()
        while not self._is_over.is_set():
            began = time.monotonic()
            try:
                self._read()
                self.status.is_stale = False
            except KProfilerError as error:
                if not self.seconds:
                    self._problem = error
                elif not self.status.is_stale:
                    _log.warning("%s", error)
                self.status.is_stale = True
            except Exception as error:  # noqa: BLE001 - step() raises it
                self._problem = error
            self.status.own_share = meter.share()
            self._woken.set()
            self._is_over.wait(max(_PAUSE_S, time.monotonic() - began))

    def _read(self) -> None:
        end = self._now()
        start = end - self._length_ns
        self._first_ns = self._first_ns or start
        chosen = self._chosen
        selection = Selection(chosen, Range(start, end))
        samples = chosen.apply(self._store.read(selection, self._need, _log.info))
        if not self._idle:
            samples = samples.without_idle()
        lost = sum_losses(origin.profile.lost for origin in samples.tables.origins)
        self._shown = Shown([Part(start, end, samples, lost)])
        self.seconds = (end - self._first_ns) / 1e9
