"""Samples of each kind in a recording appear in every report and are counted separately."""

import gzip
import json
from collections import Counter

import pytest

from otel_kprofiler.bpf.layout import FIRST_EVENT
from otel_kprofiler.delivery import Reporter
from otel_kprofiler.export import ExportQueue
from otel_kprofiler.formats import FORMATS
from otel_kprofiler.model import ON_CPU, Account, Form, LossCause, ProfileKind
from otel_kprofiler.otlp import check_payload, decode_windows
from otel_kprofiler.pipeline import WindowSchedule, replay
from otel_kprofiler.recording import Recording
from otel_kprofiler.sampling import SamplerCounts
from otel_kprofiler.sdk import InMemoryProfileExporter
from tests.page import data
from tests.recordings import PERIOD_NS, write_recording
from tests.records import pack_record
from tests.wire import fields, varints

LOCK_WAIT = ProfileKind("lock_wait", "lock_wait", "nanoseconds")
VFS_READ, MUTEX_LOCK = 0xFFFFFFFF81000010, 0xFFFFFFFF81000110
RECORDS = [
    pack_record(100, (VFS_READ,)),
    pack_record(110, (MUTEX_LOCK, VFS_READ), kind=FIRST_EVENT, value=700),
    pack_record(120, (VFS_READ,)),
    pack_record(130, (MUTEX_LOCK, VFS_READ), kind=FIRST_EVENT, value=5),
    pack_record(140, (MUTEX_LOCK,), kind=FIRST_EVENT, value=1),
]


@pytest.fixture
def recording(tmp_path):
    counts = {
        "on_cpu": SamplerCounts(2, {}, 2, {}),
        "lock_wait": SamplerCounts(7, {LossCause.RING_FULL: 4}, 3, {}),
    }
    functions = {"vfs_read": VFS_READ - 8, "mutex_lock": MUTEX_LOCK - 8}
    return write_recording(tmp_path, functions, RECORDS, counts, events=(LOCK_WAIT,))


@pytest.fixture
def windows(recording):
    results = []
    replay(Recording(recording), WindowSchedule(10**9), results.append)
    return results


def values(window):
    return Counter(
        (profile.kind, sample.stack.frames[0].function, value)
        for profile in window.profiles
        for _, sample in profile.samples
        for value in sample.values or [1] * len(sample.timestamps_unix_ns)
    )


EXPECTED = {
    (ON_CPU, "vfs_read", 1): 2,
    (LOCK_WAIT, "mutex_lock", 700): 1,
    (LOCK_WAIT, "mutex_lock", 5): 1,
    (LOCK_WAIT, "mutex_lock", 1): 1,
}


def test_a_window_has_a_profile_of_each_kind(windows):
    (window,) = windows
    results = [(profile.kind, profile.period_ns) for profile in window.profiles]
    assert results == [(ON_CPU, PERIOD_NS), (LOCK_WAIT, 0)]
    assert values(window) == EXPECTED


@pytest.mark.parametrize("form", Form)
def test_every_sample_of_each_kind_is_received_or_counted_as_lost(recording, form):
    exporter = InMemoryProfileExporter()
    exporter.form = form
    reporter = Reporter([ExportQueue(exporter)])
    pipeline = replay(Recording(recording), WindowSchedule(10**9), reporter)
    assert reporter.force_flush(10_000)
    account = Account.of_kinds(pipeline.account().kinds, reporter.accounts())
    reporter.shutdown(10_000)
    assert account.gaps() == []
    results = {kind: (one.taken, one.received) for kind, one in account.kinds.items()}
    assert results == {"on_cpu": (2, 2), "lock_wait": (7, 3)}
    assert account.kinds["lock_wait"].lost == {LossCause.RING_FULL: 4}
    assert [kind.exporters[0].exported for kind in account.kinds.values()] == [2, 3]

    (batch,) = exporter.get_finished_batches()
    assert batch.sample_counts == {"on_cpu": 2, "lock_wait": 3}
    assert check_payload(batch.payload) == []
    (received,) = decode_windows(batch.payload)
    assert values(received) == EXPECTED
    totals = {
        profile.kind: (profile.taken, profile.lost, profile.totals.samples)
        for profile in received.profiles
    }
    assert totals == {ON_CPU: (2, {}, 2), LOCK_WAIT: (7, {LossCause.RING_FULL: 4}, 3)}


