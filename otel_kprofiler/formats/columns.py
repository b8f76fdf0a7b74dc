"""Builds the data for the HTML page: tables of values and of indices into other tables.

``viewer/src/profile.js`` defines the column names. Long columns are packed as a type code of the
:mod:`array` module, a colon, and the little-endian numbers in base64. Browsers read this format ten
times faster than JSON.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from otel_kprofiler.formats.entries import Entry, process_id, process_name, stack_entries
from otel_kprofiler.formats.weights import unit_of
from otel_kprofiler.model import Profile, ProfileKind, Resource, Stack, Window, WindowSample
from otel_kprofiler.text import describe_count, escape_controls

_KINDS: Final = {
    "process": 0,
    "kernel": 1,
    "module": 2,
    "bpf": 3,
    "user": 4,
    "python": 5,
    "wait": 6,
}
"""Frame colors, in the order of KINDS in ``viewer/src/profile.js``."""
_MOST_BINS: Final = 1500
_STEPS: Final = (10, 20, 50, 100, 200, 500)
"""Bin widths below one second, in milliseconds. Wider bins span a whole number of seconds."""
_ROW_BITS: Final = 32


class FrameRow(NamedTuple):
    """A frame as displayed on the page. A row with only a label represents a process.

    Attributes:
        label: name, followed by the line if the function alone does not identify the code.
        module: the module's name, or a Python frame's source file.
        reason: reason for a missing name; empty if there is a name.
        color: a key in ``_KINDS``.
        inlined: 1 if inlined into the preceding frame, otherwise 0.
        file: source file; empty if unknown.
        line: 1-based source line; 0 if unknown.
    """

    label: str
    module: str = ""
    reason: str = ""
    color: str = "process"
    inlined: int = 0
    file: str = ""
    line: int = 0


def frame_row(entry: Entry) -> FrameRow:
    """Returns the row for a stack entry."""
    return FrameRow(
        entry.label,
        entry.module,
        entry.reason,
        entry.color,
        int(entry.inlined),
        entry.file,
        entry.line,
    )


def wait_rows(sample: WindowSample) -> tuple[FrameRow, ...]:
    """Returns a row that shows a wait's cause below the stack; empty if there is no cause."""
    if sample.wait is None or sample.wait.cause is None:
        return ()
    return (FrameRow(f"wait: {sample.wait.cause.label}", color="wait"),)


class Interval(NamedTuple):
    """The windows in a named, half-open interval of Unix time."""

    name: str
    windows: Sequence[Window]
    start_ns: int
    end_ns: int


def columns(windows: Iterable[Window], *, title: str = "") -> dict[str, Any]:
    """Returns the windows' samples as columns for the page, in a JSON-serializable dictionary.

    The windows may come from any hosts, in any order. The host's name, or the number of hosts, is
    appended to ``title``. Counts are in the unit of the sample kind.
    """
    windows = list(windows)
    start = min((window.start_unix_ns for window in windows), default=0)
    end = max((window.end_unix_ns for window in windows), default=0)
    return compared_columns([Interval("", windows, start, end)], title=title)


