"""The Firefox Profiler opens the exported profiles, which contain all samples, waits and spans."""

import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from otel_kprofiler.formats import firefox
from otel_kprofiler.formats.firefox_tables import _breakpad_id
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    USER_SIDE,
    BuildId,
    FileId,
    Frame,
    Line,
    LossCause,
    Module,
    ModuleKind,
    Profile,
    ProfileKind,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    Unresolved,
    WaitCause,
    WaitState,
    Window,
    WindowSample,
    WindowWait,
    WindowWaker,
)
from tests import npm

PACKAGES = Path(__file__).parents[2] / "data" / "firefox_profiler"
MS = 1_000_000
START = 1_700_000_000_000 * MS
SHOP = Resource({"process.pid": 7, "process.executable.name": "shop"})
FILE = Module("libshop.so", ModuleKind.USER, BuildId("0123456789abcdef" * 2), FileId("1" * 32), 0)
MAIN = Frame(
    FILE, 0x1010, (Line("inner"), Line("main", file="/src/shop.c", line=12)), 16, USER_SIDE
)
NAMELESS = Frame(FILE, 0x2000, (), 0, USER_SIDE, Unresolved.NO_SYMBOL_TABLE)
READ = Frame(None, 1, (Line("vfs_read"),), 0, KERNEL_SIDE)
SPAN = SpanLink(b"t" * 16, b"s" * 8, "GET /")
FAULTS = ProfileKind("page_faults", "page_faults", "count")


def stack(*frames):
    return Stack.from_frames(frames)


def at(*milliseconds):
    return [START + ms * MS for ms in milliseconds]


def wait(state, cause, ms, **more):
    return WindowSample(
        stack(READ, MAIN), 7, "shop", 0, None, at(ms), [more.pop("value")],
        wait=WindowWait(state, cause, **more),
    )  # fmt: skip


@pytest.fixture
def windows():
    """Returns windows: thread 7 runs, waits and takes page faults, and thread 8 runs in a span."""
    cpu = [
        WindowSample(stack(READ, MAIN), 7, "shop", 0, None, at(60, 10, 20)),
        WindowSample(stack(NAMELESS, MAIN), 8, "worker", 1, SPAN, at(10, 20)),
        WindowSample(stack(MAIN), 8, "worker", 1, None, at(30)),
    ]
    waker = WindowWaker(7, 8, "worker")
    waits = [
        wait(WaitState.INTERRUPTIBLE, WaitCause.PIPE, 50, value=20 * MS, waker=waker),
        wait(WaitState.RUNNABLE, WaitCause.RUN_QUEUE, 50, value=5 * MS),
        wait(WaitState.INTERRUPTIBLE, WaitCause.FUTEX, 55, value=2 * MS),
    ]
    faults = [WindowSample(stack(MAIN), 7, "shop", 0, None, at(12), [3])]
    return [
        Window(START, START + 100 * MS, [
            Profile(ON_CPU, 10 * MS, [ResourceSamples(SHOP, cpu)], 7, {LossCause.RING_FULL: 1}),
            Profile(OFF_CPU, 0, [ResourceSamples(SHOP, waits)], threshold_ns=2 * MS),
            Profile(FAULTS, 0, [ResourceSamples(SHOP, faults)]),
        ]),
    ]  # fmt: skip


@pytest.fixture
def document(windows):
    return json.loads(firefox(windows))


def names(document, index):
    """Returns the functions in a stack, outermost first."""
    shared, result = document["shared"], []
    while index is not None:
        func = shared["frameTable"]["func"][shared["stackTable"]["frame"][index]]
        result.insert(0, shared["stringArray"][shared["funcTable"]["name"][func]])
        offset = shared["stackTable"]["prefixOffset"][index]
        index = index - offset if offset else None
    return result


