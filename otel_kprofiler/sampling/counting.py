"""Derives the counters of each sample kind from the BPF programs' counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from otel_kprofiler.bpf import ProgramCounts, WaitCounts, parse_wait_counts
from otel_kprofiler.model import (
    OFF_CPU,
    ON_CPU,
    STACK_OK,
    TRUNCATED_STACKS,
    USER_SIDE,
    LossCause,
    ProfileKind,
    RawSample,
)
from otel_kprofiler.sampling.sampler import SamplerConfig, SamplerCounts

if TYPE_CHECKING:
    from otel_kprofiler.sampling.attachment import Attachment

_CUT_TRIES: Final = 64
"""Maximum number of attempts to take a consistent snapshot; enough for 64 CPUs at 10 kHz."""


def start_counts(config: SamplerConfig) -> dict[str, SamplerCounts]:
    """Returns zeroed counters for all configured kinds."""
    nothing = [ProgramCounts(0, 0, 0, 0, 0, 0, 0)] * (1 + len(config.events))
    none = SamplerCounts(0, {}, 0, {})
    counts = name_counts(config, nothing, (), {kind.name: none for kind in config.kinds})
    return counts | ({} if config.off_cpu is None else {OFF_CPU.name: none})


def take_snapshot(attached: Attachment) -> tuple[list[ProgramCounts], WaitCounts, int]:
    """Returns the programs' counters, and the ring position up to which records are counted.

    The cpu-clock counters precede the event counters. If samples arrive too fast, the counters may
    be a few records ahead of the ring position.
    """
    waits = attached.waits
    for _ in range(_CUT_TRIES):
        lines = attached.lines.copy(), waits.copy() if waits else b""
        position = attached.ring.reserved()
        again = attached.lines.copy(), waits.copy() if waits else b""
        counts, at_rest = attached.lines.parse(lines[0])
        if again == lines and at_rest:  # no CPU is writing a record
            break
    missed = attached.tracepoints.missed if attached.tracepoints else {}
    for number, count in missed.items():
        counts[number] = counts[number]._replace(missed=counts[number].missed + count)
    return counts, parse_wait_counts(lines[1]), position


def _count_truncated(
    samples: Sequence[RawSample], previous: Mapping[str, int]
) -> Mapping[str, int]:
    after = dict(previous)
    for collected, count in Counter([sample.collected for sample in samples]).items():
        end = TRUNCATED_STACKS.get(dict(collected).get(USER_SIDE, STACK_OK))
        if end is not None:
            after[end.name.lower()] = after.get(end.name.lower(), 0) + count
    return after


def name_counts(
    config: SamplerConfig,
    counts: Sequence[ProgramCounts],
    samples: Iterable[RawSample],
    previous: Mapping[str, SamplerCounts],
) -> dict[str, SamplerCounts]:
    """Returns the counters for on-CPU samples and for each event, by kind.

    ``counts`` are the counters for cpu-clock and each event. ``samples`` are those received since
    the ``previous`` counters were read.
    """
    kinds = [(ON_CPU, counts[0])] if config.on_cpu else []
    kinds += zip((event.kind for event in config.events), counts[1:], strict=True)
    of_kind: dict[ProfileKind, list[RawSample]] = {kind: [] for kind, _ in kinds}
    for sample in samples:
        of_kind[sample.kind].append(sample)
    return {kind.name: _name_counts(of, of_kind[kind], previous[kind.name]) for kind, of in kinds}


def _name_counts(
    counts: ProgramCounts, samples: Sequence[RawSample], previous: SamplerCounts
) -> SamplerCounts:
    lost = {LossCause.RING_FULL: counts.ring_full} if counts.ring_full else {}
    filtered = {name: getattr(counts, name) for name in ("idle", "target", "age", "empty")}
    truncated = _count_truncated(samples, previous.truncated)
    received = previous.received + len(samples)
    return SamplerCounts(counts.taken, lost, received, filtered, counts.missed, truncated)


def name_wait_counts(
    counts: WaitCounts, added: int, samples: Sequence[RawSample], previous: SamplerCounts
) -> dict[str, SamplerCounts]:
    """Returns the counters of waits, adding ``added`` to the BPF program's count."""
    lost = {LossCause.RING_FULL: counts.ring_full} if counts.ring_full else {}
    truncated = _count_truncated(samples, previous.truncated)
    received = previous.received + len(samples)
    return {OFF_CPU.name: SamplerCounts(counts.taken + added, lost, received, {}, 0, truncated)}
