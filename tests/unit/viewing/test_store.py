"""The sample store returns the same samples as a plain list."""

import os
import random
import sqlite3
import stat
import time
from collections import Counter

import pytest

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import columns
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    PYTHON_SIDE,
    USER_SIDE,
    Frame,
    Line,
    Profile,
    ProfileKind,
    RawFrames,
    Resource,
    ResourceSamples,
    Side,
    Stack,
    StackStatus,
    Unresolved,
    WaitCause,
    WaitState,
    Window,
    WindowSample,
    WindowWait,
)
from otel_kprofiler.viewing import Query, QueryError, SampleStore
from otel_kprofiler.viewing.query import StoreAnswers
from tests import page
from tests.unit.viewing.shown import answer, expected, shown
from tests.windows import LIBC, make_frame, make_stack

SECOND = 10**9
NOW = 1_700_000_000 * SECOND
WAITING = ProfileKind("off_cpu", "off_cpu", "nanoseconds")


def stack(*names):
    return Stack.from_frames([*make_stack(*names).frames, make_frame("main", USER_SIDE, LIBC)])


READ, WRITE = stack("vfs_read", "sys_read"), stack("vfs_write", "sys_write")
PYTHON = Stack((
    Side(KERNEL_SIDE, (), StackStatus(-14)),
    Side(PYTHON_SIDE, (Frame(None, 0, (Line("run", file="/srv/a.py", line=7),), 0, PYTHON_SIDE),)),
    Side(USER_SIDE, RawFrames(USER_SIDE, [1, 2], Unresolved.USER_ADDRESS)),
))  # fmt: skip


def resource(pid, name="nginx", host="web-1", **others):
    return Resource({
        "process.pid": pid, "process.executable.name": name, "host.name": host, **others
    })  # fmt: skip


def window(groups, *, kind=ON_CPU, period=10_101_010, start=NOW - 5 * SECOND, lost=None):
    return Window(start, start + 5 * SECOND, [Profile(kind, period, groups, lost=lost or {})])


def sample(stack, times, *, tid=7, cpu=0, values=(), name="worker", cause=None):
    wait = cause and WindowWait(WaitState.INTERRUPTIBLE, cause)
    return WindowSample(stack, tid, name, cpu, None, times, values, wait=wait)


WINDOWS = [
    window([
        ResourceSamples(resource(7), [
            sample(READ, [NOW - 5 * SECOND, NOW - 4 * SECOND]),
            sample(READ, [NOW - 4 * SECOND + 5, NOW - 3 * SECOND], cpu=1),
            sample(PYTHON, [NOW - SECOND], tid=8, name="other\x1b\udcff"),
        ]),
        ResourceSamples(resource(9, "dd", "web-2"), [sample(WRITE, [NOW - 4 * SECOND])]),
        ResourceSamples(Resource({}), [sample(WRITE, [NOW - 2 * SECOND])]),
    ], lost={}),
    window([ResourceSamples(resource(7), [sample(READ, [NOW - SECOND], values=[5_000])])],
           kind=WAITING, period=0),
]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    with SampleStore(str(tmp_path / "x.db"), keep_s=3600, now_ns=lambda: NOW) as store:
        yield store


def test_all_stored_samples_are_returned_unchanged(store):
    assert store.add(WINDOWS) == (8, 0, 0)
    data = answer(store, Query(), NOW)
    assert shown(data) == expected(WINDOWS, data)
    assert data["title"] == "x · 2 hosts"
    assert data["live"] is True
    assert data["available"] == {"from_ms": (NOW - 5 * SECOND) / 1e6, "to_ms": NOW / 1e6 - 1000}
    assert data["summary"].startswith(
        "8 samples · 2 CPUs · 4.0 s from 2023-11-14 22:13:15 UTC · 99"
    )


