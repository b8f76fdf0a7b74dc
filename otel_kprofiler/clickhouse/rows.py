"""Converts rows, as returned by :func:`queries.samples`, to windows."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.clickhouse.connection import Row
from otel_kprofiler.clickhouse.queries import Range
from otel_kprofiler.clickhouse.stacks import IN_KERNEL, NOT_IN_KERNEL, Stacks
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import (
    AttributeValue,
    Profile,
    ProfileKind,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import (
    BOOLEAN_ATTRIBUTES,
    TYPED_INTEGERS,
    SampleAttributes,
    find_profile_kind,
    read_sample_attributes,
)

MAX_TIMES: Final = 20_000_000
"""Maximum number of timestamps in memory. A timestamp uses 8 bytes, or 16 with a value."""
MAX_ROWS: Final = 2_000_000
"""Maximum number of rows in memory. Each row uses about 500 bytes until it is written or shown."""

_NARROWER: Final = "narrow the query with --from and --to, --service or --process"
_Pairs = tuple[tuple[str, str], ...]


class Kind(NamedTuple):
    """The types, units and period that define a sample kind in the table."""

    sample_type: str
    sample_unit: str
    period_type: str
    period_unit: str
    period: int

    @property
    def kind(self) -> ProfileKind:
        """Returns the sample kind with the given types and units."""
        return find_profile_kind(*self[:4])


class RowReader:
    """Converts blocks of rows to windows. Equal stacks and attributes are stored only once.

    ``times`` is the time range that the windows cover. ``stacks`` maps the stack numbers in the
    rows to stacks; None if the rows contain a kernel-frame flag instead of a stack number. If
    ``has_times`` is False, each row contains only its first and last sample times.
    """

    def __init__(self, times: Range, stacks: Stacks | None, *, has_times: bool) -> None:
        self._times = times
        self._stacks = stacks
        self._has_times = has_times
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._resources: dict[_Pairs, Resource] = {}
        self._attributes: dict[_Pairs, SampleAttributes] = {}
        self._links: dict[tuple[str, str, str], SpanLink | None] = {}
        self._kept = 0
        self._rows = 0

    def window(self, rows: Sequence[Row]) -> Window:
        """Converts a block of rows to a window.

        Raises ``KProfilerError`` if there are too many samples.
        """
        self._rows += len(rows)
        if self._rows > MAX_ROWS:
            raise KProfilerError(
                f"there are more than {MAX_ROWS:,} distinct samples", hint=_NARROWER
            )
        kinds: dict[Kind, dict[int, tuple[Resource, list[WindowSample]]]] = {}
        for row in rows:
            head = tuple(row[:5])
            kind = self._kinds.get(head)
            if kind is None:
                kind = self._kinds[head] = Kind(*head)
            resource = self._resource(row[5])
            groups = kinds.setdefault(kind, {})
            samples = groups.setdefault(id(resource), (resource, []))[1]
            samples.append(self._sample(kind, row))
            self._kept += len(samples[-1].timestamps_unix_ns)
            if self._kept > MAX_TIMES:
                raise KProfilerError(
                    f"there are more than {MAX_TIMES:,} samples that cannot be merged",
                    hint=_NARROWER,
                )
        profiles = [
            Profile(kind.kind, kind.period, [ResourceSamples(*group) for group in groups.values()])
            for kind, groups in kinds.items()
        ]
        return Window(*self._times, profiles)

    def _sample(self, kind: Kind, row: Row) -> WindowSample:
        attributes, stack, trace, span = row[6:10]
        read = self._read(attributes)
        times, values = row[-2:]
        if not self._has_times:
            times, values = _spread(kind, *row[-4:-1])
        return WindowSample(
            self._stack(stack, read),
            read.tid,
            read.thread_name,
            read.cpu,
            self._link(trace, span, read.local_root),
            times,
            values,
            read.labels,
            read.wait,
        )

    def _resource(self, attributes: Mapping[str, str]) -> Resource:
        key = tuple(attributes.items())
        resource = self._resources.get(key)
        if resource is None:
            resource = self._resources[key] = Resource(_typed(key))
        return resource

    def _read(self, attributes: Mapping[str, str]) -> SampleAttributes:
        key = tuple(attributes.items())
        parsed = self._attributes.get(key)
        if parsed is None:
            parsed = self._attributes[key] = read_sample_attributes(_typed(key))
        return parsed

    def _link(self, trace: str, span: str, local_root: str) -> SpanLink | None:
        if not span:
            return None
        key = trace, span, local_root
        link = self._links.get(key)
        if link is None:
            link = SpanLink(bytes.fromhex(trace), bytes.fromhex(span), local_root)
            self._links[key] = link
        return link

    def _stack(self, number: int, read: SampleAttributes) -> Stack:
        if self._stacks is None:
            return IN_KERNEL if number else NOT_IN_KERNEL
        if number not in self._stacks:
            raise KProfilerError("rows were added or removed during the query", hint="try again")
        return self._stacks.get(number, read.statuses)


def _typed(pairs: _Pairs) -> dict[str, AttributeValue]:
    """Converts attribute values, which the table stores as strings, to the attributes' types."""
    typed: dict[str, AttributeValue] = dict(pairs)
    for name, value in pairs:
        if name in TYPED_INTEGERS and value.isdecimal():
            typed[name] = int(value)
        elif name in BOOLEAN_ATTRIBUTES:
            typed[name] = value == "true"
    return typed


def _spread(kind: Kind, count: int, total: int, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Estimates the times and values of merged samples from their count, total and time range."""
    first, last = ends
    number = min(count, 2) if kind.kind.counts_samples else count
    times = [first] * (number - 1) + [last]
    if total == number:
        return times, []
    return times, [total - total // number * (number - 1), *([total // number] * (number - 1))]
