"""Reports contain the lock waits and lock totals from a recording."""

import json

import pytest

from otel_kprofiler.bpf.layout import FIRST_EVENT
from otel_kprofiler.bpf.locks import LOCK_PHASE
from otel_kprofiler.cli.report import command as report
from otel_kprofiler.model import LOCK_CONTENTION, LockTotal, LossCause
from otel_kprofiler.pipeline import WindowSchedule, replay
from otel_kprofiler.recording import Recording
from otel_kprofiler.sampling import SamplerCounts
from tests.commands import invoke
from tests.recordings import write_recording
from tests.records import pack_record
from tests.windows import send, write_otlp

MUTEX, WRITE = 32, 4
MUTEX_LOCK, PIPE_WRITE = 0xFFFFFFFF81000010, 0xFFFFFFFF81000110
TOTALS = {"mutex": LockTotal(90, 700), "rwsem:W": LockTotal(2, 9000), "uncounted": LockTotal(3, 0)}


def lock_record(time_ns, flags, value, holder, comm):
    frames = (MUTEX_LOCK, PIPE_WRITE)
    kinds = {"kind": FIRST_EVENT, "phase": LOCK_PHASE + flags}
    return pack_record(time_ns, frames, value=value, holder=holder, **kinds) + comm.ljust(16, b"\0")


@pytest.fixture
def windows(tmp_path):
    records = [
        pack_record(100, (PIPE_WRITE,)),
        lock_record(110, MUTEX, 300, 12, b"writer\xff"),
        lock_record(120, MUTEX, 400, 12, b"writer\xff"),
        lock_record(130, WRITE, 9000, 0, b""),
    ]
    counts = {
        "on_cpu": SamplerCounts(1, {}, 1, {}),
        "lock_contention": SamplerCounts(4, {LossCause.RING_FULL: 1}, 3, {}, locks=TOTALS),
    }
    functions = {"mutex_lock": MUTEX_LOCK - 8, "pipe_write": PIPE_WRITE - 8}
    path = write_recording(tmp_path, functions, records, counts, events=(LOCK_CONTENTION,))
    results = []
    replay(Recording(path), WindowSchedule(10**9), results.append)
    return results


def find_profile(windows):
    (window,) = windows
    return next(profile for profile in window.profiles if profile.kind == LOCK_CONTENTION)


def test_the_lock_type_and_holder_in_samples_survive_an_otlp_round_trip(windows):
    (window,) = windows
    for profile in (find_profile(windows), find_profile([send(window)])):
        samples = [(dict(sample.labels), list(sample.values)) for _, sample in profile.samples]
        key = "otel_kprofiler.lock."
        holder = {key + "holder.thread.id": "12", key + "holder.thread.name": "writer\\xff"}
        assert samples == [
            ({key + "type": "mutex", **holder}, [300, 400]),
            ({key + "type": "rwsem:W"}, [9000]),
        ]
        assert profile.locks == TOTALS


@pytest.fixture
def path(windows, tmp_path):
    return write_otlp(tmp_path / "x.otlp", windows[0])


def run(*words):
    return invoke(report, *words, catch_exceptions=False).output


def test_a_report_by_lock_contains_only_lock_waits_and_their_exact_totals(path):
    text = run("--by", "lock", path)
    assert "on_cpu" not in text
    expected = "all 92 waits for locks: 0.0 ms exactly (rwsem:W 0.0 ms in 2, mutex 0.0 ms in 90)"
    assert f"{expected}; 3 not counted\n" in text
    (part,) = json.loads(run("--json", "--by", "lock", path))["kinds"]
    results = [(group["name"], group["self"]) for group in part["groups"]]
    assert results == [("rwsem:W", 9000), ("mutex", 700)]
    assert part["locks"] == {
        "exact": {
            "rwsem:W": {"waits": 2, "total_ns": 9000},
            "mutex": {"waits": 90, "total_ns": 700},
        },
        "uncounted": 3,
    }


def test_a_report_by_lock_holder_names_the_holding_thread(path):
    (part,) = json.loads(run("--json", "--by", "holder", path))["kinds"]
    groups = [(group["name"], group["self"]) for group in part["groups"]]
    assert groups == [("-", 9000), ("writer\\xff (12)", 700)]


def test_exact_totals_are_omitted_if_only_some_samples_are_selected(path):
    assert "exactly" not in run("--function", "pipe_write", path)
    assert "exactly" in run("--kind", "lock_contention", path)