def test_identical_samples_in_several_messages_share_one_stack(store):
    for at in range(5):
        later = sample(stack("vfs_read", "sys_read"), [NOW - at * SECOND - 1])
        store.add([window([ResourceSamples(resource(7), [later])])])
    data = answer(store, Query(), NOW)
    assert len(data["nodes"]["frame"]) == 4, "nginx, main, sys_read, vfs_read"
    assert sum(data["samples"]["count"]) == 5


@pytest.mark.parametrize(
    ("query", "start", "end"),
    [
        (Query((NOW - 4 * SECOND) / 1e6), NOW - 4 * SECOND, NOW),
        (Query(None, (NOW - 4 * SECOND) / 1e6), 0, NOW - 4 * SECOND),
        (Query((NOW - 4 * SECOND) / 1e6, NOW / 1e6 - 3000), NOW - 4 * SECOND, NOW - 3 * SECOND),
        (Query(last_s=2), NOW - 2 * SECOND, NOW),
        (Query(1, 2), 1, 2),
    ],
)  # fmt: skip
def test_a_time_range_includes_its_start_but_not_its_end(store, query, start, end):
    store.add(WINDOWS)
    data = answer(store, query, NOW)
    assert shown(data) == expected(WINDOWS, data, start, end)


def test_the_wait_causes_of_samples_are_stored(store):
    waits = [
        sample(READ, [NOW - SECOND], values=[7_000], cause=WaitCause.PIPE),
        sample(READ, [NOW - SECOND], values=[9_000], cause=WaitCause.RUN_QUEUE),
        sample(READ, [NOW - SECOND], values=[5_000]),
    ]
    windows = [window([ResourceSamples(resource(7), waits)], kind=WAITING, period=0)]
    store.add(windows)
    for data in (answer(store, Query(), NOW), page.unpacked(columns(windows))):
        assert shown(data) == expected(windows, data)


def test_samples_can_be_selected_by_resource(store):
    store.add(WINDOWS)
    choices = {one["id"]: one["samples"] for one in answer(store, Query(), NOW)["resources"]}
    assert choices == {
        "host.name=web-1": 6,
        "process.executable.name=nginx": 6,
        "host.name=web-2": 1,
        "process.executable.name=dd": 1,
    }
    data = answer(store, Query(resource="host.name=web-2"), NOW)
    assert data["title"] == "x · web-2"
    assert sum(data["samples"]["count"]) == 1
    assert {one["id"]: one["samples"] for one in data["resources"]} == choices
    assert answer(store, Query(resource="host.name=gone"), NOW)["samples"]["count"] == []
    with pytest.raises(QueryError):
        answer(store, Query(resource="process.pid=7"), NOW)


def test_an_empty_store_yields_a_page_without_samples(store):
    data = answer(store, Query(last_s=60), NOW)
    assert data["samples"]["count"] == []
    assert data["summary"] == "no samples"
    assert answer(store, Query(), NOW)["bins"] == 1


def test_samples_in_repeated_requests_are_counted_once(store):
    store.add(WINDOWS[:1])
    assert store.add(WINDOWS) == (1, 0, 7)
    assert store.add(WINDOWS) == (0, 0, 8)
    data = answer(store, Query(), NOW)
    assert shown(data) == expected(WINDOWS, data)


def test_the_values_of_identical_samples_in_a_request_are_summed(store):
    twice = window(
        [ResourceSamples(resource(7), [sample(READ, [NOW - 5]), sample(READ, [NOW - 5])])]
    )
    assert store.add([twice]) == (2, 0, 0)
    assert answer(store, Query(), NOW)["samples"]["count"] == [2]


def test_losses_are_counted_once_per_window(store):
    lost = window([], lost={"ring_full": 3, "other": 4})
    store.add([lost])
    store.add([lost, *WINDOWS])  # the same window again, as if split into two requests
    assert answer(store, Query(), NOW)["summary"].endswith("7 lost")
    assert answer(store, Query(last_s=0.5), NOW)["summary"] == "no samples"


