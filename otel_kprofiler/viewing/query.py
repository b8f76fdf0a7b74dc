"""Responds to the page's queries for samples in a time range, in columnar form."""

import json
import sqlite3
import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import About, FrameRow, assemble, choose_bin_ms
from otel_kprofiler.model import ProfileKind
from otel_kprofiler.viewing.database import open_reader
from otel_kprofiler.viewing.server import Query, QueryError
from otel_kprofiler.viewing.store import CHOICES, bounded, read_bounds

_MOST_RESOURCES: Final = 100
_NS_PER_MS: Final = 1_000_000

_COUNTS: Final = """
SELECT thread, kind, count(*) FROM samples WHERE time_ns >= :start AND time_ns < :end
GROUP BY thread, kind
"""
_SAMPLES: Final = """
SELECT time_ns, node, thread, cpu, kind, value FROM samples
WHERE time_ns >= :start AND time_ns < :end ORDER BY time_ns
"""
_NODES: Final = """
WITH RECURSIVE used(id, parent, frame) AS (
    SELECT id, parent, frame FROM nodes WHERE id IN (
        SELECT node FROM samples WHERE time_ns >= :start AND time_ns < :end)
    UNION
    SELECT nodes.id, nodes.parent, nodes.frame FROM used JOIN nodes ON nodes.id = used.parent)
SELECT id, parent, frame FROM used ORDER BY id
"""
_FRAME: Final = f"SELECT {', '.join(FrameRow._fields)} FROM frames WHERE id = ?"  # noqa: S608
_LOST: Final = "SELECT total(lost) FROM losses WHERE end_ns > :start AND start_ns < :end"


