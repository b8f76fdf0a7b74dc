"""Stores the sampler's settings and counters in a recording."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from otel_kprofiler.bpf import RECORD_VERSION
from otel_kprofiler.checked import checked_number
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import (
    LockTotal,
    LossCause,
    ProcessKey,
    ProfileKind,
    WaitState,
    WaitTotals,
)
from otel_kprofiler.recording.user_names import parse_process_key
from otel_kprofiler.sampling import SamplerCounts

FORMAT_VERSION: Final = 3
END_NS: Final = 1 << 63  # greater than any boottime


class RecordingFacts(NamedTuple):
    """The sampler's settings and counters in a recording.

    Attributes:
        offset_ns: Unix time minus boottime on the recorded host.
        period_ns: the sampling period on each CPU.
        stack_limit: the minimum size, in bytes, of a stack that counts as truncated.
        until_ns: the ``CLOCK_BOOTTIME`` at which sampling stopped.
        counts: the sampler's counters when sampling stopped, by kind.
        since_ns: when sampling started, on ``CLOCK_BOOTTIME``; 0 if unknown.
        waits: the exact off-CPU time of each process during sampling; empty if waits were not
            counted.
        wait_threshold_ns: the last wait threshold, above which all waits were sampled; 0 if
            unknown.
        events: the kinds of events, in the order of their numbers in records.
    """

    offset_ns: int
    period_ns: int
    stack_limit: int
    until_ns: int
    counts: Mapping[str, SamplerCounts]
    since_ns: int = 0
    waits: Mapping[ProcessKey, WaitTotals] = MappingProxyType({})
    wait_threshold_ns: int = 0
    events: tuple[ProfileKind, ...] = ()


def parse_facts(header: dict[str, Any]) -> RecordingFacts:
    """Parses the header of a recording.

    Raises ``KProfilerError`` if the recording is in another format, and ``KeyError``, ``TypeError``
    or ``ValueError`` if the header is malformed.
    """
    version = (header["version"], header["record_version"])
    if version != (FORMAT_VERSION, RECORD_VERSION):
        raise KProfilerError(
            f"the recording has format {version[0]}.{version[1]}, "
            f"but this version supports {FORMAT_VERSION}.{RECORD_VERSION}",
            hint="replay it with the version of otel-kprofiler that recorded it",
        )
    return RecordingFacts(
        checked_number(header["offset_ns"], -END_NS, END_NS),
        checked_number(header["period_ns"], 1),
        checked_number(header["stack_limit"], 1),
        checked_number(header["until_ns"], 0, END_NS),
        {str(kind): _parse_counts(counts) for kind, counts in header["counts"].items()},
        checked_number(header.get("since_ns", 0), 0, END_NS),
        dict(map(_parse_waits, header.get("waits", ()))),
        checked_number(header.get("wait_threshold_ns", 0), 0, END_NS),
        tuple(
            ProfileKind(str(name), str(sample_type), str(unit))
            for name, sample_type, unit in header.get("events", ())
        ),
    )


def _parse_waits(row: list[Any]) -> tuple[ProcessKey, WaitTotals]:
    *key, states, switches, below = row
    if len(states) != len(WaitState):
        raise ValueError(
            f"wait totals have {len(states)} thread states instead of {len(WaitState)}"
        )
    by_state = tuple([checked_number(part) for part in states])
    return parse_process_key(key), WaitTotals(
        by_state, checked_number(switches), checked_number(below)
    )


def _parse_counts(counts: dict[str, Any]) -> SamplerCounts:
    lost = {LossCause(cause): checked_number(count) for cause, count in counts["lost"].items()}
    filtered = {str(why): checked_number(count) for why, count in counts["filtered"].items()}
    return SamplerCounts(
        checked_number(counts["taken"]),
        lost,
        checked_number(counts["received"]),
        filtered,
        checked_number(counts.get("missed", 0)),
        {str(why): checked_number(count) for why, count in counts["truncated"].items()},
        {
            str(name): LockTotal(checked_number(waits), checked_number(total_ns))
            for name, (waits, total_ns) in counts.get("locks", {}).items()
        },
    )
