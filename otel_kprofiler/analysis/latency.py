"""Weights samples by latency: CPU time divided by the number of threads running at the time."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import replace
from typing import Final

from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import ON_CPU, ProfileKind

LATENCY: Final = ProfileKind("latency", "latency", "nanoseconds")
"""CPU time divided by the number of running threads in the process. A process's latencies add up to
the time during which any of its threads ran."""


def weigh_latency(samples: Samples) -> Samples:
    """Returns the on-CPU samples with weights of kind :data:`LATENCY`.

    A sample's weight is its period, divided by the number of its process's threads that were on a
    CPU at the time. The nearer another thread's samples are in time, the more that thread counts:
    fully at the same time, and not at all at a distance of a period or more. A thread that runs
    continuously therefore counts as one thread, regardless of when its CPU's timer fires. When a
    thread starts or stops running, the thread count is wrong for up to one period.

    ``samples`` must include all samples of each process, because a subset would omit threads that
    ran at the same time. Raises ``KProfilerError`` if there are no on-CPU samples that have a
    period and individual times.
    """
    origins = samples.tables.origins
    is_cpu = [origin.profile.kind == ON_CPU for origin in origins]
    cpu = samples.select([is_cpu[origin] for origin in samples.origins])
    if not cpu.count:
        raise KProfilerError(
            "there are no on-CPU samples to weight by latency",
            hint="record without --no-on-cpu; if you select events, also pass -e cpu-clock",
        )
    has_times = all(origins[origin].profile.period_ns for origin in set(cpu.origins))
    if not has_times or cpu.count != len(cpu.times):
        raise KProfilerError(
            "latency requires a timestamp per sample, but the profile contains only totals",
            hint="use an OTLP profile, a raw recording or a perf.data file instead",
        )
    weighed = [
        origin._replace(profile=replace(origin.profile, kind=LATENCY, period_ns=0))
        for origin in origins
    ]
    kept = [number for number, is_used in enumerate(is_cpu) if is_used]
    places = {number: at for at, number in enumerate(kept)}
    return replace(
        cpu,
        tables=cpu.tables._replace(origins=[weighed[number] for number in kept], totals={}),
        origins=array("I", [places[origin] for origin in cpu.origins]),
        values=_latencies(cpu),
    )


def _latencies(samples: Samples) -> array[int]:
    by_process: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    tables = samples.tables
    for (start, end), number, origin in zip(
        samples.spans(), samples.threads, samples.origins, strict=True
    ):
        thread = tables.threads[number]
        period_ns = tables.origins[origin].profile.period_ns
        points = by_process[thread.resource]
        points += [(samples.times[at], thread.tid, period_ns, at) for at in range(start, end)]
    latencies = array("q", bytes(8 * len(samples.times)))
    for points in by_process.values():
        points.sort()
        _weigh(points, latencies)
    return latencies


def _weigh(points: list[tuple[int, int, int, int]], latencies: array[int]) -> None:
    """Set the latency weights of a process's samples, in nanoseconds.

    ``points`` are tuples of time, thread id, period and index into ``latencies``, sorted by time. A
    sample less than one period away from a point counts as the period minus the distance. A
    continuously running thread's samples add up to one period.
    """
    first = 0
    for time, tid, period, place in points:
        while points[first][0] <= time - period:
            first += 1
        running = period  # this thread's time; the loop adds the other threads' times
        for at in range(first, len(points)):
            other_time, other, _, _ = points[at]
            if other_time >= time + period:
                break
            if other != tid:
                running += period - abs(other_time - time)
        latencies[place] = round(period * period / running)
