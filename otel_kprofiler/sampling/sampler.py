"""What a sampler is: its interface, its settings, its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from otel_kprofiler.bpf import MAX_INTERRUPT_RANGES, SpanLayout
from otel_kprofiler.model import MAX_FRAMES, LossCause, RawSample

MAX_SAMPLES_PER_SECOND: Final = 10_000
MAX_RING_BYTES: Final = 1 << 30
_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """Settings of a sampler.

    Attributes:
        samples_per_second: rate on each CPU, 1 to 10000.
        stacks: sides to collect. With one side alone, an interrupt that hit the other side
            (and so has no frame) is no sample.
        max_frames: limit of each side, 1 to 127.
        pin_cpu_ids: CPUs to sample; empty: all.
        send_idle_frames: sample the idle task itself too.
        target_pids: processes to sample (thread group ids); empty: all.
        min_process_age_ns: leave out processes younger than this. Without BTF the age is
            unknown and nothing is left out.
        max_ring_bytes: upper limit of the ring, whatever the rest asks for.
        map_scale_factor: the ring is 2 to the power of this as large as computed.
        drain_interval_s: how often the owner means to call ``drain``.
        interrupt_ranges: half-open address ranges of the code that interrupts enter through
            (``__irqentry_text_start`` … and its like). A sample of the idle task with a frame in
            one of them is an interrupt's and kept. Without ranges the two cannot be told apart,
            and all samples of the idle task are left out.
        span_layout: how threads of this process say which span is current in them; None: not.
        span_slots: number of threads that may.
        target_namespace: device and inode of the pid namespace that ``target_pids`` are in, and
            that the ids of samples shall be of (see ``stat`` of ``/proc/self/ns/pid``); None for
            the initial one. Processes of other namespaces keep their initial ids.
        target_descendants: sample the descendants of the one ``target_pids`` too. What has lost
            its parent is a descendant no more. Needs BTF.
        child_pid: follow this process, from its next exec on, and all that it starts,
            instead of all CPUs (see :class:`HeldCommand`).
        check_kernel: refuse kernels that are too old, instead of trying.
        verifier_log_level: what the kernel's verifier logs about the program, 0 to 2; written
            to the log at level INFO.
    """

    samples_per_second: int = 19
    stacks: Literal["kernel", "user", "both"] = "kernel"
    max_frames: int = MAX_FRAMES
    pin_cpu_ids: tuple[int, ...] = ()
    send_idle_frames: bool = False
    target_pids: tuple[int, ...] = ()
    min_process_age_ns: int = 0
    max_ring_bytes: int = MAX_RING_BYTES
    map_scale_factor: int = 0
    drain_interval_s: float = 0.25
    interrupt_ranges: tuple[tuple[int, int], ...] = ()
    span_layout: SpanLayout | None = None
    span_slots: int = 0
    target_namespace: tuple[int, int] | None = None
    target_descendants: bool = False
    child_pid: int | None = None
    check_kernel: bool = True
    verifier_log_level: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("samples_per_second", 1, MAX_SAMPLES_PER_SECOND),
            ("max_frames", 1, MAX_FRAMES),
            ("map_scale_factor", 0, 8),
            ("verifier_log_level", 0, 2),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, must be {low} to {high}")
        if self.target_descendants and len(self.target_pids) != 1:
            raise ValueError("target_descendants needs exactly one of target_pids")
        if len(self.interrupt_ranges) > MAX_INTERRUPT_RANGES:
            raise ValueError(f"more than {MAX_INTERRUPT_RANGES} interrupt ranges")

    @property
    def period_ns(self) -> int:
        """Distance between two samples of a CPU."""
        return _NS_PER_S // self.samples_per_second


class SamplerCounts(NamedTuple):
    """Cumulative counts from the start to the last ``drain``.

    Attributes:
        taken: samples that passed all filters, counted by the kernel program.
        lost: how many of those could not be handed over, counted by the kernel program.
        received: samples returned by ``drain``: taken = received + the sum of lost.
        filtered: what was left out, by filter: ``idle`` (the idle task itself), ``target``,
            ``age``, ``empty`` (no frame on the only side that is wanted).
        missed: samples that the kernel did not take: periods of a CPU that was not idle in which
            it did not run the program, because the CPU was inside another BPF program or
            bpf(2), had interrupts off, or was not run by its hypervisor. Not in ``taken``; 0
            where a command is followed.
    """

    taken: int
    lost: Mapping[LossCause, int]
    received: int
    filtered: Mapping[str, int]
    missed: int = 0


class Sampler(Protocol):
    """A source of samples. Used by one thread, except :meth:`wake` and :meth:`counts`."""

    @property
    def period_ns(self) -> int:
        """Distance between two samples of a CPU."""

    def start(self) -> None:
        """Begin. Raises ``HostError`` or ``SamplerError``; then nothing stays open."""

    def wait(self, timeout_s: float) -> None:
        """Return when the fill mark is passed, on :meth:`wake`, or after ``timeout_s``."""

    def wake(self) -> None:
        """End a :meth:`wait`; from any thread or signal handler."""

    def drain(self) -> list[RawSample]:
        """All samples that are ready; never blocks. Also follows CPUs that come and go."""

    def complete_until_ns(self) -> int:
        """Boot time before which every sample has been returned by :meth:`drain`."""

    def counts(self) -> SamplerCounts:
        """The counters of the last :meth:`drain`, from any thread; also after :meth:`close`."""

    def stop(self) -> None:
        """Take no more samples; a last :meth:`drain` returns the rest."""

    def close(self) -> None:
        """Give everything back; may be called again."""
