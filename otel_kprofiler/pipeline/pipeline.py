"""The main path: sampler → symbols → windows → sink. Read this file first.

::

    sampler ─RawSample─► gate ─► resolvers ─Stack─► window ─Window─► sink
                          ▲           │
                          └─watermark─┘

One thread calls :meth:`Pipeline.step` repeatedly. Samples are drained, held at the gate until every
symbol stream has passed their timestamp, resolved with the symbols at that timestamp, and collected
into the window that contains it. Once a window's end has passed in event time, the window is closed
and passed to the sink.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from otel_kprofiler.clock import Clock
from otel_kprofiler.model import (
    NO_WAITS,
    OFF_CPU,
    Account,
    LossCause,
    Losses,
    RawSample,
    Resource,
    SampleCounts,
    StreamTotals,
    WaitTotals,
    Window,
    subtract_lock_totals,
)
from otel_kprofiler.pipeline.budget import ProcessBudgets, Stacks, split_programs
from otel_kprofiler.pipeline.gate import EventTimeGate, count_kinds
from otel_kprofiler.pipeline.idle_wait import SETTLE_S, wait_for_samples
from otel_kprofiler.pipeline.options import PipelineOptions
from otel_kprofiler.pipeline.python_frames import PythonFrames
from otel_kprofiler.pipeline.schedule import DRAIN_INTERVAL_S, WHOLE_RECORDING, WindowSchedule
from otel_kprofiler.pipeline.windows import WindowBuilder, WindowCounts, find_latest
from otel_kprofiler.processes import (
    ProcessResources,
    is_self_profiled,
    leave_out_self_profiled,
    merge_resources,
)
from otel_kprofiler.sampling import Sampler, SamplerCounts
from otel_kprofiler.stopping import stop_within

_SETTLE_TRIES: Final = 40
"""Maximum number of polls for pending symbol events after a stop."""
_FINISH_S: Final = 20.0
"""Maximum wait, in seconds, for symbols that are still being read after a stop."""
_END_OF_TIME_NS: Final = 2**63
_FEW: Final = 3
"""If a drain returns at most this many samples, the next pipeline step first waits for a sample."""

WindowSink = Callable[[Window], None]
SamplerT = TypeVar("SamplerT", bound=Sampler)


class Pipeline(Generic[SamplerT]):
    """Drives a sampler.

    Other threads may call only :meth:`wake`, :meth:`request_stop` and :meth:`account`. The pipeline
    starts the sampler, and closes the sampler, ``stacks``, ``resources`` and ``python``.

    Args:
        sink: receives each closed window; must not block.
        on_started: called once the sampler has started, before the first drain.
        find_causes: whether to determine the causes of waits.
        scheduler_rvas: the RVAs of the kernel functions in which threads wait.

    Attributes:
        options: ``grain`` and ``leaves_out_self_profiled`` may be changed at any time.
    """

    def __init__(
        self,
        *,
        sampler: SamplerT,
        stacks: Stacks,
        resources: ProcessResources,
        schedule: WindowSchedule,
        sink: WindowSink,
        clock: Clock,
        options: PipelineOptions = PipelineOptions(),
        python: PythonFrames | None = None,
        on_started: Callable[[], None] = lambda: None,
        find_causes: bool = True,
        scheduler_rvas: range = range(0),
    ) -> None:
        self.sampler = sampler
        self.budgets = ProcessBudgets(stacks, resources, is_limiting=options.limits_processes)
        self.options = options
        self._left_out = SampleCounts()
        self._no_longer_self_profiled: set[Resource] = set()
        self._find_causes = find_causes
        self._scheduler_rvas = scheduler_rvas
        self.python = python
        self._on_started = on_started
        self._stacks = stacks
        self.resources = resources
        self._schedule = schedule
        self._sink = sink
        self._whole: WindowBuilder | None = None
        self._renewed: dict[Resource, Resource] = {}
        self._all_waits: dict[Resource, WaitTotals] = {}  # since the start
        self._clock = clock
        self._gate = EventTimeGate()
        self._windows: WindowBuilder | None = None
        self._looked_ns = self._collected_ns = 0
        self._is_busy = False
        # Held while samples move from one count to another, so that each sample is counted exactly
        # once. Reentrant, because a signal handler may read the counts.
        self._lock = threading.RLock()
        self._counts: Mapping[str, SamplerCounts] = {}
        self._resolving, self._in_windows = SampleCounts(), SampleCounts()
        self._stop_requested = False
        self._deadline_s = float("inf")  # deadline for stopping, in monotonic time
        self._handing_over: Account | None = None
        self._collected = SampleCounts()
        self._stream_id = os.urandom(8).hex()
        self._reported: Mapping[str, SamplerCounts] = {}

    def start(self) -> None:
        """Start sampling. Raises ``HostError`` or ``SamplerError`` on failure."""
        try:
            self.sampler.start()
            if self.python:
                self.python.start()
            self._on_started()
        except BaseException:
            self._stacks.close()  # the resolvers may have open files
            raise
        start_boot_ns = self._clock.boot_ns()  # moved back if earlier samples arrive
        self._windows = self._open_windows(self._schedule, start_boot_ns)
        if self.options.whole_sink:
            self._whole = self._open_windows(WHOLE_RECORDING, start_boot_ns)

    def _open_windows(self, schedule: WindowSchedule, start_boot_ns: int) -> WindowBuilder:
        return WindowBuilder(
            self._clock,
            schedule,
            start_boot_ns=start_boot_ns,
            period_ns=self.sampler.period_ns,
            kinds=self.sampler.kinds,
            pause=self.options.pause,
            find_labels=self.options.find_labels,
            decode_context=self.resources.decode_context,
            find_causes=self._find_causes,
            scheduler_rvas=self._scheduler_rvas,
            budgets=self.budgets,
        )

    def change_windows(self, at_boot_ns: int, schedule: WindowSchedule) -> None:
        """End the window at ``at_boot_ns``. Apply a new schedule and the sampler's new period."""
        self._get_windows().change(at_boot_ns, schedule, self.sampler.period_ns)

    def step(
        self, timeout_s: float = DRAIN_INTERVAL_S, longest_s: float = 0.0, idle_s: float = 0.0
    ) -> None:
        """Wait for samples up to a timeout, and process all complete samples.

        The wait ends with the window, so that the window closes without delay. If the previous step
        yielded few samples, the step first waits up to ``idle_s`` for a sample. As long as no new
        process is sampled, the timeout is extended to ``min(longest_s, idle_s)``, if that is
        longer. If less than ``min(longest_s, idle_s)`` seconds have passed since samples were last
        processed, and the window is still open, the step only identifies new processes.
        """
        end_ns, longest_s = self._get_windows().end_boot_ns, min(longest_s, idle_s)
        if end_ns <= self._looked_ns:
            self.sampler.wait(timeout_s)  # the window is over, but is waiting for symbols
        else:
            is_idle = not (self._is_busy or self._gate.counts)
            waited_s = 0.0 if is_idle else (self._looked_ns - self._collected_ns) / 1e9
            wait_for_samples(
                self.sampler,
                self._clock,
                end_ns,
                timeout_s=timeout_s,
                longest_s=longest_s - waited_s,
                idle_s=idle_s if is_idle else 0.0,
            )
        samples = self._drain()
        now_ns = self._looked_ns = self._clock.boot_ns()
        if now_ns < min(end_ns, self._collected_ns + round(longest_s * 1e9)):
            self.budgets.identify(samples)
            return
        self._collected_ns = now_ns
        passed_ns = self._gate.passed_ns(
            self.sampler.complete_until_ns(), self._stacks.advance(now_ns), now_ns
        )
        self._collect(passed_ns)

    def wake(self) -> None:
        """End the wait in :meth:`step`; callable from any thread or signal handler."""
        self.sampler.wake()

    def request_stop(self) -> None:
        """Request a stop without draining; :meth:`stop` collects the remaining samples.

        Callable from any thread or signal handler.
        """
        self._stop_requested = True
        self.wake()

    def stop(self, timeout_s: float = float("inf")) -> None:
        """Stop sampling, process every sample taken, and close the last window.

        Samples not processed within the timeout are counted as lost in the last window.
        """
        self._stop_requested = False
        self._deadline_s = time.monotonic() + timeout_s
        self.sampler.stop()
        self._drain()
        now_ns = self._clock.boot_ns()
        for _ in range(_SETTLE_TRIES):
            if self._stacks.advance(self._clock.boot_ns()) >= now_ns or self._must_end():
                break
            time.sleep(SETTLE_S)
        self._stacks.finish(min(_FINISH_S, timeout_s / 2))
        self._collect(now_ns)
        while self._add_until(_END_OF_TIME_NS) and self._gate.counts:
            self._close_window(None)
        with self._lock:
            given_up = count_kinds(self._gate.release(_END_OF_TIME_NS))
            self._in_windows += given_up
        self._close_window(now_ns, given_up)
        if self._whole and self.options.whole_sink:
            self.options.whole_sink(self._merge(self._close_whole(self._whole, now_ns, given_up)))

    def close(self) -> None:
        """Close the sampler, resolvers and resources.

        Wait at most 5 s for threads to end, or as long as an enclosing :func:`stop_within` allows.
        """
        with stop_within():
            if self.python:
                self.python.close()
            self.sampler.close()
            self._stacks.close()
            self.resources.close()

    def account(self) -> Account:
        """Returns consistent counts of all samples as of the last drain. Thread-safe.

        While the sink is being called with a window, returns the counts from before the call.
        """
        with self._lock:
            return self._handing_over or self._count()

    def _count(self) -> Account:
        waiting = self._gate.counts + self._resolving + self._in_windows
        sampled = {
            kind: Account(
                counts.taken,
                counts.received - self._left_out[kind],
                self._add_left_out(kind, counts.lost),
                waiting[kind],
                missed=counts.missed,
                truncated=counts.truncated,
            )
            for kind, counts in self._counts.items()
        }
        return Account.of_kinds(sampled, self.options.exporters())

    def _drain(self) -> list[RawSample]:
        samples = self.sampler.drain()
        self._is_busy = len(samples) > _FEW
        if self.options.on_drained:
            self.options.on_drained(samples)
        with self._lock:
            self._gate.push(samples)
            self._counts = self.sampler.counts()
        return samples

    def _collect(self, passed_ns: int) -> None:
        """Resolve and collect the samples taken before ``passed_ns``, and close due windows."""
        windows = self._get_windows()
        while (
            self._add_until(min(windows.end_boot_ns, passed_ns))
            and windows.end_boot_ns <= passed_ns
        ):
            self._close_window(None)
            if windows.end_boot_ns <= passed_ns:
                # The host was suspended: skip windows without samples.
                earliest_ns = self._gate.find_earliest_ns() or passed_ns
                if earliest_ns >= windows.end_boot_ns:
                    windows.skip_to(min(passed_ns, earliest_ns))

    def _must_end(self) -> bool:
        return self._stop_requested or time.monotonic() > self._deadline_s

    def _add_until(self, before_ns: int) -> bool:
        """Resolve and add the samples before ``before_ns``. Return False if stopped early.

        A full window ends before the next sample. The other samples are kept for the next window.
        """
        windows, pause = self._get_windows(), self.options.pause
        with self._lock:
            samples = self._gate.release(before_ns)
            self._resolving = count_kinds(samples)
            samples.reverse()
        batches: list[list[RawSample]] = []
        try:
            while samples:
                if self._must_end():
                    return False
                if windows.end_if_full(samples[-1].time_ns):
                    return True
                first = max(0, len(samples) - windows.room)
                batches = split_programs(reversed(samples[first:]))
                del samples[first:]  # frees memory early, because a backlog can be large
                while batches:
                    batch = batches[0]
                    stacks, resource = self.budgets.resolve(batch)
                    windows.add(batch, stacks, resource)
                    if self._whole:
                        self._whole.add(batch, stacks, resource)
                    del batches[0]
                    if pause:
                        pause()
        finally:
            # Push unprocessed samples back to the gate, even after an exception.
            samples += chain.from_iterable(batches)
            with self._lock:
                self._in_windows += self._resolving - count_kinds(samples)
                self._resolving = SampleCounts()
                self._gate.push(samples)
        return True

    def _close_window(
        self, end_boot_ns: int | None, given_up: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        if self.python:
            self.python.look()
        collected = self._collected + self._in_windows
        waits = self._read_waits()
        window = self._get_windows().close(
            end_boot_ns,
            counts={
                kind: self._count_window(
                    kind, collected[kind], given_up.get(kind, 0), self._reported, waits
                )
                for kind in self._counts
            },
            resolve_again=self._stacks.resolve,
            renew=self._renew,
        )
        if self.options.leaves_out_self_profiled:
            window, left = leave_out_self_profiled(window, self._no_longer_self_profiled)
            collected -= left
            with self._lock:
                self._in_windows -= left
                self._left_out += left
        self._collected, self._reported = collected, self._counts
        self.resources.next_window()
        with self._lock:
            self._handing_over = self._count()
        try:
            self._sink(self._merge(window))
        finally:
            with self._lock:
                self._in_windows = SampleCounts()
                self._handing_over = None

    def _close_whole(
        self, whole: WindowBuilder, end_boot_ns: int, given_up: Mapping[str, int]
    ) -> Window:
        return whole.close(
            end_boot_ns,
            counts={
                kind: self._count_window(
                    kind, self._collected[kind], given_up.get(kind, 0), {}, self._all_waits
                )
                for kind in self._counts
            },
            resolve_again=self._stacks.resolve,
            renew=lambda resources: find_latest(resources, self._renewed),
        )

    def _merge(self, window: Window) -> Window:
        return merge_resources(window, self.options.grain, self.resources.common)

    def _read_waits(self) -> Mapping[Resource, WaitTotals]:
        waits: dict[Resource, WaitTotals] = {}
        for process, totals in self.sampler.read_waits().items():
            resource = self.resources.get_of(process, has_ended=totals.has_ended)
            waits[resource] = waits.get(resource, NO_WAITS).plus(totals)
        if self._whole:
            for resource, totals in waits.items():
                self._all_waits[resource] = self._all_waits.get(resource, NO_WAITS).plus(totals)
        return waits

    def remarks(self) -> list[str]:
        """Returns report lines that explain why process data could not be read."""
        python = self.python.remarks() if self.python else []
        return python + self.resources.remarks()

    def _renew(self, resources: Collection[Resource]) -> Mapping[Resource, Resource]:
        renewed = self.resources.renew(resources)
        self._no_longer_self_profiled = {
            new for old, new in renewed.items() if is_self_profiled(old)
        }
        if self._whole:
            self._renewed.update(renewed)
        return renewed

    def _count_window(
        self,
        kind: str,
        collected: int,
        given_up: int,
        reported: Mapping[str, SamplerCounts],
        waits: Mapping[Resource, WaitTotals],
    ) -> WindowCounts:
        counts = self._counts[kind]
        earlier = reported.get(kind, SamplerCounts(0, {}, 0, {}))
        lost = Counter(counts.lost) - Counter(earlier.lost)
        lost += Counter({LossCause.SHUTDOWN: given_up})
        totals = StreamTotals(
            self._stream_id,
            collected,
            counts.taken,
            self._add_left_out(kind, counts.lost),
            missed=counts.missed,
        )
        taken = counts.taken - earlier.taken
        if kind != OFF_CPU.name:
            locks = subtract_lock_totals(counts.locks, earlier.locks)
            return WindowCounts(taken, dict(lost), totals, locks=locks)
        return WindowCounts(taken, dict(lost), totals, self.sampler.wait_threshold_ns, waits)

    def _add_left_out(self, kind: str, lost: Losses) -> Losses:
        count = self._left_out[kind]
        return {**lost, LossCause.SELF_PROFILED: count} if count else lost

    def _get_windows(self) -> WindowBuilder:
        if self._windows is None:
            raise RuntimeError("the pipeline has not been started")
        return self._windows
