"""Benchmarks the `view` store with an hour of samples (two CPUs, 99 Hz, 20,000 distinct stacks).

The store is compared with a bare table of samples in SQLite, and in DuckDB if installed. The
benchmark measures the cost of adding five-second batches, and of reading one minute and the whole
hour with equal samples grouped. Each engine runs in a separate process, whose memory usage is
measured.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from benchmarks.rows import Row
from otel_kprofiler.model import (
    ON_CPU,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.viewing import Query, SampleStore, StoreAnswers

_SECOND = 10**9
_WINDOW_S, _PER_WINDOW, _STACKS, _PROCESSES = 5, 990, 20_000, 60
_Part = list[tuple[int, int, int, int, int, int]]
_SCHEMA = "CREATE TABLE samples (time_ns BIGINT, thread INT, node INT, cpu INT, kind INT, value INT"
_GROUPS = """
SELECT (time_ns - {start}) // {width} AS bin, node, thread, cpu, kind, sum(value) FROM samples
WHERE time_ns >= {start} AND time_ns < {end} GROUP BY ALL
"""


def rows(quick: bool) -> Iterator[Row]:
    seconds = 600 if quick else 3600
    engines = ["store", "sqlite", *(["duckdb"] if find_spec("duckdb") else [])]
    measured = {engine: _run(engine, seconds) for engine in engines}
    names = {"add": "adding 5 s", "minute": "reading a minute", "hour": f"reading {seconds} s"}
    count = seconds // _WINDOW_S * _PER_WINDOW
    for engine, values in measured.items():
        what = {"store": "the store", "sqlite": "samples alone, SQLite"}.get(
            engine, "samples alone, DuckDB"
        )
        for key, name in names.items():
            yield Row(f"{what}: {name}", f"{values[key] * 1000:,.0f} ms")
        yield Row(f"{what}: file of {count:,} samples", f"{values['bytes'] / 1e6:.0f} MB")
        goal = "<= 150 MB" if engine == "store" else ""
        yield Row(f"{what}: memory", f"{values['peak'] / 1e6:.0f} MB", goal=goal)


def _run(engine: str, seconds: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_view_store", engine, str(seconds)],
        stdout=subprocess.PIPE,
        check=True,
    )
    values: dict[str, float] = json.loads(done.stdout)
    return values


def _measure(engine: str, seconds: int) -> dict[str, float]:
    end = time.time_ns()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        path = os.path.join(directory, "x.db")
        measure = {"store": _store, "sqlite": _sqlite, "duckdb": _duckdb}[engine]
        values = measure(path, end - seconds * _SECOND, end)
        values["bytes"] = sum(entry.stat().st_size for entry in os.scandir(directory))
    values["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return values


def _store(path: str, start: int, end: int) -> dict[str, float]:
    make, spent = _maker(), []
    with SampleStore(path, keep_s=2 * (end - start) / _SECOND) as store:
        for at in range(start, end, _WINDOW_S * _SECOND):
            window = make(at)
            spent.append(_time(lambda window=window: store.add([window])))
        answers = StoreAnswers(path, title="")
        minute, hour = (
            _time(lambda query=query: sum(map(len, answers(query))))
            for query in (Query((end - 60 * _SECOND) / 1e6, end / 1e6), Query())
        )
        answers.close()
    return {"add": sum(spent) / len(spent), "minute": minute, "hour": hour}


def _maker() -> Callable[[int], Window]:
    """Returns a function that generates windows with a few frequent stacks and many rare ones."""
    choose = random.Random(1)
    modules = [
        Module(f"lib{number}.so", ModuleKind.USER, None, FileId(""), 0) for number in range(50)
    ]
    frames = [
        Frame(modules[at % 50], at * 16, (Line(f"function_number_{at}"),), 0, USER_SIDE)
        for at in range(10_000)
    ]
    trunks = [choose.sample(frames, choose.randrange(10, 35)) for _ in range(800)]
    stacks = [
        Stack.from_frames([*choose.sample(frames[:1500], 5), *choose.choice(trunks)])
        for _ in range(_STACKS)
    ]
    resources = [
        Resource({"host.name": "web-1", "process.pid": at, "process.executable.name": f"p{at}"})
        for at in range(_PROCESSES)
    ]

    def make(start: int) -> Window:
        results: dict[tuple[int, int], list[int]] = {}
        for number in range(_PER_WINDOW):
            stack = min(_STACKS - 1, int(choose.expovariate(5 / _STACKS)))
            results.setdefault((stack, number % 2), []).append(start + number * 5_000_000)
        groups: dict[int, list[WindowSample]] = {}
        for (stack, cpu), times in results.items():
            process = stack % _PROCESSES
            sample = WindowSample(stacks[stack], process, "main", cpu, None, times)
            groups.setdefault(process, []).append(sample)
        kept = [ResourceSamples(resources[at], samples) for at, samples in groups.items()]
        end = start + _WINDOW_S * _SECOND
        return Window(start, end, [Profile(ON_CPU, 10_101_010, kept)])

    return make


def _parts(start: int, end: int) -> Iterator[_Part]:
    choose = random.Random(1)
    for at in range(start, end, _WINDOW_S * _SECOND):
        nodes = [int(choose.expovariate(5 / _STACKS)) for _ in range(_PER_WINDOW)]
        yield [
            (at + number * 5_000_000, node % _PROCESSES, node, number % 2, 1, 1)
            for number, node in enumerate(nodes)
        ]


def _sqlite(path: str, start: int, end: int) -> dict[str, float]:
    import sqlite3  # noqa: PLC0415 - for its memory alone

    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    key = ", PRIMARY KEY (time_ns, thread, node, cpu, kind)) WITHOUT ROWID"
    database.execute(_SCHEMA + key)

    def add(part: _Part) -> None:
        with database:
            database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?)", part)

    groups = _GROUPS.replace("//", "/").replace("ALL", "bin, node, thread, cpu, kind")
    return _engine(add, lambda query: sum(1 for _ in database.execute(query)), groups, start, end)


def _duckdb(path: str, start: int, end: int) -> dict[str, float]:
    import duckdb  # noqa: PLC0415 - may be missing

    database = duckdb.connect(path, config={"threads": 1, "memory_limit": "100MB"})
    database.execute(f"{_SCHEMA})")

    def add(part: _Part) -> None:  # the fastest insert without Arrow or pandas
        values = ",".join(map(str, part))
        database.execute(f"INSERT INTO samples VALUES {values}")

    def read(query: str) -> int:
        result, count = database.execute(query), 0
        while part := result.fetchmany(10_000):
            count += len(part)
        return count

    values = _engine(add, read, _GROUPS, start, end)
    database.execute("CHECKPOINT")
    return values


def _engine(
    add: Callable[[_Part], None], read: Callable[[str], int], groups: str, start: int, end: int
) -> dict[str, float]:
    spent = [_time(lambda part=part: add(part)) for part in _parts(start, end)]
    minute, hour = (
        _time(lambda first=first, width=width: read(
            groups.format(start=first, end=end, width=width)
        ))
        for first, width in ((end - 60 * _SECOND, _SECOND // 20), (start, 3 * _SECOND))
    )  # fmt: skip
    return {"add": sum(spent) / len(spent), "minute": minute, "hour": hour}


def _time(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
