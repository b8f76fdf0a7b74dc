"""Attaches the BPF programs that track off-CPU threads, and reads each process's wait totals."""

import contextlib
import errno
import logging
import os
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
    attach_tracepoint,
    find_wait_offsets,
    link_iterator,
    open_iterator,
    parse_threads,
)
from otel_kprofiler.host import HostFiles, get_privilege_error
from otel_kprofiler.model import ProcessKey, RawSample, WaitTotals
from otel_kprofiler.sampling.loading import get_offsets, require_libbpf
from otel_kprofiler.sampling.off_cpu import OffCpuConfig
from otel_kprofiler.sampling.own_threads import OwnThreads
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.wait_joiner import ThresholdControl, WaitJoiner
from otel_kprofiler.sampling.wait_sums import WaitSums

_SWITCH: Final = "kprofiler_switch"
_WAKING: Final = "kprofiler_waking"
_WAITING: Final = "kprofiler_waiting"
_BEGINS_PER_SAMPLE: Final = 6
"""Maximum ratio of reported wait starts to samples. Most waits are too short to be sampled."""
_LASTING_SHARE: Final = 0.5
"""Maximum average rate of samples from ongoing waits, as a fraction of the sample rate."""
_LOADAVG: Final = "/proc/loadavg"
_MIN_THREADS: Final = 16_384
_MAX_THREADS: Final = 1 << 20
_NS_PER_S: Final = 1_000_000_000
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors for a lack of descriptors or memory, which may pass."""

_log = logging.getLogger(__name__)


def plan_waits(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], loader: str
) -> WaitOffsets | None:
    """Returns the kernel offsets that the programs require; None if waits are not configured.

    Raises ``HostError`` if waits cannot be traced on this host.
    """
    if config.off_cpu is None:
        return None
    require_libbpf(loader, f"the loader {loader} cannot load the programs for off-CPU time")
    message = "measuring off-CPU time needs BTF, which this kernel lacks"
    return get_offsets(find_wait_offsets, read_types, message, "profile without off-CPU time")


def wait_map_entries(
    offsets: WaitOffsets | None, files: HostFiles, possible_cpus: int
) -> dict[str, int]:
    """Returns the number of entries in each map, at least four per existing thread.

    Some hash buckets are already full when half of the entries are in use.
    """
    if offsets is None:
        return {"buckets": 1, "threads": 1, "wait_lines": 1}
    try:
        # In "0.00 0.00 0.00 1/234 5678", 1 thread is runnable and 234 threads exist.
        threads = int(files.read_bytes(_LOADAVG).split()[3].split(b"/")[1])
    except (OSError, LookupError, ValueError):
        threads = 0
    room = min(max(1 << (4 * threads).bit_length(), _MIN_THREADS), _MAX_THREADS)
    return {"buckets": room // PLACES, "threads": room, "wait_lines": possible_cpus}


def wait_constants(offsets: WaitOffsets | None, entries: Mapping[str, int]) -> dict[str, bytes]:
    """Returns the BPF programs' constants for the given map sizes."""
    return {} if offsets is None else {WAIT_LAYOUT: offsets.pack(entries["buckets"])}


def wait_programs(config: SamplerConfig, on_cpu: str) -> tuple[str, ...]:
    """Returns the names of the off-CPU programs to load; they unwind stacks as ``on_cpu`` does."""
    if config.off_cpu is None:
        return ()
    sampled = config.off_cpu.samples_per_second
    switch = on_cpu.replace("kprofiler", _SWITCH) if sampled else _SWITCH
    return switch, _WAKING, _WAITING