class StoreAnswers:
    """Responds to the page's queries, one at a time, while other processes may write to the store.

    :attr:`is_live` states whether new samples may arrive.
    """

    def __init__(self, path: str, *, title: str, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.is_live = True
        self._title = title
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._database = open_reader(path)

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            self._database.close()

    def __call__(self, query: Query) -> Iterator[bytes]:
        """Yields the data as chunks of JSON.

        Raises ``QueryError`` if the resource does not exist, and ``KProfilerError`` if the store
        cannot be read.
        """
        with self._lock:
            try:
                self._database.execute("BEGIN")  # a consistent snapshot
                try:
                    data = self._read(query)
                finally:
                    self._database.rollback()
            except sqlite3.Error as error:
                raise KProfilerError(f"the store cannot be read: {error}") from error
            yield from _encode(data)

    def names_file(self, path: str) -> bool:
        """Returns whether any stored frame belongs to the given source file."""
        with self._lock:
            try:
                row = self._database.execute("SELECT 1 FROM frames WHERE file = ?", (path,))
                return row.fetchone() is not None
            except sqlite3.Error as error:
                raise KProfilerError(f"the store cannot be read: {error}") from error

    def _read(self, query: Query) -> dict[str, Any]:
        bounds = read_bounds(self._database)
        span = _span(query, *bounds, self._now_ns())
        content = _Content(self._database, span, query.resource)
        about = content.about()
        return {
            "title": about.heading(self._title),
            "summary": about.text(),
            "hosts": sorted(about.hosts),
            "start_ms": span.start_ns // span.bin_ns * span.bin_ns // _NS_PER_MS,
            "bin_ms": span.bin_ns // _NS_PER_MS,
            "bins": -(-span.end_ns // span.bin_ns) - span.start_ns // span.bin_ns,
            "live": self.is_live,
            "resources": content.resources(),
            "available": {"from_ms": bounds[0] / _NS_PER_MS, "to_ms": bounds[1] / _NS_PER_MS},
            **content.columns(),
        }


class _Span(NamedTuple):
    """A time range, and the width of its bins. Bins start at multiples of their width."""

    start_ns: int
    end_ns: int
    bin_ns: int


def _span(query: Query, first_ns: int, end_ns: int, now_ns: int) -> _Span:
    start_ns = first_ns
    if query.last_s is not None:
        start_ns, end_ns = now_ns - round(query.last_s * 1e9), now_ns
    if query.start_ms is not None:
        start_ns = _ns(query.start_ms)
    if query.end_ms is not None:
        end_ns = _ns(query.end_ms)
    end_ns = max(start_ns + 1, end_ns)
    return _Span(start_ns, end_ns, choose_bin_ms((end_ns - start_ns) / _NS_PER_MS) * _NS_PER_MS)


def _ns(moment_ms: float) -> int:
    """Converts milliseconds to nanoseconds, without loss of precision."""
    whole = int(moment_ms)
    return whole * _NS_PER_MS + round((moment_ms - whole) * _NS_PER_MS)


class _Thread(NamedTuple):
    resource: int
    process: str
    pid: int | None
    name: str
    tid: int


class _Content:
    """The samples in a time range. Raises ``QueryError`` if the resource does not exist.

    ``database`` must be in a transaction. An empty ``resource`` selects all resources.
    """

    def __init__(self, database: sqlite3.Connection, span: _Span, resource: str) -> None:
        self._database = database
        self._span = span
        self._values = {"start": span.start_ns, "end": span.end_ns}
        counts = database.execute(_COUNTS, self._values).fetchall()
        samples = Counter[int]()
        for thread, _, count in counts:
            samples[thread] += count
        self._threads = {number: self._thread(number) for number in samples}
        attributes = self._read_attributes()
        self._attributes = Counter[tuple[str, str]]()
        for thread, count in samples.items():
            for pair in attributes[self._threads[thread].resource]:
                self._attributes[pair] += count
        self._chosen = set(samples)
        if resource:
            name, _, value = resource.partition("=")
            if name not in CHOICES:
                raise QueryError(f"there is no resource {resource[:100]}")
            self._chosen = {
                number
                for number in samples
                if (name, value) in attributes[self._threads[number].resource]
            }
        chosen = [row for row in counts if row[0] in self._chosen]
        self._number = sum(count for _, _, count in chosen)
        self._of_chosen = {
            pair for number in self._chosen for pair in attributes[self._threads[number].resource]
        }
        self._kinds, self._periods = self._read_kinds({kind for _, kind, _ in chosen})
        self._cpus: set[int] = set()
        self._columns = self._read_columns()

    def about(self) -> About:
        names: dict[str, list[str]] = {"host.name": [], "os.version": []}
        for name, value in sorted(self._of_chosen):
            names.get(name, []).append(value)
        (lost,) = self._database.execute(_LOST, self._values).fetchone()
        return About(
            names["host.name"],
            names["os.version"],
            self._number,
            len(self._cpus),
            *self._span[:2],
            {period for periods in self._periods.values() for period in periods},
            int(lost),
        )

    def resources(self) -> list[dict[str, Any]]:
        attributes = sorted(self._attributes.items(), key=lambda pair: (-pair[1], pair[0]))
        choices = [
            {"id": f"{name}={value}", "name": f"{name} {value}", "samples": count}
            for (name, value), count in attributes
            if name in CHOICES
        ]
        return choices[:_MOST_RESOURCES]

    def columns(self) -> dict[str, Any]:
        processes: dict[tuple[str, int | None], int] = {}
        threads = []
        for number in self._chosen:
            thread = self._threads[number]
            process = processes.setdefault((thread.process, thread.pid), len(processes))
            threads.append((thread.name, thread.tid, process))
        nodes, frames = self._read_nodes()
        return assemble(
            kinds=self._periods,
            frames=frames,
            nodes=nodes,
            processes=processes,
            threads=threads,
            samples=self._columns,
        )

    def _thread(self, number: int) -> _Thread:
        query = "SELECT resource, process, pid, name, tid FROM threads WHERE id = ?"
        return _Thread(*self._database.execute(query, (number,)).fetchone())

    def _read_attributes(self) -> dict[int, list[tuple[str, str]]]:
        query = "SELECT name, value FROM attributes WHERE resource = ?"
        resources = {thread.resource for thread in self._threads.values()}
        return {
            resource: self._database.execute(query, (resource,)).fetchall()
            for resource in resources
        }

    def _read_kinds(
        self, wanted: set[int]
    ) -> tuple[dict[int, tuple[ProfileKind, int]], dict[ProfileKind, set[int]]]:
        numbers: dict[int, tuple[ProfileKind, int]] = {}
        periods: dict[ProfileKind, set[int]] = {}
        for number, *texts, period_ns in self._database.execute("SELECT * FROM kinds ORDER BY id"):
            if number in wanted:
                kind = ProfileKind(*texts)
                numbers[number] = kind, period_ns
                periods.setdefault(kind, set()).add(period_ns)
        return numbers, periods

    def _read_columns(self) -> dict[str, Sequence[int]]:
        """Reads samples with their stack node ids. Identical samples in a bin are merged."""
        order = list(self._periods)
        kinds, factors = {}, {}
        for number, (kind, period_ns) in self._kinds.items():
            kinds[number] = order.index(kind)
            factors[number] = (period_ns or 1) if len(self._periods[kind]) > 1 else 1
        threads = {number: at for at, number in enumerate(self._chosen)}
        nodes, places, counts = array("Q"), array("I"), array("q")
        of_thread, cpus, of_kind = array("I"), array("i"), array("I")
        sums: dict[tuple[int, int, int, int], int] = {}

        def flush(place: int) -> None:
            for (node, thread, cpu, kind), count in sums.items():
                nodes.append(node)
                of_thread.append(threads[thread])
                cpus.append(cpu)
                of_kind.append(kinds[kind])
                places.append(place)
                counts.append(bounded(int(count) * factors[kind]))
            sums.clear()

        bin_ns, chosen = self._span.bin_ns, self._chosen
        first = current = self._span.start_ns // bin_ns
        for time_ns, node, thread, cpu, kind, value in self._database.execute(
            _SAMPLES, self._values
        ):
            place = time_ns // bin_ns
            if place != current:
                flush(current - first)
                current = place
            if thread in chosen:
                key = (node, thread, cpu, kind)
                sums[key] = sums.get(key, 0) + value
        flush(current - first)
        self._cpus = set(cpus)
        return {
            "node": nodes,
            "thread": of_thread,
            "cpu": cpus,
            "kind": of_kind,
            "bin": places,
            "count": counts,
        }

    def _read_nodes(self) -> tuple[dict[str, Sequence[int]], list[FrameRow]]:
        """Reads the nodes and their frames, and renumbers the nodes in the samples' columns."""
        ids, parents, of_frame = array("Q"), array("i"), array("I")
        frames: dict[int, int] = {}
        for number, parent, frame in self._database.execute(_NODES, self._values):
            # A parent's id is lower than its children's, so the parent has already been read.
            parents.append(bisect_left(ids, parent) if parent else -1)
            of_frame.append(frames.setdefault(frame, len(frames)))
            ids.append(number)
        samples = self._columns["node"]
        leaves = {leaf: bisect_left(ids, leaf) for leaf in set(samples)}
        self._columns["node"] = array("I", [leaves[leaf] for leaf in samples])
        nodes = [
            FrameRow(*self._database.execute(_FRAME, (number,)).fetchone()) for number in frames
        ]
        return {"parent": parents, "frame": of_frame}, nodes


def _encode(data: dict[str, Any]) -> Iterator[bytes]:
    """Encodes an object as JSON, emptying the object along the way to save memory."""
    separator = b"{"
    for name in list(data):
        value = data.pop(name)
        yield separator + json.dumps(name).encode() + b":"
        if isinstance(value, dict):
            yield from _encode(value)
        else:
            yield json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
        separator = b","
    yield b"{}" if separator == b"{" else b"}"