def compared_columns(intervals: Sequence[Interval], *, title: str = "") -> dict[str, Any]:
    """Returns samples as columns, on a time axis that concatenates the intervals.

    With two intervals, the page shows how the second differs from the first.
    """
    bin_ms = choose_bin_ms(sum(interval.end_ns - interval.start_ns for interval in intervals) / 1e6)
    bin_ns = bin_ms * 1_000_000
    columns = _Columns(window for interval in intervals for window in interval.windows)
    about = _about(intervals)
    axes: list[dict[str, Any]] = []
    bins = 0
    for name, windows, start_ns, end_ns in intervals:
        axis = _Axis(bins, max(1, -(-(end_ns - start_ns) // bin_ns)), start_ns, bin_ns)
        columns.add(windows, axis)
        axes.append({"name": escape_controls(name), "start_ms": start_ns / 1e6, "bins": axis.bins})
        bins += axis.bins
    return {
        "title": about.heading(title),
        "summary": about.text(),
        "hosts": sorted(about.hosts),
        "start_ms": axes[0]["start_ms"],
        "bin_ms": bin_ms,
        "bins": bins,
        **({"parts": axes} if len(axes) > 1 else {}),
        **columns.as_json(),
    }


def choose_bin_ms(span_ms: float) -> int:
    """Returns the bin width for a time axis, in milliseconds; at least 10."""
    least = span_ms / _MOST_BINS
    return next((step for step in _STEPS if step >= least), 1000 * -(-int(least) // 1000))


class About(NamedTuple):
    """Facts about all samples on a page, such as host names, kernel releases and counts.

    ``later`` contains the start and end of each interval after the first.
    """

    hosts: Collection[str]
    kernels: Collection[str]
    samples: int
    cpus: int
    start_ns: int
    end_ns: int
    periods_ns: Collection[int]
    lost: int
    later: Sequence[tuple[int, int]] = ()

    def heading(self, title: str) -> str:
        """Returns a title followed by the host's name or the number of hosts."""
        many = len(self.hosts) > 1
        host = describe_count(len(self.hosts), "host") if many else "".join(self.hosts)
        return escape_controls(" · ".join(filter(None, [title, host])) or "Profile")

    def text(self) -> str:
        """Returns a one-line summary of the profile."""
        if not self.samples:
            return "no samples"
        rates = {round(1e9 / period_ns) for period_ns in self.periods_ns if period_ns}
        parts = [
            *(f"Linux {release}" for release in sorted(self.kernels)[:2]),
            describe_count(self.samples, "sample"),
            describe_count(self.cpus, "CPU"),
            *(_time(*times) for times in ((self.start_ns, self.end_ns), *self.later)),
            *(f"{rate} Hz" for rate in sorted(rates)),
            f"{self.lost:,} lost",
        ]
        return escape_controls(" · ".join(parts))


def _time(start_ns: int, end_ns: int) -> str:
    start = datetime.fromtimestamp(start_ns / 1e9, tz=UTC)
    return f"{(end_ns - start_ns) / 1e9:.1f} s from {start:%Y-%m-%d %H:%M:%S} UTC"


def _about(intervals: Sequence[Interval]) -> About:
    windows = [window for interval in intervals for window in interval.windows]
    profiles = [profile for window in windows for profile in window.profiles]
    times, *later = [(interval.start_ns, interval.end_ns) for interval in intervals]
    resources = [group.resource.attributes for profile in profiles for group in profile.resources]
    return About(
        _values(resources, "host.name"),
        _values(resources, "os.version"),
        sum(map(_count, profiles)),
        len({sample.cpu for profile in profiles for _, sample in profile.samples}),
        *times,
        {profile.period_ns for profile in profiles},
        sum(sum(profile.lost.values()) for profile in profiles),
        later,
    )


def _count(profile: Profile) -> int:
    return profile.weight if profile.kind.counts_samples else profile.sample_count


def _values(resources: Iterable[Any], key: str) -> set[str]:
    return {str(value) for attributes in resources if (value := attributes.get(key))}


class _Axis(NamedTuple):
    first: int
    bins: int
    start_ns: int
    bin_ns: int


class _Columns:
    def __init__(self, windows: Iterable[Window]) -> None:
        self._frames: dict[FrameRow, int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._processes: dict[tuple[str, int | None], int] = {}
        self._threads: dict[tuple[str, int, int], int] = {}
        self._rows: dict[tuple[int, int, int, int], int] = {}
        self._counts: dict[int, int] = {}
        """Sums of values by ``bin << _ROW_BITS | row``, so that sorted keys are in time order."""
        self._leaves: dict[tuple[str, Stack], int] = {}
        self._paths: dict[Stack, tuple[int, ...]] = {}
        self._periods: dict[ProfileKind, set[int]] = {}
        for window in windows:
            for profile in window.profiles:
                self._periods.setdefault(profile.kind, set()).add(profile.period_ns)
        self._kinds = {kind: at for at, kind in enumerate(self._periods)}

    def add(self, windows: Iterable[Window], axis: _Axis) -> None:
        for window in windows:
            for profile in window.profiles:
                kind, factor = self._kinds[profile.kind], self._factor(profile)
                for resource, sample in profile.samples:
                    self._add(self._row(resource, sample, kind), sample, factor, axis)

    def _factor(self, profile: Profile) -> int:
        """Returns a profile's period if its kind has profiles with different periods, else 1."""
        return profile.measure(1) if len(self._periods[profile.kind]) > 1 else 1

    def _row(self, resource: Resource, sample: WindowSample, kind: int) -> int:
        name = process_name(resource, sample.thread_name)
        process = index_of(self._processes, (name, process_id(resource)))
        thread = index_of(self._threads, (sample.thread_name, sample.tid, process))
        leaf = self._stack_leaf(name, sample.stack)
        for row in wait_rows(sample):
            leaf = index_of(self._nodes, (leaf, index_of(self._frames, row)))
        return index_of(self._rows, (leaf, thread, sample.cpu, kind))

    def _add(self, row: int, sample: WindowSample, factor: int, axis: _Axis) -> None:
        counts, (first, bins, start_ns, bin_ns) = self._counts, axis
        for at, time in enumerate(sample.timestamps_unix_ns):
            place = first + min(max(0, (time - start_ns) // bin_ns), bins - 1)
            key = place << _ROW_BITS | row
            value = sample.values[at] if sample.values else 1
            counts[key] = counts.get(key, 0) + value * factor

    def _stack_leaf(self, process: str, stack: Stack) -> int:
        leaf = self._leaves.get((process, stack))
        if leaf is None:
            path = self._paths.get(stack)
            if path is None:
                rows = map(frame_row, stack_entries(stack))
                path = self._paths[stack] = tuple(index_of(self._frames, row) for row in rows)
            root = index_of(self._frames, FrameRow(process))
            leaf = index_of(self._nodes, (-1, root))
            for frame in path:
                leaf = index_of(self._nodes, (leaf, frame))
            self._leaves[process, stack] = leaf
        return leaf

    def as_json(self) -> dict[str, Any]:
        keys = sorted(self._counts)
        rows, mask = list(self._rows), (1 << _ROW_BITS) - 1
        samples = _columns([rows[key & mask] for key in keys], "node", "thread", "cpu", "kind")
        samples |= {
            "bin": [key >> _ROW_BITS for key in keys],
            "count": [self._counts[key] for key in keys],
        }
        return assemble(
            kinds=self._periods,
            frames=self._frames,
            nodes=_columns(list(self._nodes), "parent", "frame"),
            processes=self._processes,
            threads=self._threads,
            samples=samples,
        )


def assemble(
    *,
    kinds: Mapping[ProfileKind, Collection[int]],
    frames: Iterable[FrameRow],
    nodes: dict[str, Sequence[int]],
    processes: Iterable[tuple[str, int | None]],
    threads: Iterable[tuple[str, int, int]],
    samples: dict[str, Sequence[int]],
) -> dict[str, Any]:
    """Builds the page's data: tables of values, and columns of indices into the tables.

    Args:
        kinds: the sampling periods for each sample kind, in nanoseconds.
        frames: rows of the frame table, to which ``nodes`` refer by index.
        nodes: columns ``parent`` (-1 if there is none) and ``frame``.
        processes: name and pid of each process. The pid is None if unknown.
        threads: name, thread id and process index of each thread.
        samples: columns ``node``, ``thread``, ``cpu``, ``kind``, ``bin`` and ``count``. ``samples``
            and ``nodes`` are emptied to save memory.
    """
    strings: dict[str, int] = {"": 0}
    frame_rows = [
        (
            *(index_of(strings, text) for text in (row.label, row.module, row.reason, row.file)),
            _KINDS[row.color],
            row.inlined,
            row.line,
        )
        for row in frames
    ]
    process_rows = [(index_of(strings, name), pid) for name, pid in processes]
    thread_rows = [(index_of(strings, name), tid, process) for name, tid, process in threads]
    return {
        "kinds": [_kind(kind, periods) for kind, periods in kinds.items()],
        "strings": [escape_controls(text) for text in strings],
        "frames": _columns(
            frame_rows, "name", "module", "reason", "file", "kind", "inlined", "line"
        ),
        "nodes": {name: pack(nodes.pop(name)) for name in list(nodes)},
        "processes": _columns(process_rows, "name", "pid"),
        "threads": _columns(thread_rows, "name", "tid", "process"),
        "samples": {name: pack(samples.pop(name)) for name in list(samples)},
    }


def _kind(kind: ProfileKind, periods: Collection[int]) -> dict[str, Any]:
    measure, unit = kind.measure
    if len(periods) == 1:
        (period_ns,) = periods
        unit = unit_of(kind)
        return {"name": kind.name, "unit": unit, "period_ns": period_ns, "measure": measure}
    # The values are times, not numbers of samples.
    return {
        "name": kind.name,
        "unit": unit,
        "period_ns": 0,
        "measure": measure,
        "longest_ns": max(periods, default=0),
    }


def pack(numbers: Sequence[int]) -> str:
    """Packs numbers in the smallest type that suffices: unsigned, signed 32-bit or double."""
    least, most = min(numbers, default=0), max(numbers, default=0)
    limits = (("B", 0, 1 << 8), ("H", 0, 1 << 16), ("I", 0, 1 << 32), ("i", -(1 << 31), 1 << 31))
    fitting = (code for code, low, high in limits if least >= low and most < high)
    packed: array[Any] = array(next(fitting, "d"), numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return f"{packed.typecode}:{b64encode(packed.tobytes()).decode()}"


def index_of(table: dict[Any, int], key: Any) -> int:
    """Returns the index of a row, after adding the row if it is new."""
    return table.setdefault(key, len(table))


def _columns(rows: list[Any], *names: str) -> dict[str, Sequence[Any]]:
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}
