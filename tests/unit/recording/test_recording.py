"""A replay returns only recorded data, and reads nothing from the replaying host."""

import contextlib
import errno
import json
import os
import stat
import zipfile

import pytest

from otel_kprofiler.bpf import parse_records
from otel_kprofiler.cli.raw import RawOutput
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import ExportError, KProfilerError
from otel_kprofiler.host import Access
from otel_kprofiler.model import STACK_TRUNCATED, LossCause, ProcessKey, WaitTotals
from otel_kprofiler.recording import Recording, RecordingFacts, RecordingWriter, ReplaySampler
from otel_kprofiler.sampling import SamplerCounts
from tests.full_disk import full_disk
from tests.records import in_ring, pack_record

COUNTS = {"on_cpu": SamplerCounts(4, {LossCause.RING_FULL: 1}, 3, {"idle": 9}, 5)}
OFFSET = 1_790_000_000_000_000_000
FACTS = RecordingFacts(OFFSET, 10_000_000, 24, 500, COUNTS)


def ring_record(time_ns, frames):
    return in_ring(pack_record(time_ns, frames))


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "host"
    for path, content in {
        "proc/kallsyms": b"ffffffff81000000 T _text\n",
        "sys/module/loop/sections/.text": b"0xffffffffc0000000\n",
        "sys/module/loop/notes/.note.gnu.build-id": b"\4\0\0\0",
        "sys/module/loop/coresize": b"4096\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)

    class Guarded(Access):
        def read_bytes(self, path):
            if path == "/sys/kernel/notes":
                raise PermissionError(errno.EACCES, "denied", path)
            return super().read_bytes(path)

    return Guarded(str(root))


@pytest.fixture
def recorded(tmp_path, tree):
    path = str(tmp_path / "a.kprofile")
    writer = RecordingWriter(path)
    writer.capture(tree)
    writer.add_records(ring_record(100, [1, 2]) + ring_record(90, [3]), 150)
    writer.add_event("modules", 160, b"add loop")
    writer.add_records(ring_record(200, [4, 5, 6]), 250)
    writer.add_resources({ProcessKey(3, 1, 7, 33): {"process.pid": 3, "tags": ("a", "b")}})
    assert not os.path.exists(path), "a recording appears when it is whole"
    writer.finish(FACTS)
    assert sorted(os.listdir(tmp_path)) == ["a.kprofile", "host"]
    return path


@pytest.fixture
def recording(recorded):
    with contextlib.closing(Recording(recorded)) as recording:
        yield recording


def with_header(recorded, **values):
    """Returns the path of a copy with modified header values."""
    changed = f"{recorded}.changed"
    with zipfile.ZipFile(recorded) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "recording.json":
                content = json.dumps({**json.loads(content), **values})
            new.writestr(name, content)
    return changed


def test_a_full_disk_while_host_files_are_copied_is_an_error(tree, tmp_path):
    """Only files of the host that cannot be read are noted; the recording must be written."""
    (tmp_path / "host/proc/kallsyms").write_bytes(os.urandom(1 << 18))
    writer = RecordingWriter(str(tmp_path / "full"))
    with full_disk(1 << 16), pytest.raises(OSError, match="File too large"):
        writer.capture(tree)
    writer.abandon()
    assert not (tmp_path / "full").exists()


def test_a_raw_file_that_cannot_be_written_is_discarded_before_sampling(tree, tmp_path):
    (tmp_path / "host/proc/kallsyms").write_bytes(os.urandom(1 << 18))
    descriptors = os.listdir("/proc/self/fd")
    with full_disk(1 << 16), pytest.raises(ExportError, match="File too large"):
        RawOutput(str(tmp_path / "full"), tree, force=False)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_replay_returns_the_samples_in_each_recorded_drain_with_their_watermark(recording):
    sampler = ReplaySampler(recording)
    clock = Clock(sampler)
    sampler.start()
    first = sampler.drain()
    assert [sample.time_ns for sample in first] == [100, 90]
    assert first[:1] == parse_records(ring_record(100, [1, 2]), 24)
    assert (sampler.complete_until_ns(), clock.to_unix_ns(100)) == (150, OFFSET + 100)
    (last,) = sampler.drain()
    (side,) = last.sides
    assert side.status == STACK_TRUNCATED, "by the limit of the recorded host"
    assert not sampler.exhausted
    assert sampler.drain() == []
    assert sampler.exhausted
    assert sampler.complete_until_ns() == FACTS.until_ns
    assert sampler.counts() == COUNTS
    assert sampler.period_ns == FACTS.period_ns


def test_replayed_files_come_from_the_recorded_host(recording):
    files = recording.files
    assert files.read_bytes("/proc/kallsyms") == b"ffffffff81000000 T _text\n"
    with open(files.open_fd("/proc/kallsyms"), "rb") as file:
        assert file.read() == b"ffffffff81000000 T _text\n"
    assert files.list_dir("/sys/module") == ["loop"]
    assert files.list_dir("/sys/module/loop") == ["coresize", "notes", "sections"]
    assert files.list_dir("/sys/module/loop/sections/") == [".text"]


def test_a_replay_raises_the_recorded_errors_for_missing_and_unreadable_files(recording):
    with pytest.raises(FileNotFoundError):
        recording.files.read_bytes("/proc/modules")
    with pytest.raises(FileNotFoundError):
        recording.files.list_dir("/proc/self/task")
    with pytest.raises(FileNotFoundError):
        recording.files.read_link("/proc/self/exe")
    with pytest.raises(PermissionError):
        recording.files.open_fd("/sys/kernel/notes")


def test_events_and_resources_survive_a_round_trip(recording):
    assert list(recording.blocks("events/modules")) == [(160, b"add loop")]
    assert recording.resources == {ProcessKey(3, 1, 7, 33): {"process.pid": 3, "tags": ("a", "b")}}
    assert recording.facts == FACTS


def test_wait_totals_are_replayed_once_after_all_samples(tmp_path, tree):
    waits = {
        ProcessKey(3, 1): WaitTotals((1, 2, 3, 4, 5), 6, 7),
        ProcessKey(4, None): WaitTotals((0, 9, 0, 0, 0), 1),
    }
    path = str(tmp_path / "waits.kprofile")
    writer = RecordingWriter(path)
    writer.capture(tree)
    writer.add_records(ring_record(100, [1, 2]), 150)
    writer.finish(FACTS._replace(waits=waits, wait_threshold_ns=2_000))
    with contextlib.closing(Recording(path)) as recording:
        assert recording.facts.waits == waits
        sampler = ReplaySampler(recording)
        assert sampler.wait_threshold_ns == 2_000
        sums = []
        while not sampler.exhausted:
            sums.append(sampler.read_waits())
            sampler.drain()
        assert sums == [{}, {}]
        ended = {process: one._replace(has_ended=True) for process, one in waits.items()}
        assert [sampler.read_waits(), sampler.read_waits()] == [ended, {}]


@pytest.mark.parametrize(
    "row",
    [[1, 2, [1, 2, 3, 4], 5, 6], [1, 2, [1, 2, 3, 4, -5], 5, 6], [1, 2, 3], 7, [1, 2, 3, 4, 5]],
)
def test_malformed_wait_totals_are_rejected(recorded, row):
    with pytest.raises(KProfilerError, match="corrupt"):
        Recording(with_header(recorded, waits=[row]))


def test_drained_samples_keep_their_order_across_many_archive_entries(tmp_path, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.recording.recording._FLUSH_BYTES", 100)
    writer = RecordingWriter(str(tmp_path / "many"))
    for time_ns in range(50):
        writer.add_records(ring_record(time_ns, [time_ns]), time_ns)
    writer.finish(FACTS)
    recording = Recording(str(tmp_path / "many"))
    sampler = ReplaySampler(recording)
    assert [sampler.drain()[0].time_ns for _ in range(50)] == list(range(50))
    recording.close()


def test_an_abandoned_recording_leaves_no_file(tmp_path):
    writer = RecordingWriter(str(tmp_path / "gone"))
    writer.add_records(ring_record(1, [1]), 1)
    writer.abandon()
    assert os.listdir(tmp_path) == []


def test_only_the_owner_can_read_a_recording(recorded):
    assert stat.S_IMODE(os.stat(recorded).st_mode) == 0o600


def test_the_error_for_an_unsupported_recording_format_states_its_version(recorded):
    with pytest.raises(KProfilerError, match=r"format 99\."):
        Recording(with_header(recorded, version=99))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\5\6" + bytes(18)])
def test_a_file_that_is_not_a_recording_is_rejected(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(KProfilerError, match="not a recording"):
        Recording(str(path))


def test_malformed_records_are_rejected(tmp_path):
    writer = RecordingWriter(str(tmp_path / "damaged"))
    writer.add_records(ring_record(1, [1])[:-4], 1)
    writer.finish(FACTS)
    recording = Recording(str(tmp_path / "damaged"))
    with pytest.raises(KProfilerError, match="corrupt"):
        ReplaySampler(recording).drain()
    recording.close()