def test_each_thread_has_one_time_ordered_track_per_sample_kind(document):
    tracks = {
        thread["name"]: (
            thread["pid"], thread["isMainThread"], thread["samples"]["weightType"],
            [
                (time, weight, names(document, index)[-1])
                for time, weight, index in zip(
                    *(thread["samples"][name] for name in ("time", "weight", "stack")), strict=True
                )
                if index is not None
            ],
        )
        for thread in document["threads"]
    }  # fmt: skip
    assert tracks == {
        "shop": (
            "7", True, "tracing-ms",
            [(10, 10, "vfs_read"), (20, 10, "vfs_read"), (60, 10, "vfs_read")],
        ),
        "shop off_cpu": (
            "7", False, "tracing-ms",
            [(50, 20, "vfs_read"), (50, 5, "vfs_read"), (55, 2, "vfs_read")],
        ),
        "shop page_faults": ("7", False, "samples", [(12, 3, "inner")]),
        "worker": (
            "7", False, "tracing-ms",
            [(10, 10, "[libshop.so+0x2000]"), (20, 10, "[libshop.so+0x2000]"), (30, 10, "inner")],
        ),
    }  # fmt: skip
    assert len({thread["tid"] for thread in document["threads"]}) == 4


def test_off_cpu_time_appears_as_a_gap_in_the_cpu_track(document):
    """The Firefox Profiler divides a sample's CPU time by the time since the previous sample."""
    samples = document["threads"][0]["samples"]
    assert samples["time"] == [0, 10, 20, 50, 60]
    assert [index is None for index in samples["stack"]] == [True, False, False, True, False]
    assert samples["threadCPUDelta"] == [0, 10 * MS, 10 * MS, 0, 10 * MS]


def test_waits_and_spans_are_shown_as_markers_on_their_threads_first_track(document):
    strings = document["shared"]["stringArray"]
    shown = {}
    for thread in document["threads"]:
        table = thread["markers"]
        shown[thread["name"]] = [
            (strings[name], start, end, data)
            for name, start, end, data in zip(
                *(table[name] for name in ("name", "startTime", "endTime", "data")), strict=True
            )
        ]
    causes = [(name, start, end, data.get("waker")) for name, start, end, data in shown["shop"]]
    assert causes == [
        ("wait: pipe", 25, 45, "worker (8)"),
        ("wait: run_queue", 45, 50, None),
        ("wait: futex", 55, None, None),  # sampled at random, so its duration is unknown
    ]
    assert names(document, shown["shop"][0][3]["cause"]["stack"]) == ["main", "inner", "vfs_read"]
    ((name, start, end, data),) = shown["worker"]
    assert (name, start, end, data["endpoint"]) == ("span", 10, 20, "GET /")
    assert data["trace"] == SPAN.trace_id.hex()
    assert shown["shop off_cpu"] == shown["shop page_faults"] == []


def test_waits_below_the_sampling_threshold_are_exported_as_markers_without_an_end_time(windows):
    """Equal sample values indicate waits shorter than the sampling threshold at the time."""
    two = [
        wait(WaitState.INTERRUPTIBLE, WaitCause.PIPE, ms, value=9 * MS) for ms in (30, 40)
    ]  # fmt: skip
    profile = Profile(OFF_CPU, 0, [ResourceSamples(SHOP, two)], threshold_ns=2 * MS)
    (thread,) = json.loads(firefox([Window(START, START + 100 * MS, [profile])]))["threads"]
    assert thread["markers"]["endTime"] == [None, None]


def test_frames_contain_their_address_line_and_build_id(document):
    (lib,) = document["libs"]
    assert (lib["name"], lib["codeId"]) == ("libshop.so", FILE.build_id)
    assert lib["breakpadId"] == "67452301AB89EFCD0123456789ABCDEF0"
    shared = document["shared"]
    frames, symbols = shared["frameTable"], shared["nativeSymbols"]
    rows = {
        shared["stringArray"][shared["funcTable"]["name"][func]]: row
        for func, *row in zip(
            *(frames[name] for name in ("func", "address", "lib", "inlineDepth", "line")),
            strict=True,
        )
    }
    assert rows["main"] == [0x1010, 0, 0, 12]
    assert rows["inner"] == [0x1010, 0, 1, None]
    assert rows["vfs_read"] == [-1, -1, 0, None]
    assert symbols["address"] == [0x1000]


