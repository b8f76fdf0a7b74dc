"""Reads samples from a ClickHouse table. The server merges identical samples."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from otel_kprofiler.analysis import Filter, Origin, Samples, load_samples, matcher
from otel_kprofiler.clickhouse import queries
from otel_kprofiler.clickhouse.address import Address
from otel_kprofiler.clickhouse.conditions import filter_conditions, identifier
from otel_kprofiler.clickhouse.connection import Connection
from otel_kprofiler.clickhouse.need import Need
from otel_kprofiler.clickhouse.queries import Range
from otel_kprofiler.clickhouse.rows import Kind, RowReader
from otel_kprofiler.clickhouse.stacks import Stacks
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import KINDS, Profile, Window
from otel_kprofiler.otlp import parse_account, refuse_negative_values

MAX_STACKS: Final = 1_000_000
"""Maximum number of distinct stacks in memory. Each stack uses about a kilobyte."""
EXACT_TIMES: Final = 2_000_000
"""Maximum number of samples read with exact times. Larger results are merged by time step."""
_STEPS: Final = 1200
"""Number of time steps, a multiple of the intervals in ``diff``. Pages have about as many bins."""


class Selection(NamedTuple):
    """The filter and the time range of the samples to read."""

    chosen: Filter
    times: Range


class _Found(NamedTuple):
    samples: int
    start_ns: int
    end_ns: int


class ProfileStore:
    """A ClickHouse table of profiles; not thread-safe.

    Raises ``DependencyError`` if the client library is not installed, and ``KProfilerError`` if the
    server does not respond.
    """

    def __init__(self, address: Address) -> None:
        self._table = f"{identifier(address.database)}.{identifier(address.table)}"
        self._connection = Connection(address)

    def close(self) -> None:
        """Close the connection to the server."""
        self._connection.close()

    def first_unix_ns(self) -> int:
        """Returns the Unix time of the first sample; 0 if there is none.

        Raises ``KProfilerError`` if the table cannot be read.
        """
        rows = self._connection.rows(queries.first_time(self._table))
        return next((int(row[0]) for row in rows), 0)

    def read(self, selection: Selection, need: Need, report: Callable[[str], None]) -> Samples:
        """Reads the selected samples, and possibly samples that do not match the filter.

        The samples form one window that covers all profiles, or several if the period changed. If
        samples are merged by time step, ``report`` is called with a message for the user. Raises
        ``KProfilerError`` if the table cannot be read, or the samples do not fit into memory.
        """
        chosen, times = selection
        rows = queries.rows_between(self._table, times)
        conditions = list(filter_conditions(chosen, rows))
        extents = self._find(rows, conditions, selection)
        if not extents:
            return load_samples(())
        conditions.append(queries.is_kind(extents))
        start = max(times.start_ns, min(extent.start_ns for extent in extents.values()))
        end = max(start + 1, min(times.end_ns, max(extent.end_ns for extent in extents.values())))
        count, step = sum(extent.samples for extent in extents.values()), None
        if need.times and count > EXACT_TIMES:
            step = max(1, -(-(end - start) // _STEPS))
            report(f"{count:,} samples: timestamps are rounded to steps of {step / 1e9:.3g} s")
        stacks = self._stacks(queries.stacks(rows, conditions, times)) if need.stacks else None
        reader = RowReader(Range(start, end), stacks, has_times=need.times and not step)
        query = queries.samples(rows, conditions, times, need, step)
        samples = load_samples(_refuse_negative(map(reader.window, self._connection.blocks(query))))
        counted = {
            Kind(*kind): counts
            for *kind, counts in self._connection.rows(queries.accounts(rows, extents))
        }
        return _as_one_window(samples, list(extents), counted, Range(start, end))

    def _find(
        self, rows: str, conditions: Sequence[str], selection: Selection
    ) -> dict[Kind, _Found]:
        query = queries.totals(rows, conditions, selection.times)
        extents = {
            Kind(*kind): _Found(*counts)
            for *kind, count, start, end in self._connection.rows(query)
            for counts in [(int(count), int(start), int(end))]
        }
        named = matcher(selection.chosen.kinds or ["*"])
        kinds = sorted((kind for kind in extents if named(kind.kind.name)), key=_order)
        return {kind: extents[kind] for kind in kinds}

    def _stacks(self, query: str) -> Stacks:
        stacks = Stacks()
        for row in self._connection.rows(query):
            stacks.add(row[0], row[1:])
            if len(stacks) > MAX_STACKS:
                raise KProfilerError(
                    f"there are more than {MAX_STACKS:,} different stacks",
                    hint="narrow the query with --from and --to, --service or --process",
                )
        return stacks


def _refuse_negative(windows: Iterable[Window]) -> Iterator[Window]:
    for window in windows:
        refuse_negative_values((window,))
        yield window


def _order(kind: Kind) -> tuple[int, Kind]:
    """Returns a sort key that places the kinds in ``KINDS`` first, in the order of ``KINDS``."""
    profile_kind = kind.kind
    return (KINDS.index(profile_kind) if profile_kind in KINDS else len(KINDS)), kind


def _as_one_window(
    samples: Samples,
    kinds: Sequence[Kind],
    counted: Mapping[Kind, Mapping[str, int]],
    times: Range,
) -> Samples:
    numbers = {(kind.kind, kind.period): number for number, kind in enumerate(kinds)}
    origins = [
        numbers[origin.profile.kind, origin.profile.period_ns] for origin in samples.tables.origins
    ]
    column = array("I", [origins[origin] for origin in samples.origins])
    sizes = [0] * len(kinds)
    for number, (start, end) in zip(column, samples.spans(), strict=True):
        sizes[number] += end - start
    merged: list[Origin] = []
    for kind, size in zip(kinds, sizes, strict=True):
        account = parse_account(counted.get(kind, {}))
        # A window has at most one profile per kind.
        window = sum(origin.profile.kind == kind.kind for origin in merged)
        profile = Profile(kind.kind, kind.period, (), account.taken, account.lost)
        merged.append(Origin(window, *times, profile, size))
    tables = samples.tables._replace(origins=merged)
    return replace(samples, origins=column, tables=tables)
