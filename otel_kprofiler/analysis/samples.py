"""Holds samples in compact columns, for grouping and filtering."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from operator import itemgetter
from typing import NamedTuple

from otel_kprofiler.model import (
    NO_WAITS,
    LabelSet,
    Profile,
    ProfileKind,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    WaitTotals,
    Window,
    WindowSample,
    WindowWait,
)


class Origin(NamedTuple):
    """The window and profile to which sample rows belong.

    Attributes:
        window: index of the window among the loaded windows.
        profile: the profile, without its samples.
        sample_count: number of samples that the profile had when it was loaded.
    """

    window: int
    start_unix_ns: int
    end_unix_ns: int
    profile: Profile
    sample_count: int


class Thread(NamedTuple):
    """A thread with one of its names and one set of labels.

    ``resource`` is the index of the thread's process in :attr:`Tables.resources`.
    """

    resource: int
    tid: int
    name: str
    labels: LabelSet = ()


class Tables(NamedTuple):
    """Tables that sample columns index into.

    All selections of the same samples share these tables.
    """

    origins: Sequence[Origin]
    resources: Sequence[Resource]
    threads: Sequence[Thread]
    stacks: Sequence[Stack]
    links: Sequence[SpanLink | None]
    cpus: Sequence[int]
    waits: Sequence[WindowWait | None]
    totals: Mapping[tuple[int, int], WaitTotals]
    """Exact off-CPU time, keyed by indices into ``origins`` and ``resources``."""
    in_kernel: Sequence[bool] | None = None
    """True for each stack whose samples ran in the kernel; None if ``stacks`` has all frames."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A table of samples. The samples in a row differ only in their times and values. Immutable.

    A row uses about 30 bytes, and each timestamp 8.

    Attributes:
        tables: distinct stacks, threads and other values, which columns refer to by index.
        ends: index in ``times`` at which each row ends and the next row starts.
        times: Unix times in nanoseconds, row by row.
        values: the sample's value at each time, in the unit of its kind; empty if all values are 1.
    """

    tables: Tables
    origins: array[int]
    threads: array[int]
    stacks: array[int]
    links: array[int]
    cpus: array[int]
    waits: array[int]
    ends: array[int]
    times: array[int]
    values: array[int]

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def count(self) -> int:
        """Returns the number of samples."""
        return sum(self.counts())

    @property
    def kinds(self) -> tuple[ProfileKind, ...]:
        """Returns all sample kinds, including those without samples."""
        return tuple(dict.fromkeys(origin.profile.kind for origin in self.tables.origins))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields the indices in ``times`` at which each row starts and ends."""
        start = 0
        for end in self.ends:
            yield start, end
            start = end

    def counts(self) -> list[int]:
        """Returns each row's sample count: the sum of its values if the values count samples."""
        if not self.values:
            return self._lengths()
        is_count = [origin.profile.kind.counts_samples for origin in self.tables.origins]
        return [
            sum(self.values[start:end]) if is_count[origin] else end - start
            for (start, end), origin in zip(self.spans(), self.origins, strict=True)
        ]

    def _lengths(self) -> list[int]:
        return [end - start for start, end in self.spans()]

    def weights(self) -> list[int]:
        """Returns the weight of each row, in the unit of its kind's ``measure``."""
        values = self.values
        weights = (
            [sum(values[start:end]) for start, end in self.spans()] if values else self._lengths()
        )
        factors = [origin.profile.measure(1) for origin in self.tables.origins]
        return [
            weight * factors[origin] for weight, origin in zip(weights, self.origins, strict=True)
        ]

    @property
    def has_waits(self) -> bool:
        """Returns whether any sample describes a wait."""
        waits = self.tables.waits
        return any(waits[wait] is not None for wait in self.waits)

    def without_idle(self) -> Samples:
        """Returns the samples without waits by idle threads; see :class:`WaitCause`."""
        idle = [wait is not None and wait.is_idle for wait in self.tables.waits]
        return self.select([not idle[wait] for wait in self.waits]) if any(idle) else self

    def of_kind(self, kind: ProfileKind) -> Samples:
        """Returns the samples of a kind. Other kinds may have the same name, but another unit."""
        is_kind = [origin.profile.kind == kind for origin in self.tables.origins]
        return self.select([is_kind[origin] for origin in self.origins])

    def select(self, keep: Sequence[bool]) -> Samples:
        """Returns the rows for which ``keep`` is true."""
        times, values = array("Q"), array("q")
        for start, end in compress(self.spans(), keep):
            times += self.times[start:end]
            values += self.values[start:end]
        return self._kept(keep, compress(self._lengths(), keep), times, values)

    def between(self, start_unix_ns: int, end_unix_ns: int) -> Samples:
        """Returns the samples within an interval.

        Timestamps outside the interval are removed from each row.
        """
        inside = [start_unix_ns <= time < end_unix_ns for time in self.times]
        lengths = [sum(inside[start:end]) for start, end in self.spans()]
        times = array("Q", compress(self.times, inside))
        values = array("q", compress(self.values, inside))
        return self._kept(lengths, filter(None, lengths), times, values)

    def split(self, edges: Sequence[int]) -> list[Samples]:
        """Splits samples by time: before the first edge, between edges, and from the last edge on.

        The edges are Unix times in nanoseconds, in ascending order. A row appears in every part
        that contains one or more of the row's times.
        """
        parts = [
            _Part(array("Q"), array("Q"), array("Q"), array("q")) for _ in range(len(edges) + 1)
        ]
        places = [bisect_right(edges, time) for time in self.times]
        for row, (start, end) in enumerate(self.spans()):
            for at in range(start, end):
                rows, ends, times, values = parts[places[at]]
                times.append(self.times[at])
                if self.values:
                    values.append(self.values[at])
                if rows and rows[-1] == row:
                    ends[-1] += 1
                else:
                    rows.append(row)
                    ends.append(len(times))
        return [self._take(part) for part in parts]

    def _take(self, part: _Part) -> Samples:
        columns = [array("I", [column[row] for row in part.rows]) for column in self._columns()]
        return self._with(columns, part.ends, part.times, part.values)

    def _with(
        self, columns: Iterable[array[int]], ends: array[int], times: array[int], values: array[int]
    ) -> Samples:
        origins, threads, stacks, links, cpus, waits = columns
        return Samples(
            self.tables, origins, threads, stacks, links, cpus, waits, ends, times, values
        )

    def _columns(self) -> tuple[array[int], ...]:
        return self.origins, self.threads, self.stacks, self.links, self.cpus, self.waits

    def _kept(
        self, keep: Sequence[int], lengths: Iterable[int], times: array[int], values: array[int]
    ) -> Samples:
        columns = [array("I", compress(column, keep)) for column in self._columns()]
        return self._with(columns, array("Q", accumulate(lengths)), times, values)

    def windows(self) -> list[Window]:
        """Converts the samples to windows. Filtered profiles contain no loss counts or totals."""
        tables = self.tables
        rows: dict[tuple[int, int], list[WindowSample]] = {}
        rows_and_spans = zip(zip(*self._columns(), strict=True), self.spans(), strict=True)
        for (origin, thread, stack, link, cpu, wait), (start, end) in rows_and_spans:
            resource, tid, name, labels = tables.threads[thread]
            rows.setdefault((origin, resource), []).append(
                WindowSample(
                    tables.stacks[stack], tid, name, tables.cpus[cpu], tables.links[link],
                    self.times[start:end], self.values[start:end], labels, tables.waits[wait],
                )
            )  # fmt: skip
        groups: dict[int, list[ResourceSamples]] = {}
        for number, resource in dict.fromkeys([*rows, *tables.totals]):
            key = (number, resource)
            totals = tables.totals.get(key)
            group = ResourceSamples(tables.resources[resource], rows.get(key, []), totals)
            groups.setdefault(number, []).append(group)
        profiles: dict[tuple[int, int, int], list[Profile]] = {}
        for number, origin in enumerate(tables.origins):
            profiles.setdefault(origin[:3], []).append(_restore(origin, groups.get(number, [])))
        return [
            Window(start, end, window_profiles)
            for (_, start, end), window_profiles in profiles.items()
        ]


