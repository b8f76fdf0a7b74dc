"""OTLP files remain readable through truncation, rotation and full disks."""

import io
import os
import stat
import threading

import pytest

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import DebugExporter, ExportOutcome, FileExporter, Rotation, Verbosity
from otel_kprofiler.model import Form, LossCause
from tests.raising import raising
from tests.waiting import call_in_thread

SUCCESS = ExportOutcome.SUCCESS


def open_files():
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if os.path.lexists(link)}


def messages(data):
    results = []
    while data:
        size = int.from_bytes(data[:4], "big")
        assert len(data) >= 4 + size
        results.append(data[4 : 4 + size])
        data = data[4 + size :]
    return results


@pytest.fixture
def open_file(tmp_path):
    exporters = []

    def make(path=tmp_path / "out.jsonl", **arguments):
        exporters.append(FileExporter(str(path), **arguments))
        return exporters[-1]

    yield make
    for exporter in exporters:
        exporter.shutdown()


def test_json_is_written_as_one_request_per_line_and_flushed_at_once(open_file, batch, tmp_path):
    exporter = open_file()
    for number in range(3):
        payload = b'{"n":\n%d}' % number  # a newline in the input must not split the line
        assert exporter.export(batch(payload, form=Form.JSON)).outcome is SUCCESS
        lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
        assert lines == [b'{"n": %d}\n' % seen for seen in range(number + 1)]


def test_protobuf_messages_are_length_prefixed(open_file, batch, tmp_path):
    exporter = open_file(form=Form.PROTOBUF)
    payloads = [b"", b"a", b"\n" * 300, b"x" * 70_000]
    for payload in payloads:
        assert exporter.export(batch(payload)).exported == 3
    assert messages((tmp_path / "out.jsonl").read_bytes()) == payloads


@pytest.mark.parametrize("form", Form)
def test_the_file_exporter_appends_to_an_existing_file(open_file, batch, tmp_path, form):
    for number in range(3):
        exporter = open_file(form=form)
        exporter.export(batch(b"%d" % number))
        exporter.shutdown()
    content = (tmp_path / "out.jsonl").read_bytes()
    result = messages(content) if form is Form.PROTOBUF else content.splitlines()
    assert result == [b"0", b"1", b"2"]


