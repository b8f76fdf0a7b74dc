"""Plans the sampling of kernel lock waits, and attaches the BPF programs."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from otel_kprofiler.bpf import (
    LOCK_BEGIN,
    LOCK_BUCKETS,
    LOCK_END,
    LOCK_LAYOUT,
    KernelTypes,
    LoadedObject,
    LockLines,
    LockOffsets,
    LockSettings,
    TracedCpus,
    find_lock_offsets,
    pack_lock_layout,
)
from otel_kprofiler.errors import KernelFeatureError
from otel_kprofiler.host import HostFiles, LockSpec
from otel_kprofiler.model import LockTotals
from otel_kprofiler.sampling.python_frames import PYTHON_SUFFIX
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.tracepoints import TracedPrograms
from otel_kprofiler.sampling.unwinder import BY_TABLES, FRAME_POINTERS
from otel_kprofiler.sampling.wait_joiner import ThresholdControl

LOCK_PROGRAMS: Final = (LOCK_BEGIN, LOCK_END)
_TRACEPOINTS: Final = {LOCK_BEGIN: "contention_begin", LOCK_END: "contention_end"}
_LEAST_NS: Final = 1
_NS_PER_S: Final = 1_000_000_000


class LockPlan(NamedTuple):
    """A plan for sampling lock waits; ``number`` is the event's number, counted from 1."""

    spec: LockSpec
    number: int
    offsets: LockOffsets

    def constants(self, program: str) -> dict[str, bytes]:
        """Returns the BPF constants, by name, for programs that unwind like ``program``."""
        collects = program.removesuffix(PYTHON_SUFFIX)
        by = (FRAME_POINTERS, *BY_TABLES).index(collects)  # enum user_frames
        packed = pack_lock_layout(self.offsets, self.number, by, python=collects != program)
        return {LOCK_LAYOUT: packed}


def plan_locks(config: SamplerConfig, read_types: Callable[[], KernelTypes]) -> LockPlan | None:
    """Plans sampling of lock contention; returns None if it is not configured.

    Raises ``KernelFeatureError`` if the kernel lacks the tracepoints, and ``OSError`` if it has no
    BTF.
    """
    for number, spec in enumerate(config.events, 1):
        if isinstance(spec, LockSpec):
            offsets = find_lock_offsets(read_types())
            if offsets is None:
                raise KernelFeatureError(
                    "the kernel lacks the tracepoints contention_begin and contention_end, which "
                    f"{spec.name} needs",
                    hint="use Linux 5.19 or later, which has both, or leave the event out",
                )
            return LockPlan(spec, number, offsets)
    return None


def lock_map_entries(plan: LockPlan | None, possible_cpus: int) -> dict[str, int]:
    """Returns the number of entries in each lock contention map, by map name."""
    if plan is None:
        return {"lock_buckets": 1, "lock_lines": 1}
    return {"lock_buckets": LOCK_BUCKETS, "lock_lines": possible_cpus}


class Locks(TracedPrograms):
    """The programs that sample lock contention; not thread-safe.

    Args:
        traced: CPUs whose waits are measured. A wait is attributed to the CPU on which it begins.
        cpus: CPUs to sample; empty means all.
    """

    def __init__(
        self,
        spec: LockSpec,
        files: HostFiles,
        program: LoadedObject,
        *,
        traced: TracedCpus,
        possible: int,
        cpus: Iterable[int],
    ) -> None:
        super().__init__(files, traced, possible, cpus)
        self.spec = spec
        self._program = program
        self._rate = spec.rate * possible
        self._control = ThresholdControl(_LEAST_NS, time.monotonic_ns(), spec.rate)
        self._lines = LockLines(program.map_fd("lock_lines"), possible)
        self._settings = LockSettings(program.map_fd("lock_config"))

    def open(self) -> None:
        """Attach both programs, or raise ``HostError``."""
        self._configure()
        self._start()
        for name, tracepoint in _TRACEPOINTS.items():
            self._attach(tracepoint, self._program.program_fd(name), self.spec.name)

    def adapt(self, now_ns: int, taken: int) -> None:
        """Adjust the sampling threshold once a second.

        ``now_ns`` is the current ``CLOCK_MONOTONIC`` time. ``taken`` is the number of waits sampled
        since sampling started.
        """
        if self._control.update(now_ns, taken, self._rate):
            self._configure()

    def totals(self) -> LockTotals:
        """Returns the totals for all lock waits since the start."""
        return self._lines.totals()

    def unmap(self) -> None:
        """Unmap the counters and settings."""
        self._lines.close()
        self._settings.close()

    def _configure(self) -> None:
        self._settings.change(self._control.threshold_ns, _NS_PER_S // self.spec.rate)


@contextlib.contextmanager
def open_locks(
    plan: LockPlan | None,
    program: LoadedObject,
    *,
    files: HostFiles,
    possible: int,
    cpus: Iterable[int],
) -> Iterator[Locks | None]:
    """Opens the loaded programs' maps for a ``with`` block; yields None if there is no plan."""
    if plan is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        traced = TracedCpus(program.map_fd("traced_cpus"), possible)
        stack.callback(traced.close)
        locks = Locks(plan.spec, files, program, traced=traced, possible=possible, cpus=cpus)
        stack.callback(locks.unmap)
        stack.callback(locks.close)
        yield locks