class _Part(NamedTuple):
    """Columns of one part of a split. ``rows`` contains each row's index before the split."""

    rows: array[int]
    ends: array[int]
    times: array[int]
    values: array[int]


def _restore(origin: Origin, resources: list[ResourceSamples]) -> Profile:
    profile = replace(origin.profile, resources=resources)
    if profile.sample_count == origin.sample_count:
        return profile
    return profile.select([group._replace(waits=None) for group in resources if group.samples])


def load_samples(windows: Iterable[Window]) -> Samples:
    """Loads the samples in windows, which may be from several hosts. Equal Resources are merged."""
    origins: list[Origin] = []
    resources: dict[tuple[object, ...], int] = {}
    kept: list[Resource] = []
    threads: dict[Thread, int] = {}
    stacks: dict[Stack, int] = {}
    links: dict[SpanLink | None, int] = {}
    cpus: dict[int, int] = {}
    waits: dict[WindowWait | None, int] = {}
    all_totals: dict[tuple[int, int], WaitTotals] = {}
    numbers, of_thread, of_stack, of_link, of_cpu, of_wait = (array("I") for _ in range(6))
    ends, times, values = array("Q"), array("Q"), array("q")
    for number, window in enumerate(windows):
        for profile in window.profiles:
            bare, count = replace(profile, resources=()), profile.sample_count
            origin = len(origins)
            origins.append(Origin(number, window.start_unix_ns, window.end_unix_ns, bare, count))
            for resource, samples, totals in profile.resources:
                owner = resources.setdefault(_identity(resource), len(resources))
                if owner == len(kept):
                    kept.append(resource)
                if totals:
                    earlier = all_totals.get((origin, owner), NO_WAITS)
                    all_totals[origin, owner] = earlier.plus(totals)
                for stack, tid, name, cpu, link, stamps, its_values, labels, wait in samples:
                    numbers.append(origin)
                    thread = Thread(owner, tid, name, labels)
                    of_thread.append(threads.setdefault(thread, len(threads)))
                    of_stack.append(stacks.setdefault(stack, len(stacks)))
                    of_link.append(links.setdefault(link, len(links)))
                    of_cpu.append(cpus.setdefault(cpu, len(cpus)))
                    of_wait.append(waits.setdefault(wait, len(waits)))
                    if its_values and not values:
                        values.extend([1] * len(times))
                    times.extend(stamps)
                    if values or its_values:
                        values.extend(its_values or [1] * len(stamps))
                    ends.append(len(times))
    tables = Tables(
        origins, kept, list(threads), list(stacks), list(links), list(cpus), list(waits), all_totals
    )
    return Samples(
        tables, numbers, of_thread, of_stack, of_link, of_cpu, of_wait, ends, times, values
    )


def _identity(resource: Resource) -> tuple[object, ...]:
    typed = [(key, type(value), value) for key, value in resource.attributes.items()]
    return resource.schema_url, *sorted(typed, key=itemgetter(0))