def test_a_truncated_line_does_not_corrupt_the_next(open_file, batch, tmp_path):
    (tmp_path / "out.jsonl").write_bytes(b'{"whole":1}\n{"hal')
    open_file().export(batch(b"{}"))
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"whole":1}\n{"hal\n{}\n'


@pytest.mark.parametrize("content", [b"\0\0\0\5half", b"\0\0", b"some other file, not ours at all"])
def test_a_truncated_or_foreign_protobuf_file_is_left_unchanged(open_file, tmp_path, content):
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(ExportError) as caught:
        open_file(form=Form.PROTOBUF)
    assert caught.value.hint
    assert (tmp_path / "out.jsonl").read_bytes() == content


@pytest.mark.parametrize("path", ["missing/out", "directory", "file/out"])
def test_unwritable_paths_are_rejected_immediately(tmp_path, path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ExportError) as caught:
        FileExporter(str(tmp_path / path))
    assert path in caught.value.message
    assert caught.value.hint


def test_a_partial_record_is_removed_from_the_file(open_file, batch, tmp_path, monkeypatch, caplog):
    """On a full disk, a write may be partial. The rest of the file must remain readable."""
    exporter = open_file(form=Form.PROTOBUF)
    exporter.export(batch(b"first"))
    write, calls = os.write, []

    def full(fd, data):
        calls.append(len(data))
        if len(calls) % 2:
            return write(fd, data[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(2):
        result = exporter.export(batch(b"second second"))
        assert (result.lost, result.error_type) == ({LossCause.WRITE_FAILED: 3}, "ENOSPC")
    monkeypatch.undo()
    exporter.export(batch(b"third"))
    assert messages((tmp_path / "out.jsonl").read_bytes()) == [b"first", b"third"]
    assert len(caplog.records) == 1


def test_samples_lost_on_a_full_device_are_counted(open_file, batch):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    exporter = open_file("/dev/full", rotation=Rotation(max_bytes=1))
    assert exporter.export(batch()).lost == {LossCause.WRITE_FAILED: 3}


def test_requests_are_written_to_standard_output(batch, capfdbinary):
    exporter = FileExporter("-")
    exporter.export(batch(b"{}"))
    exporter.shutdown()
    os.write(1, b"still open")
    assert capfdbinary.readouterr().out == b"{}\nstill open"
    assert exporter.export(batch()).lost == {LossCause.SHUTDOWN: 3}


def test_rotation_by_size_keeps_the_newest_backups(open_file, batch, tmp_path):
    times = iter(range(1_700_000_000, 1_800_000_000))
    exporter = open_file(
        rotation=Rotation(max_bytes=20, max_backups=2), now=lambda: float(next(times))
    )
    for number in range(9):
        exporter.export(batch(b'{"n":%02d}' % number))  # 9 bytes with newline: two fit in a file
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 3
    assert files[-1] == "out.jsonl"
    assert all(name.startswith("out-2023-11-14T22-") for name in files[:-1])
    lines = [line for name in files for line in (tmp_path / name).read_bytes().splitlines()]
    assert lines == [b'{"n":%02d}' % number for number in (4, 5, 6, 7, 8)]


def test_files_are_rotated_by_age_and_old_backups_are_removed(open_file, batch, tmp_path):
    clock = [1_700_000_000.0]
    rotation = Rotation(max_bytes=0, max_age_s=60, max_backups=0, max_backup_age_s=100)
    exporter = open_file(rotation=rotation, now=lambda: clock[0])
    (tmp_path / "out-other.jsonl").touch()
    for _ in range(12):
        exporter.export(batch(b"{}"))
        clock[0] += 30
    assert [path.read_bytes().count(b"\n") for path in sorted(tmp_path.glob("out-2*"))] == [2, 2]
    assert (tmp_path / "out.jsonl").read_bytes() == b"{}\n{}\n"
    assert (tmp_path / "out-other.jsonl").exists()


@pytest.mark.parametrize("days", [400_000, 10**6, 10**30])
def test_backups_are_kept_if_the_maximum_age_precedes_the_epoch(open_file, batch, tmp_path, days):
    rotation = Rotation(max_bytes=1, max_backup_age_s=days * 86_400)
    exporter = open_file(rotation=rotation, now=lambda: 1_700_000_000.0)
    for _ in range(3):
        assert exporter.export(batch(b"{}")).error_type == ""
    assert len(list(tmp_path.iterdir())) == 3


def test_backups_created_in_the_same_millisecond_have_different_names(open_file, batch, tmp_path):
    exporter = open_file(rotation=Rotation(max_bytes=1), now=lambda: 1_700_000_000.0)
    for _ in range(5):
        exporter.export(batch(b"{}"))
    assert len(list(tmp_path.iterdir())) == 5


def test_rotation_recovers_after_a_new_file_failed_to_open(open_file, batch, tmp_path, monkeypatch):
    exporter = open_file(rotation=Rotation(max_bytes=1))
    exporter.export(batch(b"1"))
    monkeypatch.setattr(os, "open", raising(OSError(24, "Too many open files")))
    assert exporter.export(batch(b"2")).lost == {LossCause.WRITE_FAILED: 3}
    monkeypatch.undo()
    assert exporter.export(batch(b"3")).outcome is SUCCESS
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == [b"1\n", b"3\n"]


def test_shutdown_does_not_close_a_file_during_an_export(open_file, batch, tmp_path, monkeypatch):
    """If the file were closed, its descriptor could be reused before the export writes to it."""
    exporter = open_file()
    write, entered, resume = os.write, threading.Event(), threading.Event()

    def slow(fd, data):
        entered.set()
        resume.wait(60)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow)
    result = call_in_thread(exporter.export, batch(b"{}"))
    assert entered.wait(60)
    exporter.shutdown(0)
    resume.set()
    assert result.result().outcome is SUCCESS
    assert (tmp_path / "out.jsonl").read_bytes() == b"{}\n"
    assert str(tmp_path / "out.jsonl") not in open_files()
    assert exporter.export(batch()).lost == {LossCause.SHUTDOWN: 3}


def test_a_removed_or_moved_file_is_recreated(open_file, batch, tmp_path):
    exporter = open_file()
    exporter.export(batch(b"1"))
    (tmp_path / "out.jsonl").rename(tmp_path / "moved")
    exporter.export(batch(b"2"))
    (tmp_path / "out.jsonl").unlink()
    exporter.export(batch(b"3"))
    assert (tmp_path / "moved").read_bytes() == b"1\n"
    assert (tmp_path / "out.jsonl").read_bytes() == b"3\n"


def test_samples_count_as_lost_while_another_file_has_the_path(open_file, batch, tmp_path, caplog):
    exporter = open_file(form=Form.PROTOBUF)
    path = tmp_path / "out.jsonl"
    path.rename(tmp_path / "moved")
    path.write_bytes(b"a host's name\n")
    for _ in range(2):
        assert exporter.export(batch()).lost == {LossCause.WRITE_FAILED: 3}
    (message,) = [record.getMessage() for record in caplog.records]
    assert "does not end with a complete message" in message
    assert path.read_bytes() == b"a host's name\n"
    path.unlink()
    assert not exporter.export(batch()).lost


def test_new_files_have_mode_600_and_rotation_preserves_a_changed_mode(open_file, batch, tmp_path):
    exporter = open_file(rotation=Rotation(max_bytes=1))
    path = tmp_path / "out.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    exporter.export(batch(b"1"))
    exporter.export(batch(b"2"))
    assert [stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()] == [0o640, 0o640]


@pytest.mark.parametrize(
    ("verbosity", "line"),
    [
        (Verbosity.BASIC, "debug: profiles: 2, samples: 5, bytes: 10\n"),
        (
            Verbosity.DETAILED,
            (
                "debug: profiles: 2, samples: 5, bytes: 10, start: 2023-11-14T22:13:20.000+00:00,"
                " seconds: 5.000, bytes per sample: 2.0, on_cpu samples by profile: 3 2\n"
            ),
        ),
    ],
)
def test_the_debug_exporter_prints_sample_counts(batch, verbosity, line):
    out = io.StringIO()
    exporter = DebugExporter(verbosity=verbosity, out=out)
    assert exporter.export(batch(b"x" * 10, samples=(3, 2))).exported == 5
    assert out.getvalue() == line
    out.close()
    assert exporter.export(batch()).lost == {LossCause.WRITE_FAILED: 3}
