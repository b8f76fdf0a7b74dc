"""The programs that follow threads off the CPU: what they need, their links, their totals."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from otel_kprofiler.bpf import (
    PLACES,
    WAIT_KEPT,
    WAIT_LAYOUT,
    KernelTypes,
    LoadedObject,
    ThreadTable,
    WaitConfig,
    WaitCounts,
    WaitLines,
    WaitOffsets,
    WaitRecords,
    WaitSettings,
    WaitThread,
    bpf_call,
    find_wait_offsets,
    parse_threads,
)
from otel_kprofiler.errors import HostError, KernelFeatureError
from otel_kprofiler.host import HostFiles, get_privilege_error
from otel_kprofiler.model import ProcessKey, RawSample, WaitTotals
from otel_kprofiler.sampling.off_cpu import OffCpuConfig
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.wait_joiner import ThresholdControl, WaitJoiner

_SWITCH: Final = "kprofiler_switch"
_WAKING: Final = "kprofiler_waking"
_WAITING: Final = "kprofiler_waiting"
_BEGINS_PER_SAMPLE: Final = 6
"""No CPU reports more begins than that, on average: most waits turn out short."""

# include/uapi/linux/bpf.h
_RAW_TRACEPOINT_OPEN: Final = 17
_LINK_CREATE: Final = 28
_ITER_CREATE: Final = 33
_TRACE_ITER: Final = 28
_LASTING_SHARE: Final = 0.5
"""Samples of waits that go on, as a share of those that are wanted of waits that end."""
_LOADAVG: Final = "/proc/loadavg"
_MIN_THREADS: Final = 16_384
_OWN_NAME: Final = "kprofiler-"
"""How the names of all threads of this package begin."""
_MAX_THREADS: Final = 1 << 20
_NS_PER_S: Final = 1_000_000_000

_log = logging.getLogger(__name__)


def plan_waits(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], loader: str
) -> WaitOffsets | None:
    """Returns the kernel's offsets for the programs; None if waits are not wanted.

    Raises:
        HostError: they cannot be followed here.
    """
    if config.off_cpu is None:
        return None
    if loader != "libbpf":
        raise HostError(
            f"the loader {loader} cannot load the programs for off-CPU time",
            hint="apt-get install libbpf1, and use the loader libbpf",
        )
    try:
        offsets = find_wait_offsets(read_types())
    except (OSError, ValueError):
        offsets = None
    if offsets is None:
        raise KernelFeatureError(
            "off-CPU time needs BTF of the kernel",
            hint="the kernel must be built with CONFIG_DEBUG_INFO_BTF, or profile without it",
        )
    return offsets


def wait_map_entries(
    offsets: WaitOffsets | None, files: HostFiles, possible_cpus: int
) -> dict[str, int]:
    """Sizes of the maps: room for four times as many threads as there are now.

    Where half of the places are taken, some buckets are full.
    """
    if offsets is None:
        return {"buckets": 1, "threads": 1, "wait_lines": 1}
    try:
        # "0.00 0.00 0.00 1/234 5678": runnable and existing threads
        threads = int(files.read_bytes(_LOADAVG).split()[3].split(b"/")[1])
    except (OSError, LookupError, ValueError):
        threads = 0
    room = min(max(1 << (4 * threads).bit_length(), _MIN_THREADS), _MAX_THREADS)
    return {"buckets": room // PLACES, "threads": room, "wait_lines": possible_cpus}


def wait_constants(offsets: WaitOffsets | None, entries: Mapping[str, int]) -> dict[str, bytes]:
    """Constants of the programs, for maps of these sizes."""
    return {} if offsets is None else {WAIT_LAYOUT: offsets.pack(entries["buckets"])}


def wait_programs(config: SamplerConfig, on_cpu: str) -> tuple[str, ...]:
    """Names of the programs to load, none if waits are not wanted.

    Args:
        config: what to sample.
        on_cpu: the program for samples on a CPU: stacks are taken as it does.
    """
    if config.off_cpu is None:
        return ()
    sampled = config.off_cpu.samples_per_second
    switch = on_cpu.replace("kprofiler", _SWITCH) if sampled else _SWITCH
    return switch, _WAKING, _WAITING


class WaitFollower:
    """The attached programs; not thread-safe.

    Args:
        program: the loaded object.
        names: its programs for waits.
        offsets: of the running kernel.
        config: what to record of waits.
        entries: sizes of the maps.

    Raises:
        OSError: the kernel refused to attach or to map something; nothing stays attached.
    """

    def __init__(
        self,
        program: LoadedObject,
        names: Iterable[str],
        offsets: WaitOffsets,
        config: OffCpuConfig,
        entries: Mapping[str, int],
    ) -> None:
        self._program = program
        self._wanted = config
        self._cpus = entries["wait_lines"]
        self._has_run_delay = offsets.has_run_delay
        self._epochs = self._epoch = 0
        self._links: dict[str, int] = {}
        self._next_look_ns = 0
        self._totals = WaitSums()
        self._own = OwnThreads(config.leaves_out)
        self._joiner = WaitJoiner(is_left_out=lambda one: self._own.has(one.tgid, one.tid))
        self._control = ThresholdControl(
            config.min_duration_ns, time.monotonic_ns(), config.samples_per_second
        )
        self._lasting: list[RawSample] = []
        self._read_ns = time.monotonic_ns()
        self._longest_ns = self._longest_before_ns = 0
        with contextlib.ExitStack() as undo:
            self._lines = WaitLines(program.map_fd("wait_lines"), self._cpus)
            undo.callback(self._lines.close)
            self._table = ThreadTable(
                program.map_fd("buckets"), program.map_fd("threads"), entries["buckets"]
            )
            self._settings = WaitSettings(program.map_fd("wait_config"))
            undo.callback(self._settings.close)
            undo.callback(self._close_links)
            self.resume()
            for name in names:
                if name != _WAKING:
                    self._link(name)
            self.note_wakers(config)
            self._close = undo.pop_all().close

    @property
    def threshold_ns(self) -> int:
        """Duration from which all waits were sampled since the last but one :meth:`read`.

        0 if none is sampled.
        """
        if not self._wanted.samples_per_second:
            return 0
        return max(self._control.threshold_ns, self._longest_ns, self._longest_before_ns)

    def copy(self) -> bytes:
        """The programs' counters as they are."""
        return self._lines.copy()

    def counts(self) -> WaitCounts:
        """The programs' counters."""
        return self._lines.counts()

    @property
    def added(self) -> int:
        """Samples that came to those that the program has counted."""
        return self._joiner.added

    def receive(self, records: WaitRecords, now_ns: int) -> list[RawSample]:
        """The samples that records complete, and those of :meth:`read`.

        Args:
            records: those since the last call.
            now_ns: time of ``CLOCK_MONOTONIC``.
        """
        self._own.update()
        samples = self._joiner.join(records.waits)
        for _, end in records.waits:
            if end is not None and end.flags & WAIT_KEPT:
                self._control.note(end.threshold_ns)
                self._longest_ns = max(self._longest_ns, end.threshold_ns)
        self._joiner.forget(records.ended)
        self._totals.add_ended(self._without_own(records.ended))
        lasting, self._lasting = self._lasting, []
        rate = self._rate
        if rate and now_ns >= self._next_look_ns:
            self._look_at_waiting(now_ns)
        if rate and self._epoch and self._control.update(now_ns, self.counts().taken, rate):
            self._configure()
        return samples + lasting

    def read(self, now_ns: int, boot_ns: int) -> Mapping[ProcessKey, WaitTotals]:
        """Returns what the totals grew by since the last call; makes samples of waits that go on.

        Args:
            now_ns: time of ``CLOCK_MONOTONIC``.
            boot_ns: time of ``CLOCK_BOOTTIME``.
        """
        self._look_at_waiting(now_ns)
        passed_s, self._read_ns = (now_ns - self._read_ns) / _NS_PER_S, now_ns
        now_ns -= self._lines.offset_ns()
        threads = list(self._without_own(parse_threads(self._table.read())))
        most = max(1.0, _LASTING_SHARE * self._rate * passed_s)
        self._lasting += self._joiner.sample_lasting(threads, now_ns, boot_ns, self._epoch, most)
        self._longest_before_ns = self._longest_ns
        self._longest_ns = self._joiner.lasting_threshold_ns
        return self._totals.read(threads, now_ns, self._epoch)

    def _without_own(self, threads: Iterable[WaitThread]) -> Iterator[WaitThread]:
        return (thread for thread in threads if not self._own.has(thread.tgid, thread.tid))

    def configure(self, config: OffCpuConfig) -> None:
        """Change what is recorded of waits, but not whether any is sampled."""
        self._wanted = config
        self._control = ThresholdControl(
            config.min_duration_ns, time.monotonic_ns(), config.samples_per_second
        )
        self._configure()

    def pause(self) -> None:
        """Follow no thread until :meth:`resume`."""
        self._epoch = 0
        self._joiner.clear()
        self._configure()

    def resume(self) -> None:
        """Follow the threads that leave their CPUs from now on."""
        self._epochs += 1
        self._epoch = self._epochs
        self._configure()

    def note_wakers(self, config: OffCpuConfig) -> None:
        """Follow wake-ups if the settings, or a kernel without times in run queues, need it.

        Raises ``OSError`` (before 5.19 without CAP_BPF).
        """
        if not config.wakers and self._has_run_delay:
            if link := self._links.pop(_WAKING, None):
                os.close(link)
        elif _WAKING not in self._links:
            self._link(_WAKING)

    @property
    def _rate(self) -> int:
        """Samples that are wanted in a second, on all CPUs."""
        return self._wanted.samples_per_second * self._cpus

    def _link(self, name: str) -> None:
        attach = _iterate if name == _WAITING else _attach
        self._links[name] = attach(self._program.program_fd(name))

    def _look_at_waiting(self, now_ns: int) -> None:
        """Let waiting threads report since when they want a CPU, and long waits their begin."""
        if _WAITING not in self._links:
            return
        self._next_look_ns = now_ns + _NS_PER_S
        self._settings.allow_late_begins(_BEGINS_PER_SAMPLE * self._rate)
        try:
            # union bpf_attr of BPF_ITER_CREATE: link, flags
            fd = bpf_call(_ITER_CREATE, (ctypes.c_uint32 * 2)(self._links[_WAITING], 0))
        except PermissionError as error:
            # Before 5.19 without CAP_BPF: they are reported when they end.
            _log.info("some waits are not reported before they end: %s", error)
            os.close(self._links.pop(_WAITING))
            return
        with open(fd, "rb", buffering=0) as tasks:
            tasks.read(1)  # nothing is written: this runs the program for all of them

    def detach(self) -> None:
        """Run the programs no more; what they have counted stays."""
        try:
            self._look_at_waiting(time.monotonic_ns())
        finally:
            self._close_links()

    def _close_links(self) -> None:
        while self._links:
            os.close(self._links.popitem()[1])

    def close(self) -> None:
        """Detach, and unmap."""
        self._close()

    def _configure(self) -> None:
        wanted = self._wanted
        rate = wanted.samples_per_second
        self._settings.change(
            WaitConfig(
                self._epoch,
                self._control.threshold_ns if rate else 0,
                wanted.min_duration_ns,
                _NS_PER_S // (_BEGINS_PER_SAMPLE * rate) if rate else 0,
                int(wanted.wakers),
                _NS_PER_S // rate if rate else 0,
            )
        )


