"""Lock waits and their totals in a recording reach the reports."""

import json

import pytest
from click.testing import CliRunner

from otel_kprofiler.bpf.layout import FIRST_EVENT
from otel_kprofiler.bpf.locks import LOCK_PHASE
from otel_kprofiler.cli.report import command as report
from otel_kprofiler.host import Access
from otel_kprofiler.model import LOCK_CONTENTION, LockTotal, LossCause
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window
from otel_kprofiler.pipeline import WindowSchedule, replay
from otel_kprofiler.recording import Recording, RecordingFacts, RecordingWriter
from otel_kprofiler.sampling import SamplerCounts
from tests.records import in_ring, pack_record

MUTEX, WRITE = 32, 4
MUTEX_LOCK, PIPE_WRITE = 0xFFFFFFFF81000010, 0xFFFFFFFF81000110
TOTALS = {"mutex": LockTotal(90, 700), "rwsem:W": LockTotal(2, 9000), "uncounted": LockTotal(3, 0)}


def lock_record(time_ns, flags, value, holder, comm):
    frames = (MUTEX_LOCK, PIPE_WRITE)
    kinds = {"kind": FIRST_EVENT, "phase": LOCK_PHASE + flags}
    return pack_record(time_ns, frames, value=value, holder=holder, **kinds) + comm.ljust(16, b"\0")


@pytest.fixture
def windows(tmp_path):
    kallsyms = tmp_path / "host" / "proc" / "kallsyms"
    kallsyms.parent.mkdir(parents=True)
    kallsyms.write_text(
        "ffffffff81000000 T _text\nffffffff81000008 T mutex_lock\n"
        "ffffffff81000100 T pipe_write\nffffffff82000000 T _etext\n"
    )
    writer = RecordingWriter(str(tmp_path / "recording"))
    writer.capture(Access(str(tmp_path / "host")))
    records = [
        pack_record(100, (PIPE_WRITE,)),
        lock_record(110, MUTEX, 300, 12, b"writer\xff"),
        lock_record(120, MUTEX, 400, 12, b"writer\xff"),
        lock_record(130, WRITE, 9000, 0, b""),
    ]
    writer.add_records(b"".join(map(in_ring, records)), 150)
    lost = {LossCause.RING_FULL: 1}
    counts = {
        "on_cpu": SamplerCounts(1, {}, 1, {}),
        "lock_contention": SamplerCounts(4, lost, 3, {}, locks=TOTALS),
    }
    facts = RecordingFacts(10**18, 10**7, 1016, 500, counts, events=(LOCK_CONTENTION,))
    writer.finish(facts)
    results = []
    replay(Recording(str(tmp_path / "recording")), WindowSchedule(10**9), results.append)
    return results


def find_profile(windows):
    (window,) = windows
    return next(profile for profile in window.profiles if profile.kind == LOCK_CONTENTION)


def test_samples_carry_lock_and_holder_through_otlp(windows):
    (window,) = windows
    (batch,) = encode_window(window).batches
    assert check_payload(batch.payload) == []
    for profile in (find_profile(windows), find_profile(decode_windows(batch.payload))):
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
    (batch,) = encode_window(windows[0]).batches
    path = tmp_path / "x.otlp"
    path.write_bytes(batch.payload)
    return str(path)


def run(*words):
    done = CliRunner().invoke(report, list(words), catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_report_by_lock_has_only_lock_waits_and_their_exact_totals(path):
    text = run("--by", "lock", path)
    assert "on_cpu" not in text
    expected = "all 92 waits for locks: 0.0 ms exactly (rwsem:W 0.0 ms in 2, mutex 0.0 ms in 90)"
    assert f"{expected}; 3 not counted\n" in text
    (part,) = json.loads(run("--json", "--by", "lock", path))["kinds"]
    assert [(group["name"], group["self"]) for group in part["groups"]] == [
        ("rwsem:W", 9000),
        ("mutex", 700),
    ]
    assert part["locks"] == {
        "exact": {
            "rwsem:W": {"waits": 2, "total_ns": 9000},
            "mutex": {"waits": 90, "total_ns": 700},
        },
        "uncounted": 3,
    }


def test_a_report_by_holder_names_the_thread(path):
    (part,) = json.loads(run("--json", "--by", "holder", path))["kinds"]
    groups = [(group["name"], group["self"]) for group in part["groups"]]
    assert groups == [("-", 9000), ("writer\\xff (12)", 700)]


def test_totals_of_all_samples_are_omitted_if_only_some_are_selected(path):
    assert "exactly" not in run("--function", "pipe_write", path)
    assert "exactly" in run("--kind", "lock_contention", path)
