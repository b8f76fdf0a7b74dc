"""Keeps recent samples for ``view``, in an SQLite file of bounded size.

Each sample refers to its thread, and to its stack's node in the call tree. The roots of the
tree are process names, and nodes refer to frames. A frame common to many stacks is stored once, as
is each path from the root. The samples table is stored in time order, so that adding samples,
dropping old samples and reading a range need no index.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import (
    FrameRow,
    frame_entries,
    frame_row,
    process_id,
    process_name,
    side_remarks,
    wait_rows,
)
from otel_kprofiler.model import Frame, Profile, RawFrames, Resource, Stack, Window, WindowSample
from otel_kprofiler.text import escape_controls
from otel_kprofiler.viewing.database import NAME, lock, make_directory, open_writer

DEFAULT_KEEP_S: Final = 3600.0
DEFAULT_MAX_BYTES: Final = 512 << 20

CHOICES: Final = (
    "host.name",
    "service.name",
    "k8s.pod.name",
    "container.name",
    "process.executable.name",
)
"""Resource attributes that the page can filter samples by."""
_KEPT_ATTRIBUTES: Final = (*CHOICES, "os.version")

_MAX_CACHED: Final = 50_000
"""Maximum number of cached row numbers, at about 300 bytes each."""
_COLLECTIONS: Final = 10
"""Number of times per retention period that unreferenced rows are removed."""
_MAX_NUMBER: Final = 1 << 53
_MAX_CPU: Final = 1 << 30
_ADD_SAMPLE: Final = "INSERT OR IGNORE INTO samples VALUES (?, ?, ?, ?, ?, ?)"
_COLLECT: Final = """
WITH RECURSIVE live(id) AS (
    SELECT node FROM samples
    UNION SELECT parent FROM nodes JOIN live USING (id) WHERE parent)