@contextlib.contextmanager
def open_waits(
    offsets: WaitOffsets | None,
    program: LoadedObject,
    names: Iterable[str],
    *,
    config: SamplerConfig,
    files: HostFiles,
    entries: Mapping[str, int],
) -> Iterator[WaitFollower | None]:
    """Attach the loaded programs while a context lasts; None without offsets.

    Raises:
        HostError: no right to attach them.
        OSError: the kernel refused.
    """
    if offsets is None or config.off_cpu is None:
        yield None
        return
    try:
        follower = WaitFollower(program, names, offsets, config.off_cpu, entries)
    except PermissionError as error:
        raise get_privilege_error("attaching the BPF programs for off-CPU time", files) from error
    with contextlib.closing(follower):
        yield follower


_Told = tuple[int, tuple[int, ...], int, int]
"""State of a thread: the round, and its sums by state, waits, and time in short ones."""


class OwnThreads:
    """The threads of this process that are left out; not thread-safe.

    Args:
        leaves_out: as in :class:`OffCpuConfig`.
    """

    def __init__(self, leaves_out: str) -> None:
        self._leaves_out = leaves_out
        self._pid = os.getpid()
        self._tids: set[int | None] = set()

    def update(self) -> None:
        """Look which threads there are; one that has ended stays, as records of it may come."""
        if self._leaves_out == "threads":
            self._tids |= {
                one.native_id for one in threading.enumerate() if one.name.startswith(_OWN_NAME)
            }

    def has(self, tgid: int, tid: int) -> bool:
        """Returns whether a thread is left out."""
        if tgid != self._pid or not self._leaves_out:
            return False
        return self._leaves_out == "process" or tid in self._tids