def test_samples_of_one_kind_with_different_periods_are_weighted_by_period(store):
    parts = [
        window([ResourceSamples(resource(7), [sample(READ, [NOW - at])])], period=period)
        for at, period in ((1, 10**7), (2, 10**6))
    ]
    store.add(parts)
    data = answer(store, Query(), NOW)
    assert data["kinds"][0]["unit"] == "nanoseconds"
    assert sum(data["samples"]["count"]) == 10**7 + 10**6


def test_a_page_is_returned_for_any_number_of_kinds_and_for_huge_periods(store):
    groups = [ResourceSamples(resource(7), [sample(READ, [NOW - SECOND], values=[1 << 60])])]
    kinds = [ProfileKind(f"event_{at}", f"event_{at}", "count") for at in range(300)]
    store.add(window(groups, kind=kind, period=0) for kind in kinds)
    store.add(window(groups, period=period) for period in (1, 1 << 62))
    data = answer(store, Query(), NOW)
    assert [kind["name"] for kind in data["kinds"]] == [*(kind.name for kind in kinds), "on_cpu"]
    assert set(data["samples"]["count"]) == {1 << 53}


def test_expired_samples_are_removed_along_with_rows_that_only_they_reference(tmp_path):
    now = [NOW]
    with SampleStore(str(tmp_path / "x.db"), keep_s=3600, now_ns=lambda: now[0]) as store:
        store.add(WINDOWS)
        now[0] += 3599 * SECOND
        later = window([ResourceSamples(resource(1, "init"), [sample(WRITE, [now[0] - 1])])])
        assert store.add([later]) == (1, 0, 0)
        data = answer(store, Query(), now[0])
        assert sum(data["samples"]["count"]) == 2 + 5_000, "two of the last second, and the new"
        now[0] += 400 * SECOND
        store.add([])
        data = answer(store, Query(), now[0])
        assert data["strings"][1:] == ["init", "main", "libc.so.6", "sys_write", "vmlinux",
                                       "vfs_write", "worker"]  # fmt: skip
        database = sqlite3.connect(store.path)
        counts = {
            table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("samples", "nodes", "frames", "threads", "resources", "attributes")
        }
        database.close()
    assert counts == {
        "samples": 1, "nodes": 4, "frames": 4, "threads": 1, "resources": 1, "attributes": 2
    }  # fmt: skip


def test_samples_outside_the_retention_time_are_not_added(store):
    times = [1, NOW - 3600 * SECOND - 1, NOW - 3600 * SECOND, NOW + 3600 * SECOND, 2**64 - 1]
    assert store.add([window([ResourceSamples(resource(7), [sample(READ, times)])])]) == (1, 4, 0)
    assert answer(store, Query(), NOW)["samples"]["count"] == [1]


def test_the_store_file_stays_within_its_limit_and_keeps_the_newest_samples(tmp_path):
    limit, random_ = 400_000, random.Random(5)
    with SampleStore(str(tmp_path / "x.db"), max_bytes=limit, now_ns=lambda: NOW) as store:
        for at in range(300):
            time = NOW - (300 - at) * SECOND
            samples = [
                sample(stack(f"f{random_.random()}"), [time + number]) for number in range(20)
            ]
            store.add([window([ResourceSamples(resource(7), samples)])])
            assert os.path.getsize(store.path) < 2 * limit
        data = answer(store, Query(), NOW)
    assert data["available"]["to_ms"] > (NOW - 2 * SECOND) / 1e6
    assert 0 < sum(data["samples"]["count"]) < 300 * 20
    assert len(data["nodes"]["frame"]) <= 2 + sum(data["samples"]["count"])


def test_samples_with_huge_numbers_and_invalid_names_are_stored(store):
    huge = 10**30
    samples = [
        sample(READ, [NOW - 1, NOW - 1], tid=huge, cpu=huge, values=[huge, huge]),
        sample(READ, [NOW - 1], tid=-huge, cpu=-5, values=[-huge], name="\udcff\0" * 1000),
    ]
    odd = Resource({"process.pid": True, "host.name": (1, "\udcff"), "service.name": float("nan")})
    assert store.add([window([ResourceSamples(odd, samples)], lost={"x": huge})]) == (3, 0, 0)
    data = answer(store, Query(), NOW)
    assert len(data["samples"]["count"]) == 2
    assert max(data["samples"]["cpu"]) < 2**31


