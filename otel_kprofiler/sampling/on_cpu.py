"""Collects samples of running threads, waits and events from the BPF programs' ring."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_kprofiler import forks
from otel_kprofiler.bpf import (
    Loader,
    PythonMaps,
    ThreadContexts,
    WaitCounts,
    WaitRecords,
    get_loader,
    number_kinds,
    parse_records,
)
from otel_kprofiler.clock import SystemTime
from otel_kprofiler.errors import HostError, SamplerError
from otel_kprofiler.forks import ForkAware, ForkStep, ProcessLock
from otel_kprofiler.host import Access, ReferableFiles, find_open_files_error
from otel_kprofiler.model import (
    OFF_CPU,
    KnownCodes,
    KnownFiles,
    ProcessKey,
    ProfileKind,
    RawSample,
    WaitTotals,
)
from otel_kprofiler.sampling.attachment import Attachment
from otel_kprofiler.sampling.counting import (
    name_counts,
    name_wait_counts,
    start_counts,
    take_snapshot,
)
from otel_kprofiler.sampling.host_events import HostEvents
from otel_kprofiler.sampling.off_cpu import OffCpuConfig
from otel_kprofiler.sampling.sampler import SamplerConfig, SamplerCounts
from otel_kprofiler.sampling.unwinder import say_frame_pointers

if TYPE_CHECKING:
    from otel_kprofiler.unwinding import TableCounts, TableStore

_FOLLOW_INTERVAL_NS: Final = 1_000_000_000
_FOLLOW_PERIODS: Final = 3
# Other CPUs observe a store to in_flight after a short delay.
_STORE_DELAY_NS: Final = 20_000
_IN_FLIGHT_TRIES: Final = 16
_NEVER_NS: Final = 1 << 63

RawSink = Callable[[bytes, int], None]
"""A function that receives the raw records from a drain, and ``complete_until_ns``."""


class EbpfSampler(ForkAware):
    """Samples all CPUs of this host, or a single command; see :class:`Sampler`.

    Requires CAP_BPF and CAP_PERFMON. Nothing remains in the kernel after the process exits. After a
    fork, the sampler is closed in the child and continues to sample in the parent.

    Args:
        raw_sink: receives the raw records from each drain, for recordings.
        user_files: receives the files that user stacks refer to.
        python_codes: receives descriptions of the code objects in Python frames.

    Attributes:
        busy_ns: time that the BPF program spent on samples other than waits, as of the last
            :meth:`drain`.
        stack_limit: minimum size, in bytes, of a stack that is counted as truncated; 0 before the
            start.
    """

    def __init__(
        self,
        config: SamplerConfig,
        *,
        access: ReferableFiles | None = None,
        loader: Loader | None = None,
        raw_sink: RawSink | None = None,
        user_files: KnownFiles | None = None,
        python_codes: KnownCodes | None = None,
    ) -> None:
        self.config = config
        self.python_codes = KnownCodes() if python_codes is None else python_codes
        self.user_files = user_files or KnownFiles()
        self._files = access or Access()
        self._loader = loader
        self._time = SystemTime()
        self._raw_sink = raw_sink
        # Held while mapped memory is read, to prevent concurrent forks.
        self._lock = ProcessLock()
        self._attached: Attachment | None = None
        self.stack_limit = 0
        self._complete_until_ns = self._drained_ns = 0
        self._next_follow_ns = 0
        self.busy_ns = 0
        self._counts: Mapping[str, SamplerCounts] = start_counts(config)
        self._kind_numbers = number_kinds([event.kind for event in config.events])

    @property
    def period_ns(self) -> int:
        """Returns the sampling period on each CPU in nanoseconds."""
        return self.config.period_ns

    @property
    def kinds(self) -> tuple[ProfileKind, ...]:
        """Returns the kinds of samples that may occur, in the order of a window's profiles."""
        return self.config.kinds

    @property
    def cpus(self) -> tuple[int, ...]:
        """Returns the CPUs being sampled; empty if a command is sampled."""
        events = self._attachment().events
        return events.cpus if isinstance(events, HostEvents) else ()

    @property
    def contexts(self) -> ThreadContexts:
        """Returns the processes whose thread contexts are read."""
        return self._attachment().contexts

    @property
    def reads_contexts(self) -> bool:
        """Returns whether thread contexts can be read on this host."""
        return self._attachment().reads_contexts

    @property
    def follows_spans(self) -> bool:
        """Returns whether the current span is read from the interpreter, using ``span_path``."""
        return self._attachment().follows_spans

    @property
    def tables(self) -> TableCounts | None:
        """Returns the counts of unwind tables; None if unwinding does not use tables."""
        store = self._attachment().tables
        return store.counts() if store else None

    @property
    def python(self) -> PythonMaps | None:
        """Returns the processes whose Python frames are read; None if no Python frames are read."""
        return self._attachment().python

    @property
    def python_problem(self) -> str | None:
        """Returns why Python frames are configured but not read; None if there is no problem."""
        return self._attachment().python_problem

    def start(self) -> None:
        """Load the program, open the events and start sampling."""
        try:
            loader = self._loader or get_loader()
            self._attached = Attachment(
                self.config, self._files, loader, self.user_files, self.python_codes
            )
        except OSError as error:
            raise find_open_files_error("setting up the sampler", error) or HostError(
                f"the sampler cannot be set up: {error}",
                hint="run otel-kprofiler doctor for a diagnosis",
            ) from error
        self.stack_limit = self._attached.stack_limit
        forks.register(ForkStep.RELEASE, self)

    def reconfigure(self, config: SamplerConfig, *, have_ended: bool = False) -> int:
        """Change the rate, CPUs and filters, with no gap longer than a period on any CPU.

        If the targets change, waits in progress are no longer measured, because some of the threads
        may be excluded now. ``have_ended`` states that all excluded targets have ended, so that
        these waits are still measured.

        Settings that are fixed at load time do not change: ``max_frames``, user unwinding, ring
        size, interrupt ranges, spans, and the loader. If the sampler started with only kernel
        stacks and user stacks are now enabled, user stacks are unwound using frame pointers. On
        error, the settings remain unchanged.

        Returns:
            The ``CLOCK_BOOTTIME`` from which the new period applies on every CPU.

        Raises:
            HostError: none of the CPUs is online, or there are too many targets.
            SamplerError: the kernel refused the change, as kernels before 5.19 do without CAP_BPF.
        """
        attached, old = self._attachment(), self.config
        period_since_ns: int | None = None
        events = self._host_events() if old.on_cpu or old.events else None
        if len({*config.target_pids, *old.target_pids}) > attached.target_slots:
            raise HostError(
                f"old and new target_pids together exceed {attached.target_slots}: "
                "restart the agent"
            )
        if events is not None:
            events.check(config.pin_cpu_ids)
        config = replace(
            old,
            samples_per_second=config.samples_per_second,
            stacks=config.stacks,
            pin_cpu_ids=config.pin_cpu_ids,
            send_idle_frames=config.send_idle_frames,
            target_pids=config.target_pids,
            target_comms=config.target_comms,
            target_cgroups=config.target_cgroups,
            target_descendants=config.target_descendants,
            min_process_age_ns=config.min_process_age_ns,
            python_frames=config.python_frames,
            off_cpu=_choose_off_cpu(old.off_cpu, config.off_cpu),
        )
        if config == old:
            return self._time.boot_ns()
        if attached.waits is not None and config.off_cpu is not None:
            try:
                attached.waits.note_wakers(config.off_cpu)
            except OSError as error:
                raise SamplerError(f"enabling wakers requires a restart: {error}") from error
        if events is not None:
            events.between_samples(lambda: attached.configure(config, _NEVER_NS))
            if config.pin_cpu_ids != old.pin_cpu_ids:
                events.select(config.pin_cpu_ids)
            if config.period_ns != old.period_ns:
                period_since_ns = events.set_period(config.period_ns, self._time.boot_ns)
        if attached.waits is not None and config.off_cpu is not None:
            attached.waits.configure(config.off_cpu)
        changed_ns = self._time.boot_ns()
        attached.configure(config, changed_ns)
        if attached.waits is not None and not have_ended and config.targets != old.targets:
            attached.waits.restart()
        if old.stacks == "kernel" != config.stacks and config.user_unwinding == "auto":
            say_frame_pointers("unwind tables are only loaded by a sampler that starts with them")
        self.config = config
        return changed_ns if period_since_ns is None else period_since_ns

    def retarget(self, pids: tuple[int, ...]) -> None:
        """Replace the set of sampled processes.

        The old and new sets must be nonempty, and must together fit into the target map.
        """
        self.config = replace(self.config, target_pids=pids[: self._attachment().target_slots // 2])
        self._attachment().retarget(self.config)

    def pause(self) -> None:
        """Stop sampling until :meth:`resume`."""
        attached = self._attachment()
        if self.config.on_cpu or self.config.events:
            self._host_events().pause()
        if attached.waits is not None:
            attached.waits.pause()

    def resume(self) -> None:
        """Resume sampling."""
        attached = self._attachment()
        attached.configure(self.config, self._time.boot_ns())
        if self.config.on_cpu or self.config.events:
            self._host_events().resume()
        if attached.waits is not None:
            attached.waits.resume()

    def wait(self, timeout_s: float) -> None:
        """Block until the ring is half full, :meth:`wake` is called, or the timeout expires."""
        self._attachment().waiter.wait(timeout_s)

    def wait_new(self, least_s: float, most_s: float) -> None:
        """Block until a process that started after the last :meth:`drain` has been sampled.

        If waits are sampled, or start times are unknown, this method blocks for ``least_s``
        seconds.
        """
        attached = self._attachment()
        if attached.waits is None and attached.knows_start_times:
            attached.waiter.wait_new(self._drained_ns, least_s, most_s)
        else:
            attached.waiter.wait(least_s)

    def wait_first(self, timeout_s: float) -> bool:
        """Block until a sample is in the ring, :meth:`wake` is called, or the timeout expires.

        Returns immediately if waits are sampled, because some waits do not produce a record.
        """
        attached = self._attachment()
        return attached.waits is not None or attached.waiter.wait_first(timeout_s)

    def wake(self) -> None:
        """End the current or next ``wait`` call."""
        if (attached := self._attached) is not None:
            attached.waiter.wake()

    def drain(self) -> list[RawSample]:
        """Returns all samples in the ring."""
        attached = self._attachment()
        with self._lock:
            # Compute the horizon before reading the ring, so that the ring contains all older
            # records.
            now = self._time.boot_ns()
            horizon = _horizon(now, attached)
            counts, wait_counts, position = take_snapshot(attached)
            self._drained_ns = now
            data, complete = attached.ring.take(position)
            if attached.python is not None:
                attached.python.receive()
        records = WaitRecords([], [])
        samples = parse_records(data, self.stack_limit, records, self._kind_numbers)
        after = name_counts(self.config, counts, samples, self._counts)
        if attached.waits is not None:
            waits = attached.waits.receive(records, time.monotonic_ns())
            previous = self._counts[OFF_CPU.name]
            after |= name_wait_counts(wait_counts, attached.waits.added, waits, previous)
            samples += waits
        if (locks := attached.locks) is not None:
            name = locks.spec.kind.name
            after[name] = after[name]._replace(locks=locks.totals())
            locks.adapt(time.monotonic_ns(), after[name].taken)
        self._counts, self.busy_ns = after, sum(part.busy_ns for part in counts)
        if complete:
            self._complete_until_ns = max(self._complete_until_ns, horizon)
        if data and self._raw_sink is not None:
            self._raw_sink(data, self._complete_until_ns)
        if now >= self._next_follow_ns:
            interval = max(_FOLLOW_INTERVAL_NS, _FOLLOW_PERIODS * self.period_ns)
            self._next_follow_ns = now + interval
            attached.events.follow()
        return samples

    def complete_until_ns(self) -> int:
        """Returns the ``CLOCK_BOOTTIME`` before which every sample has been drained."""
        return self._complete_until_ns

    def read_waits(self) -> Mapping[ProcessKey, WaitTotals]:
        """Returns wait totals since the previous call, by process. Raises ``SamplerError``."""
        waits = self._attachment().waits
        if waits is None:
            return {}
        try:
            with self._lock:
                return waits.read(time.monotonic_ns(), self._time.boot_ns())
        except OSError as error:
            raise SamplerError(f"the wait totals cannot be read: {error}") from error

    @property
    def wait_counts(self) -> WaitCounts | None:
        """Returns the off-CPU programs' counters; None if waits are not tracked."""
        waits = self._attachment().waits
        return waits.counts() if waits else None

    @property
    def wait_threshold_ns(self) -> int:
        """Returns the duration above which every wait is sampled; 0 if no waits are sampled."""
        waits = self._attachment().waits
        return waits.threshold_ns if waits else 0

    def counts(self) -> Mapping[str, SamplerCounts]:
        """Returns the counters for each kind as of the last :meth:`drain`."""
        return self._counts

    def stop(self) -> None:
        """Disable the events. No samples are taken once this method returns."""
        self._next_follow_ns = 1 << 63  # prevent new events
        attached = self._attachment()
        attached.events.disable()
        if attached.waits is not None:
            attached.waits.detach()

    def close(self) -> None:
        """Release all resources. :meth:`counts` still returns the last counts."""
        with self._lock:
            attached, self._attached = self._attached, None
        forks.unregister(self)
        if attached is not None:
            attached.close()

    def before_fork(self) -> None:
        """Take the locks that protect mapped memory, so that no thread is using it."""
        self._lock.acquire()
        for part in self._locked():
            part.before_fork()

    def after_fork_in_parent(self) -> None:
        """Release the locks."""
        for part in reversed(self._locked()):
            part.after_fork()
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Close the events without disabling them, because the parent still uses them."""
        self.close()

    def _locked(self) -> list[ThreadContexts | PythonMaps | TableStore]:
        """Returns the components with locks, in locking order."""
        if (a := self._attached) is None:
            return []
        return [part for part in (a.contexts, a.python, a.tables) if part is not None]

    def _host_events(self) -> HostEvents:
        events = self._attachment().events
        if not isinstance(events, HostEvents):
            raise SamplerError("a sampler that profiles a command cannot be reconfigured")
        return events

    def _attachment(self) -> Attachment:
        if self._attached is None:
            raise SamplerError("the sampler is not running")
        return self._attached


def _choose_off_cpu(old: OffCpuConfig | None, new: OffCpuConfig | None) -> OffCpuConfig | None:
    """Returns the new settings, or the old settings if the new ones require different programs."""
    if old is None or new is None or bool(old.samples_per_second) != bool(new.samples_per_second):
        return old
    return new


def _horizon(now: int, attached: Attachment) -> int:
    """Returns the earliest possible time of records reserved after this call; 0 if unknown.

    On each CPU, the program flags a record as in flight before it reads the clock, and then
    publishes the record's time. If a CPU has no record in flight, its next record is later than
    ``now``.
    """
    for _ in range(_IN_FLIGHT_TRIES):
        since = [time for time in attached.lines.in_flight() if time]
        if 1 not in since:  # 1: the program is reading the clock
            return min(now - _STORE_DELAY_NS, *since) if since else now - _STORE_DELAY_NS
    return 0