def read_speedscope(text):
    return [(load["name"], load["unit"], load["endValue"]) for load in json.loads(text)["profiles"]]


def read_firefox(text):
    return [
        (thread["name"], thread["samples"]["weightType"], sum(thread["samples"]["weight"]))
        for thread in json.loads(text)["threads"]
    ]


WRITTEN = {
    "firefox": (
        read_firefox,
        [("comm", "tracing-ms", 20), ("comm lock_wait", "tracing-ms", pytest.approx(706e-6))],
    ),
    "folded": (
        str.splitlines,
        [
            "lock_wait (nanoseconds);comm;mutex_lock_[k] 1",
            "lock_wait (nanoseconds);comm;vfs_read_[k];mutex_lock_[k] 705",
            "on_cpu (nanoseconds);comm;vfs_read_[k] 20000000",
        ],
    ),
    "speedscope": (
        read_speedscope,
        [
            ("all CPUs, on_cpu", "none", 2),
            ("all CPUs, lock_wait", "nanoseconds", 706),
            ("CPU 0, lock_wait", "nanoseconds", 706),
            ("CPU 0, on_cpu", "nanoseconds", 20_000_000),
        ],
    ),
}


def test_every_format_is_covered_by_this_module():
    others = {"table", "html", "pprof", "otlp", "otlp-json"}
    assert {row.name for row in FORMATS} == {*WRITTEN, *others}


@pytest.mark.parametrize("name", WRITTEN)
def test_reports_keep_values_of_different_sample_kinds_separate(windows, name):
    read, expected = WRITTEN[name]
    (row,) = [row for row in FORMATS if row.name == name]
    assert read(row.write(windows)) == expected


def test_each_sample_kind_has_a_separate_table(windows):
    (table,) = [row for row in FORMATS if row.name == "table"]
    on_cpu, lock_wait = table.write(windows).split("\n\n")
    assert on_cpu.startswith("on_cpu\n")
    assert "2 samples" in on_cpu
    assert lock_wait.startswith("lock_wait\n")
    assert "706 nanoseconds" in lock_wait
    assert " 100.0%  100.0%  mutex_lock" in lock_wait


def test_the_page_shows_each_sample_kind_separately_with_its_unit(windows):
    (html,) = [row for row in FORMATS if row.name == "html"]
    result = data(html.write(windows))
    assert result["kinds"] == [
        {"name": "on_cpu", "unit": "samples", "period_ns": PERIOD_NS, "measure": "cpu"},
        {"name": "lock_wait", "unit": "nanoseconds", "period_ns": 0, "measure": "lock_wait"},
    ]
    sums = Counter()
    for kind, count in zip(result["samples"]["kind"], result["samples"]["count"], strict=True):
        sums[kind] += count
    assert sums == {0: 2, 1: 706}


def test_a_pprof_file_contains_a_value_for_each_kind(windows):
    (pprof,) = [row for row in FORMATS if row.name == "pprof"]
    profile = list(fields(gzip.decompress(pprof.write(windows))))
    strings = [text.decode() for number, text in profile if number == 6]
    types = [dict(fields(body)) for number, body in profile if number == 1]
    assert [strings[one[1]] for one in types] == ["samples", "cpu", "lock_wait"]
    assert [strings[index] for number, index in profile if number == 14] == ["cpu"]
    samples = [dict(fields(body)) for number, body in profile if number == 2]
    results = sorted(list(varints(sample[2])) for sample in samples)
    assert results == [[1, 0, 1], [2, 0, 705], [2, 2 * PERIOD_NS, 0]]


@pytest.mark.parametrize("name", ["otlp", "otlp-json"])
def test_otlp_files_survive_a_round_trip(windows, name):
    (row,) = [row for row in FORMATS if row.name == name]
    written = row.write(windows)
    (window,) = decode_windows(written.encode() if isinstance(written, str) else written)
    assert values(window) == EXPECTED