def test_a_temporary_store_is_private_and_is_removed_when_closed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with SampleStore(now_ns=lambda: NOW) as store:
        directory = os.path.dirname(store.path)
        assert os.path.dirname(directory) == str(tmp_path)
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        store.add(WINDOWS)
    assert os.listdir(tmp_path) == []


def test_directories_left_behind_by_killed_processes_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    others = {"otel-kprofiler-view-new": 0, "otel-kprofiler-view-killed": 3600, "other": 3600}
    for name, age_s in others.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples.db").write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    with SampleStore(now_ns=lambda: NOW) as used:
        os.utime(os.path.dirname(used.path), (time.time() - 3600,) * 2)
        with SampleStore(now_ns=lambda: NOW) as store:
            kept = {"otel-kprofiler-view-new", "other"}
            named = {os.path.basename(os.path.dirname(one.path)) for one in (used, store)}
            assert set(os.listdir(tmp_path)) == kept | named


def test_a_named_store_is_accessible_only_to_its_owner_and_can_be_reopened(tmp_path):
    path = str(tmp_path / "x.db")
    for run in range(2):
        with SampleStore(path, now_ns=lambda: NOW) as store:
            assert store.add([WINDOWS[run]]).kept
            data = answer(store, Query(), NOW)
            with pytest.raises(KProfilerError, match="in use by another"):
                SampleStore(path)
    assert shown(data) == expected(WINDOWS, data)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_files_that_are_not_stores_are_rejected_and_left_unchanged(tmp_path):
    text, other = tmp_path / "text", tmp_path / "other.db"
    text.write_text("not a database\n" * 1000)
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE samples (x)")
    database.close()
    for path in (text, other):
        before = path.read_bytes()
        with pytest.raises(KProfilerError, match="cannot open"):
            SampleStore(str(path))
        assert path.read_bytes() == before
    with pytest.raises(KProfilerError, match=r"cannot open .*: .*No such file"):
        SampleStore(str(tmp_path / "missing" / "x.db"))
    assert sorted(os.listdir(tmp_path)) == ["other.db", "text"]


def test_responses_remain_consistent_while_samples_arrive(store):
    store.add(WINDOWS)
    pieces = StoreAnswers(store.path, title="x", now_ns=lambda: NOW)
    try:
        before = b"".join(pieces(Query()))
        store.add([window([ResourceSamples(resource(7), [sample(READ, [NOW - 9])])])])
        assert b"".join(pieces(Query())) != before
    finally:
        pieces.close()


def test_the_store_reports_a_full_disk(store):
    store._database.execute("PRAGMA max_page_count = 1")
    many = [sample(stack(f"function {at}"), [NOW - 1 - at]) for at in range(5000)]
    with pytest.raises(KProfilerError, match=r"cannot write .*full") as raised:
        store.add([window([ResourceSamples(resource(7), many)])])
    assert "--store" in raised.value.hint
    store._database.execute("PRAGMA max_page_count = 1000000")
    assert store.add(WINDOWS) == (8, 0, 0)
    data = answer(store, Query(), NOW)
    assert shown(data) == expected(WINDOWS, data)


def test_page_data_from_a_store_matches_page_data_from_a_file(store):

    store.add(WINDOWS)
    of_file = page.unpacked(columns(WINDOWS))
    data = answer(store, Query(), NOW)
    assert Counter(shown(data)).total() == Counter(shown(of_file)).total()
    assert {key[:-1] for key in shown(data)} == {key[:-1] for key in shown(of_file)}
    assert set(of_file) <= set(data)
    for table in ("kinds", "frames", "threads", "processes"):
        assert type(data[table]) is type(of_file[table])