class WaitSums:
    """Turns the threads' growing sums into what each process got between two readings."""

    def __init__(self) -> None:
        self._round = 0
        self._told: dict[int, _Told] = {}
        self._ready: dict[ProcessKey, WaitTotals] = {}

    def add_ended(self, threads: Iterable[WaitThread]) -> None:
        """Add the rest of threads that have ended."""
        for thread in threads:
            self._add(thread, thread.by_state, self._told.pop(thread.id, None))

    def read(
        self, threads: Iterable[WaitThread], now_ns: int, epoch: int
    ) -> Mapping[ProcessKey, WaitTotals]:
        """Returns the totals of each process since the last call.

        Args:
            threads: those that live; one that has just ended may be left out, or come in
                :meth:`add_ended` afterwards.
            now_ns: time of their clock before they were read.
            epoch: waits of another one are not known to last.
        """
        self._round += 1
        living = set[ProcessKey]()
        for thread in threads:
            living.add(_process_of(thread))
            by_state = thread.by_state
            if thread.off_since_ns and thread.epoch == epoch:
                asleep, woken = thread.passed(now_ns)
                sums = list(by_state)
                sums[thread.state] += asleep
                sums[0] += woken
                by_state = tuple(sums)
            by_state = self._add(thread, by_state, self._told.get(thread.id))
            self._told[thread.id] = self._round, by_state, thread.waits, thread.below_ns
        # A thread that ended after the last records were taken is in the next ones.
        old = [one for one, told in self._told.items() if told[0] < self._round - 1]
        for one in old:
            del self._told[one]
        ready, self._ready = self._ready, {}
        for process in ready.keys() - living:
            ready[process] = ready[process]._replace(has_ended=True)
        return ready

    def _add(
        self, thread: WaitThread, by_state: tuple[int, ...], told: _Told | None
    ) -> tuple[int, ...]:
        """Add what is new since a thread was reported; returns its sums now."""
        waits, below, new = thread.waits, thread.below_ns, by_state
        if told is not None:
            _, told_states, told_waits, told_below = told
            if by_state != told_states:
                by_state = _keep_told(by_state, told_states)
            new = tuple([a - b for a, b in zip(by_state, told_states, strict=True)])
            waits, below = waits - told_waits, below - told_below
        if waits or any(new):
            key, more = _process_of(thread), WaitTotals(new, waits, below)
            before = self._ready.get(key)
            self._ready[key] = more if before is None else before.plus(more)
        return by_state


def _keep_told(by_state: tuple[int, ...], told: tuple[int, ...]) -> tuple[int, ...]:
    """Sums that are nowhere below those that were reported.

    Reported sleep may turn out as time in which the thread wanted a CPU: that is less then.
    """
    kept = list(map(max, by_state, told))
    excess = sum(kept) - sum(by_state)
    kept[0] = max(kept[0] - excess, told[0])
    return tuple(kept)


def _process_of(thread: WaitThread) -> ProcessKey:
    return ProcessKey(thread.tgid, thread.start_time_ns or None)


def _iterate(program_fd: int) -> int:
    """A link of a program that runs for each task; reading from its iterators does."""
    # union bpf_attr of BPF_LINK_CREATE: program, target, type, flags
    return bpf_call(_LINK_CREATE, (ctypes.c_uint32 * 4)(program_fd, 0, _TRACE_ITER, 0))


def _attach(program_fd: int) -> int:
    """Attach a program to the tracepoint that it is made for: a descriptor, which detaches it."""
    # union bpf_attr of BPF_RAW_TRACEPOINT_OPEN: name (of raw tracepoints only), program
    return bpf_call(_RAW_TRACEPOINT_OPEN, (ctypes.c_uint64 * 2)(0, program_fd))