def test_the_profile_info_lists_totals_losses_and_unnamed_frames(document):
    entries = {
        section["label"]: {entry["label"]: entry["value"] for entry in section["entries"]}
        for section in document["meta"]["extra"]
    }
    assert entries == {
        "Samples": {"off_cpu (nanoseconds)": 27 * MS, "on_cpu (samples)": 6,
                    "page_faults (events)": 3},
        "Lost samples": {"on_cpu: ring_full": 1},
        "Samples with missing or unnamed frames": {"no symbol table for the module": 2},
    }  # fmt: skip


def test_different_programs_with_the_same_pid_are_shown_as_separate_processes(windows):
    other = Resource({"process.pid": 7, "process.executable.name": "other"})
    sample = WindowSample(stack(MAIN), 7, "other", 0, None, at(90))
    window = Window(START, START + 100 * MS, [
        Profile(ON_CPU, MS, [ResourceSamples(SHOP, [sample]), ResourceSamples(other, [sample])])
    ])  # fmt: skip
    threads = json.loads(firefox([window]))["threads"]
    results = [(thread["pid"], thread["processName"]) for thread in threads]
    assert results == [("7", "shop"), ("7.1", "other")]


class Reader:
    """The Firefox Profiler's command-line tool, which shares code with its web page."""

    def __init__(self, directory):
        place = npm.install(PACKAGES, "firefox-profiler")
        script = "node_modules/@firefox-devtools/profiler-cli/dist/profiler-cli.js"
        self._command = [npm.node(place), place / script]
        self._environ = os.environ | {"HOME": str(directory), "XDG_CONFIG_HOME": str(directory)}

    def run(self, *words):
        command, until = [*self._command, *words], time.monotonic() + 60
        while True:
            done = subprocess.run(
                command, env=self._environ, capture_output=True, text=True, timeout=120
            )
            if "retrying often works" not in done.stderr:
                break
            if time.monotonic() > until:
                pytest.skip("this machine is too busy: the daemon has half a second to start")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def read(self, *words):
        return json.loads(self.run(*words, "--json"))


@pytest.fixture
def reader(tmp_path):
    reader = Reader(tmp_path)
    yield reader
    reader.run("stop", "--all")


@pytest.mark.system
def test_the_firefox_profiler_reads_the_profile(reader, windows, tmp_path):
    path = tmp_path / "x.firefox.json"
    path.write_text(firefox(windows))
    reader.run("load", str(path))

    meta = reader.read("profile", "meta")
    assert [section["label"] for section in meta["extra"]][:2] == ["Samples", "Lost samples"]
    (process,) = reader.read("profile", "info", "--all")["processes"]
    assert (process["pid"], process["name"], process["cpuMs"]) == ("7", "shop", 60)
    handles = {thread["name"]: thread["threadHandle"] for thread in process["threads"]}
    totals = {}
    for name, handle in handles.items():
        samples = reader.read("thread", "samples", "--thread", handle, "--include-idle")
        totals[name] = Counter({
            row["nameWithLibrary"].rpartition("!")[2]: row["selfSamples"]
            for row in samples["topFunctionsBySelf"] if row["selfSamples"]
        })  # fmt: skip
    assert totals == {
        "shop": {"vfs_read": 30},
        "shop off_cpu": {"vfs_read": 27},
        "shop page_faults": {"inner": 3},
        "worker": {"[libshop.so+0x2000]": 20, "inner": 10},
    }
    markers = reader.read("thread", "markers", "--thread", handles["shop"], "--list")
    results = {kind["markerName"]: kind["count"] for kind in markers["byType"]}
    assert results == {"wait: pipe": 1, "wait: run_queue": 1, "wait: futex": 1}


@pytest.mark.parametrize(
    ("build_id", "breakpad_id"),
    [
        ("00112233445566778899aabbccddeeff01234567", "33221100554477668899AABBCCDDEEFF0"),
        ("go:8Yz/-x", ""),
        ("", ""),
    ],
)
def test_a_breakpad_id_is_generated_only_for_hexadecimal_build_ids(build_id, breakpad_id):
    assert _breakpad_id(build_id) == breakpad_id
