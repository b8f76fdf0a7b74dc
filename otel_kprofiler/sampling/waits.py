"""The programs that follow threads off the CPU: what they need, their links, their totals."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from otel_kprofiler.bpf import (
    KernelTypes,
    LoadedObject,
    WaitCounts,
    WaitLines,
    WaitOffsets,
    WaitThread,
    bpf_call,
    find_wait_offsets,
    pack_wait_config,
    parse_threads,
    read_threads,
    update_map,
)
from otel_kprofiler.errors import HostError, KernelFeatureError
from otel_kprofiler.host import HostFiles, get_privilege_error
from otel_kprofiler.model import NO_WAITS, ProcessKey, WaitTotals
from otel_kprofiler.sampling.sampler import SamplerConfig

WAIT_PROGRAMS: Final = ("kprofiler_switch", "kprofiler_waking")

_RAW_TRACEPOINT_OPEN: Final = 17  # enum bpf_cmd
_LOADAVG: Final = "/proc/loadavg"
_MIN_THREADS: Final = 16_384
_MAX_THREADS: Final = 1 << 20
_FIRST: Final = bytes(4)


def plan_waits(
    config: SamplerConfig, read_types: Callable[[], KernelTypes], loader: str
) -> WaitOffsets | None:
    """What the programs must know of this kernel; None if waits are not wanted.

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
    """Sizes of the maps: room for twice as many threads as there are now, and some more."""
    if offsets is None:
        return {"threads": 1, "wait_lines": 1}
    try:
        # "0.00 0.00 0.00 1/234 5678": runnable and existing threads
        threads = int(files.read_bytes(_LOADAVG).split()[3].split(b"/")[1])
    except (OSError, LookupError, ValueError):
        threads = 0
    room = 1 << (2 * threads).bit_length()
    return {
        "threads": min(max(room, _MIN_THREADS), _MAX_THREADS),
        "wait_lines": possible_cpus,
    }


class WaitFollower:
    """The attached programs; not thread-safe.

    Args:
        program: the loaded object.
        offsets: of the running kernel.
        cpus: number of possible CPUs.

    Raises:
        OSError: the kernel refused to attach or to map something; nothing stays attached.
    """

    def __init__(self, program: LoadedObject, offsets: WaitOffsets, cpus: int) -> None:
        self._program = program
        self._offsets = offsets
        self._epoch = self._current = 0
        self._links: list[int] = []
        self._totals = WaitSums()
        self._lines = WaitLines(program.map_fd("wait_lines"), cpus)
        try:
            self.resume()
            for name in WAIT_PROGRAMS:
                self._links.append(_attach(program.program_fd(name)))
        except BaseException:
            self.close()
            raise

    def counts(self) -> WaitCounts:
        """Counters of the programs."""
        return self._lines.counts()

    def add_ended(self, threads: Iterable[WaitThread]) -> None:
        """Take over the sums of threads that have ended."""
        self._totals.add_ended(threads)

    def read(self, now_ns: int) -> Mapping[ProcessKey, WaitTotals]:
        """What came to the totals since the call before.

        Args:
            now_ns: time of ``CLOCK_MONOTONIC``.
        """
        data = read_threads(self._program.map_fd("threads"))
        return self._totals.read(parse_threads(data), now_ns, self._current)

    def pause(self) -> None:
        """Follow no thread until :meth:`resume`."""
        self._configure(0)

    def resume(self) -> None:
        """Follow the threads that leave their CPUs from now on."""
        self._epoch += 1
        self._configure(self._epoch)

    def detach(self) -> None:
        """Run the programs no more; what they have counted stays."""
        while self._links:
            os.close(self._links.pop())

    def close(self) -> None:
        """Detach, and unmap."""
        self.detach()
        self._lines.close()

    def _configure(self, epoch: int) -> None:
        self._current = epoch
        packed = pack_wait_config(self._offsets, epoch)
        update_map(self._program.map_fd("wait_config"), _FIRST, packed)


def open_waits(
    offsets: WaitOffsets | None,
    program: LoadedObject,
    files: HostFiles,
    cpus: int,
    undo: Callable[[Callable[[], None]], object],
) -> WaitFollower | None:
    """Attach the loaded programs, and give what detaches them to ``undo``; None without offsets.

    Raises:
        HostError: no right to attach them.
        OSError: the kernel refused.
    """
    if offsets is None:
        return None
    try:
        follower = WaitFollower(program, offsets, cpus)
    except PermissionError as error:
        raise get_privilege_error("attaching the BPF programs for off-CPU time", files) from error
    undo(follower.close)
    return follower


class WaitSums:
    """Turns the threads' growing sums into what each process got between two readings."""

    def __init__(self) -> None:
        self._round = 0
        self._told: dict[int, tuple[int, tuple[int, ...], int, int]] = {}
        self._ready: dict[ProcessKey, WaitTotals] = {}

    def add_ended(self, threads: Iterable[WaitThread]) -> None:
        """Add the rest of threads that have ended."""
        for thread in threads:
            self._add(thread, thread.by_state)
            self._told.pop(thread.id, None)

    def read(
        self, threads: Iterable[WaitThread], now_ns: int, epoch: int
    ) -> Mapping[ProcessKey, WaitTotals]:
        """What each process got since the last call.

        Args:
            threads: those that live; one that has just ended may be left out, or come in
                :meth:`add_ended` afterwards.
            now_ns: time of ``CLOCK_MONOTONIC`` before they were read.
            epoch: waits of another one are not known to last.
        """
        self._round += 1
        for thread in threads:
            by_state = thread.by_state
            if thread.off_since_ns and thread.epoch == epoch:
                asleep, woken = thread.passed(now_ns)
                sums = list(by_state)
                sums[thread.state] += asleep
                sums[0] += woken
                by_state = tuple(sums)
            self._add(thread, by_state)
        # A thread that ended after the last records were taken is in the next ones.
        old = [one for one, told in self._told.items() if told[0] < self._round - 1]
        for one in old:
            del self._told[one]
        ready, self._ready = self._ready, {}
        return ready

    def _add(self, thread: WaitThread, by_state: tuple[int, ...]) -> None:
        told = self._told.get(thread.id)
        waits, below = thread.waits, thread.below_ns
        new = by_state
        if told is not None:
            _, told_states, told_waits, told_below = told
            # What was told as one state may turn out as another: never take back.
            if by_state != told_states:
                by_state = tuple(map(max, by_state, told_states))
            new = tuple([a - b for a, b in zip(by_state, told_states, strict=True)])
            waits, below = waits - told_waits, below - told_below
        self._told[thread.id] = self._round, by_state, thread.waits, thread.below_ns
        if not waits and not any(new):
            return
        key = ProcessKey(thread.tgid, thread.start_time_ns or None)
        before = self._ready.get(key, NO_WAITS)
        total = tuple([a + b for a, b in zip(before.by_state, new, strict=True)])
        self._ready[key] = WaitTotals(total, before.switches + waits, before.below_ns + below)


def _attach(program_fd: int) -> int:
    """Attach a program to the tracepoint that it is made for: a descriptor, which detaches it."""
    # union bpf_attr of BPF_RAW_TRACEPOINT_OPEN: name (of raw tracepoints only), program
    return bpf_call(_RAW_TRACEPOINT_OPEN, (ctypes.c_uint64 * 2)(0, program_fd))