DELETE FROM nodes WHERE id NOT IN (SELECT id FROM live);
DELETE FROM frames WHERE id NOT IN (SELECT frame FROM nodes);
DELETE FROM threads WHERE id NOT IN (SELECT thread FROM samples);
DELETE FROM resources WHERE id NOT IN (SELECT resource FROM threads);
DELETE FROM attributes WHERE resource NOT IN (SELECT id FROM resources);
"""

_Row = tuple[int, int, int, int, int, int]


class Added(NamedTuple):
    """Sample counts, by outcome of :meth:`SampleStore.add`.

    Attributes:
        kept: number of samples that were added.
        outdated: number of samples not added because they are older than the retention time, or so
            far in the future that they would never be removed.
        repeated: number of samples that the store already contained. Senders resend requests that
            were not answered.
    """

    kept: int
    outdated: int
    repeated: int


class SampleStore:
    """Keeps samples for a limited time, in a file. Thread-safe.

    Raises ``KProfilerError`` if the file cannot be opened, is in use, or is not a store.

    Args:
        path: path of the file, which is created if missing and kept on close; None for a temporary
            file.
        keep_s: retention time of samples, by their timestamps, in seconds.
        max_bytes: maximum size of the file. The oldest samples are dropped first.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        keep_s: float = DEFAULT_KEEP_S,
        max_bytes: int = DEFAULT_MAX_BYTES,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._keep_ns = round(keep_s * 1e9)
        self._max_bytes = max_bytes
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._ids: dict[tuple[object, ...], int] = {}
        self._own_directory = None if path else make_directory()
        # A temporary file need not survive a kernel crash.
        synchronous = "NORMAL" if path else "OFF"
        self.path = path or os.path.join(self._own_directory or "", NAME)
        try:
            self._lock_fd = lock(self.path)
            try:
                self._database = open_writer(self.path, synchronous)
            except BaseException:
                os.close(self._lock_fd)
                raise
        except BaseException:
            self._remove()
            raise
        self._collected_ns = now_ns()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and remove it if it is temporary."""
        with self._lock:
            self._database.close()
            os.close(self._lock_fd)  # last, because closing it earlier would release SQLite's locks
            self._remove()

    def _remove(self) -> None:
        if self._own_directory:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    def add(self, windows: Iterable[Window]) -> Added:
        """Add samples, and drop samples that are too old or exceed the size limit.

        Raises ``KProfilerError`` if the disk is full or a write fails.
        """
        with self._lock:
            now = self._now_ns()
            oldest, latest = now - self._keep_ns, now + self._keep_ns
            try:
                with self._database:
                    added = self._add(windows, oldest, latest)
                    self._database.execute("DELETE FROM samples WHERE time_ns < ?", (oldest,))
                    self._database.execute("DELETE FROM losses WHERE end_ns < ?", (oldest,))
                self._shrink(now)
            except sqlite3.Error as error:
                self._ids.clear()  # the ids may refer to rows that were rolled back
                raise KProfilerError(
                    f"cannot write {self.path}: {error}",
                    hint="free space on its disk, or choose another path: --store PATH",
                ) from error
            return added

    def _add(self, windows: Iterable[Window], oldest: int, latest: int) -> Added:
        outdated = count = 0
        paths = _Paths(self._frame, lambda *key: self._find_or_add("nodes", "parent, frame", key))
        values: dict[tuple[int, int, int, int, int], int] = {}
        for window in windows:
            for profile in window.profiles:
                kind = self._kind(profile)
                for resource, samples, _ in profile.resources:
                    for *key, value in self._rows(resource, samples, kind, paths):
                        if oldest <= key[0] < latest:
                            # Samples without timestamps have the same identity if they differ only
                            # in their spans.
                            identity = (key[0], key[1], key[2], key[3], key[4])
                            values[identity] = values.get(identity, 0) + value
                            count += 1
                        else:
                            outdated += 1
                lost = sum(profile.lost.values())
                if lost and oldest <= window.end_unix_ns < latest:
                    # All parts of a split window have the same loss counts.
                    self._database.execute(
                        "INSERT OR REPLACE INTO losses VALUES (?, ?, ?, ?)",
                        (window.end_unix_ns, window.start_unix_ns, kind, bounded(lost)),
                    )
        added = self._database.executemany(
            _ADD_SAMPLE, ((*key, value) for key, value in values.items())
        )
        repeated = len(values) - max(0, added.rowcount)
        return Added(count - repeated, outdated, repeated)

    def _rows(
        self, resource: Resource, samples: Iterable[WindowSample], kind: int, paths: _Paths
    ) -> Iterator[_Row]:
        owner = self._resource(resource)
        for sample in samples:
            process = process_name(resource, sample.thread_name)
            thread = self._id(
                "threads",
                "resource, process, pid, name, tid",
                owner, escape_controls(process), process_id(resource),
                escape_controls(sample.thread_name), bounded(sample.tid),
            )  # fmt: skip
            node = paths.leaf(process, sample)
            cpu = max(0, min(sample.cpu, _MAX_CPU))
            values = sample.values or [1] * len(sample.timestamps_unix_ns)
            for moment, value in zip(sample.timestamps_unix_ns, values, strict=True):
                yield moment, thread, node, cpu, kind, bounded(value)

    def _kind(self, profile: Profile) -> int:
        kind = profile.kind
        return self._id(
            "kinds",
            "name, sample_type, sample_unit, period_type, period_unit, period_ns",
            kind.name, kind.sample_type, kind.sample_unit, kind.period_type, kind.period_unit,
            profile.period_ns,
        )  # fmt: skip

    def _resource(self, resource: Resource) -> int:
        text = repr(sorted(resource.attributes.items(), key=itemgetter(0)))
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        is_known = ("resources", digest) in self._ids
        number = self._id("resources", "digest", digest)
        if not is_known:
            rows = [
                (number, name, escape_controls(str(resource.attributes[name])))
                for name in _KEPT_ATTRIBUTES
                if name in resource.attributes
            ]
            self._database.executemany("INSERT OR IGNORE INTO attributes VALUES (?, ?, ?)", rows)
        return number

    def _frame(self, row: FrameRow) -> int:
        key = ("frame", *row)
        frame_id = self._ids.get(key)
        if frame_id is None:
            shown = (escape_controls(value) if isinstance(value, str) else value for value in row)
            frame_id = self._ids[key] = self._id("frames", ", ".join(FrameRow._fields), *shown)
        return frame_id

    def _id(self, table: str, columns: str, *values: Any) -> int:
        key = (table, *values)
        row_id = self._ids.get(key)
        if row_id is None:
            row_id = self._ids[key] = self._find_or_add(table, columns, values)
        return row_id

    def _find_or_add(self, table: str, columns: str, values: Sequence[Any]) -> int:
        find, add = _statements(table, columns)
        if row := self._database.execute(find, values).fetchone():
            return int(row[0])
        return int(self._database.execute(add, values).lastrowid or 0)

    def _shrink(self, now: int) -> None:
        if len(self._ids) > _MAX_CACHED:
            self._ids.clear()
        if now - self._collected_ns > self._keep_ns // _COLLECTIONS:
            self._collect(now)
        while self._used_bytes() > self._max_bytes:
            first, end = read_bounds(self._database)
            if not end:
                break
            limit = first + max(1, (end - first) // 10)
            self._database.execute("DELETE FROM samples WHERE time_ns < ?", (limit,))
            self._database.commit()
            self._collect(now)

    def _collect(self, now: int) -> None:
        self._ids.clear()
        with self._database:
            for statement in _COLLECT.split(";"):
                self._database.execute(statement)
        self._collected_ns = now

    def _used_bytes(self) -> int:
        size, pages, free = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        return int(size * (pages - free))


class _Paths:
    """Locates stacks in the tree during a single :meth:`SampleStore.add`, and caches their nodes.

    ``frame`` returns the row id of a frame. ``node`` returns the row id of the node for a frame
    below a parent node.
    """

    def __init__(self, frame: Callable[[FrameRow], int], node: Callable[[int, int], int]) -> None:
        self._frame = frame
        self._node = node
        self._leaves: dict[tuple[str, Stack], int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._frames: dict[Frame, tuple[int, ...]] = {}

    def leaf(self, process: str, sample: WindowSample) -> int:
        stack = sample.stack
        leaf = self._leaves.get((process, stack))
        if leaf is None:
            leaf = 0
            for frame in (self._frame(FrameRow(process)), *self._path(stack)):
                leaf = self._below(leaf, frame)
            self._leaves[process, stack] = leaf
        for row in wait_rows(sample):
            leaf = self._below(leaf, self._frame(row))
        return leaf

    def _below(self, leaf: int, frame: int) -> int:
        key = leaf, frame
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = self._node(*key)
        return node

    def _path(self, stack: Stack) -> Iterator[int]:
        for side in reversed(stack.sides):
            yield from map(self._frame, map(frame_row, side_remarks(side)))
            is_kept = not isinstance(side.frames, RawFrames)
            for frame in reversed(side.frames):
                numbers = self._frames.get(frame) if is_kept else None
                if numbers is None:
                    numbers = tuple(map(self._frame, map(frame_row, frame_entries(frame))))
                    if is_kept:
                        self._frames[frame] = numbers
                yield from numbers


@cache
def _statements(table: str, columns: str) -> tuple[str, str]:
    names = columns.split(", ")
    which = " AND ".join(f"{name} IS ?" for name in names)
    marks = ", ".join("?" * len(names))
    return (
        f"SELECT id FROM {table} WHERE {which}",  # noqa: S608 - names are our own
        f"INSERT INTO {table} ({columns}) VALUES ({marks})",  # noqa: S608 - our own names
    )


def read_bounds(database: sqlite3.Connection) -> tuple[int, int]:
    """Returns the half-open range of Unix sample times, in ns; (0, 0) if there are no samples."""
    # A single statement for minimum and maximum would scan all samples.
    (first,) = database.execute("SELECT min(time_ns) FROM samples").fetchone()
    (last,) = database.execute("SELECT max(time_ns) FROM samples").fetchone()
    return (0, 0) if first is None else (first, last + 1)


def bounded(number: int) -> int:
    """Clamps a number from a sender to the range that floating point and SQLite support."""
    return max(-_MAX_NUMBER, min(number, _MAX_NUMBER))