class WaitFollower:
    """The attached programs that trace waits; not thread-safe.

    Raises ``OSError``, and attaches nothing, if the kernel rejects a program or a mapping.
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
        self._joiner = WaitJoiner(is_left_out=lambda record: self._own.has(record.tgid, record.tid))
        self._control = ThresholdControl(
            config.min_duration_ns, time.monotonic_ns(), config.samples_per_second
        )
        self._lasting: list[RawSample] = []
        self._is_short = False
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
        """Returns the duration above which all waits were sampled; 0 if no waits are sampled.

        The duration applies to the two most recent intervals between calls to :meth:`read`.
        """
        if not self._wanted.samples_per_second:
            return 0
        return max(self._control.threshold_ns, self._longest_ns, self._longest_before_ns)

    def copy(self) -> bytes:
        """Returns a copy of the programs' counters."""
        return self._lines.copy_counters()

    def counts(self) -> WaitCounts:
        """Returns the programs' counters."""
        return self._lines.counts()

    @property
    def added(self) -> int:
        """Returns the number of samples minus the number of sampled-wait records."""
        return self._joiner.added

    def receive(self, records: WaitRecords, now_ns: int) -> list[RawSample]:
        """Returns the samples that the new records complete, and the samples taken by :meth:`read`.

        ``now_ns`` is the current ``CLOCK_MONOTONIC`` time.
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
            self._try_to_look_at_waiting(now_ns)
        if rate and self._epoch and self._control.update(now_ns, self.counts().taken, rate):
            self._configure()
        return samples + lasting

    def read(self, now_ns: int, boot_ns: int) -> Mapping[ProcessKey, WaitTotals]:
        """Sample ongoing waits; return the increase in each process's totals since the last call.

        ``now_ns`` is the current ``CLOCK_MONOTONIC`` time, and ``boot_ns`` the current boottime. If
        this process lacks descriptors or memory, the next call also returns this call's increase.
        """
        try:
            self._look_at_waiting(now_ns)
            clock_ns = now_ns - self._lines.offset_ns()
            threads = list(self._without_own(parse_threads(self._table.read())))
        except OSError as error:
            self._endure(error)
            return {}
        self._is_short = False
        passed_s, self._read_ns = (now_ns - self._read_ns) / _NS_PER_S, now_ns
        most = max(1.0, _LASTING_SHARE * self._rate * passed_s)
        self._lasting += self._joiner.sample_lasting(threads, clock_ns, boot_ns, self._epoch, most)
        self._longest_before_ns = self._longest_ns
        self._longest_ns = self._joiner.lasting_threshold_ns
        return self._totals.read(threads, clock_ns, self._epoch)

    def _without_own(self, threads: Iterable[WaitThread]) -> Iterator[WaitThread]:
        return (thread for thread in threads if not self._own.has(thread.tgid, thread.tid))

    def configure(self, config: OffCpuConfig) -> None:
        """Change the settings for waits. The sample rate must not change to or from 0."""
        old, self._wanted = self._wanted, config
        rate, least_ns = config.samples_per_second, config.min_duration_ns
        if (rate, least_ns) != (old.samples_per_second, old.min_duration_ns):
            self._control = ThresholdControl(least_ns, time.monotonic_ns(), rate)
        self._configure()

    def pause(self) -> None:
        """Stop tracking threads until :meth:`resume`."""
        self._epoch = 0
        self._joiner.clear()
        self._configure()

    def resume(self) -> None:
        """Resume following threads. Waits already in progress are not measured."""
        self._epochs += 1
        self._epoch = self._epochs
        self._configure()

    def restart(self) -> None:
        """Do not measure waits already in progress, unless following is paused."""
        if self._epoch:
            self._joiner.clear()
            self.resume()

    def note_wakers(self, config: OffCpuConfig) -> None:
        """Trace wake-ups if wakers are recorded or the kernel does not measure run-queue delays.

        Raises ``OSError`` before Linux 5.19 if CAP_BPF is missing.
        """
        if not config.wakers and self._has_run_delay:
            if link := self._links.pop(_WAKING, None):
                os.close(link)
        elif _WAKING not in self._links:
            self._link(_WAKING)

    @property
    def _rate(self) -> int:
        return self._wanted.samples_per_second * self._cpus

    def _link(self, name: str) -> None:
        program_fd = self._program.program_fd(name)
        is_iterator = name == _WAITING
        self._links[name] = (
            link_iterator(program_fd) if is_iterator else attach_tracepoint("", program_fd)
        )

    def _look_at_waiting(self, now_ns: int) -> None:
        """Run a program that reports when threads became runnable, and when long waits began."""
        if _WAITING not in self._links:
            return
        self._next_look_ns = now_ns + _NS_PER_S
        self._settings.allow_late_begins(_BEGINS_PER_SAMPLE * self._rate)
        try:
            # union bpf_attr for BPF_ITER_CREATE: link, flags
            fd = open_iterator(self._links[_WAITING])
        except PermissionError as error:
            # Before 5.19, iterators require CAP_BPF. Without CAP_BPF, waits are reported only when
            # they end.
            _log.info("some waits are reported only after they end: %s", error)
            os.close(self._links.pop(_WAITING))
            return
        with open(fd, "rb", buffering=0) as tasks:
            tasks.read(1)  # runs the program for all threads, without output

    def _try_to_look_at_waiting(self, now_ns: int) -> None:
        try:
            self._look_at_waiting(now_ns)
        except OSError as error:
            self._endure(error)

    def _endure(self, error: OSError) -> None:
        """Log the first in a row of shortages; raise any other error."""
        if error.errno not in _SHORTAGES:
            raise error
        if not self._is_short:
            _log.warning("waits are reported later: %s", os.strerror(error.errno))
        self._is_short = True

    def detach(self) -> None:
        """Detach the programs; their counts remain readable."""
        try:
            self._try_to_look_at_waiting(time.monotonic_ns())
        finally:
            self._close_links()

    def _close_links(self) -> None:
        while self._links:
            os.close(self._links.popitem()[1])

    def close(self) -> None:
        """Detach the programs and unmap their memory."""
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
    """Attaches the loaded programs in a ``with`` block; yields None if waits are not sampled.

    Raises ``OSError``, or ``HostError`` if this process is not permitted to attach the programs.
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
