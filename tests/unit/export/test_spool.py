"""Intact batches in a spool are recovered in order, whatever happened to its files."""

import contextlib
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import ExportQueue, ExportResult, ProfileExporter
from otel_kprofiler.export.segments import MAGIC, Kind, Totals, unpack_batch, unpack_totals
from otel_kprofiler.export.spool import Spool
from otel_kprofiler.model import Batch, Form, LossCause, ProfileSamples, SampleCounts

SECOND = 1_000_000_000


def numbered(number, size=40):
    payload = b"%d:" % number + b"x" * size
    profiles = (ProfileSamples("on_cpu", number), ProfileSamples("off_cpu", 1))
    return Batch(payload, Form.PROTOBUF, profiles, number * SECOND, (number + 1) * SECOND)


def content(batch):
    return (
        batch.payload, batch.form, batch.profiles, batch.start_unix_ns, batch.end_unix_ns
    )  # fmt: skip


def fill(directory, count, **options):
    spool = Spool(str(directory), **options)
    return spool, [spool.append(numbered(number)) for number in range(1, count + 1)]


def abandon(spool):
    """Stops a spool as SIGKILL would: nothing more is written, and the lock is released."""
    spool._release()


def written(directory, count, end=Spool.close, **options):
    """Writes batches and ends the spool. Returns the batches and the path of the only segment."""
    spool, stored = fill(directory, count, **options)
    end(spool)
    (path,) = segments(directory)
    return stored, path


def total(stored):
    return sum((batch.samples for batch in stored), SampleCounts())


def segments(directory):
    return sorted(path for path in Path(directory).iterdir() if path.suffix == ".spool")


def damage(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


class Nowhere(ProfileExporter):
    name, form, max_bytes = "nowhere", Form.PROTOBUF, None

    def export(self, batch):
        return ExportResult.failure(batch, LossCause.RETRIES_EXHAUSTED, "")

    def find_outage(self):
        return "down"

    def shutdown(self, timeout_millis=30_000):
        pass


@pytest.fixture
def open_spool(tmp_path):
    """Returns a function that opens a spool, which is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda path=tmp_path, **options: stack.enter_context(
            contextlib.closing(Spool(str(path), **options))
        )


def waiting(spool):
    return [spool.read(stored) for stored in spool.waiting]


@pytest.mark.parametrize("ending", [Spool.close, abandon])
def test_batches_are_recovered_in_order_and_unchanged(tmp_path, open_spool, ending):
    spool, stored = fill(tmp_path, 3)
    assert content(spool.read(stored[1])) == content(numbered(2))
    json_batch = Batch(b"{}", Form.JSON, (), 5, 6)
    spool.append(json_batch)
    ending(spool)
    again = open_spool()
    expected = [numbered(1), numbered(2), numbered(3), json_batch]
    assert list(map(content, waiting(again))) == list(map(content, expected))
    assert not again.damaged
    assert again.unknown_since_unix_ns == (0 if ending is Spool.close else 4 * SECOND)


def test_batches_settled_before_a_crash_are_not_recovered_from_the_spool(tmp_path, open_spool):
    spool, stored = fill(tmp_path, 3)
    spool.settle(stored[0].number, stored[0].samples)
    abandon(spool)
    again = Spool(str(tmp_path))
    assert [batch.payload[:2] for batch in waiting(again)] == [b"2:", b"3:"]
    assert not again.damaged
    for stored in again.waiting:
        again.settle(stored.number, stored.samples)
    again.close()
    assert len(segments(tmp_path)) == 1
    last = open_spool()
    assert (len(last.waiting), last.damaged, last.unknown_since_unix_ns) == (0, {}, 0)


@pytest.mark.system
def test_a_truncated_segment_is_recovered_up_to_its_last_intact_record(tmp_path):
    stored, whole = written(tmp_path / "whole", 2, abandon, fsync=False)
    data = whole.read_bytes()
    ends = [frame.offset + frame.size for frame in stored]
    assert ends[-1] == len(data)
    for cut in range(len(data)):
        directory = tmp_path / str(cut)
        directory.mkdir()
        (directory / whole.name).write_bytes(data[:cut])
        again = Spool(str(directory), fsync=False)
        complete = sum(1 for end in ends if end <= cut)
        assert [b.payload for b in waiting(again)] == [
            numbered(number).payload for number in range(1, complete + 1)
        ]
        fresh = again.append(numbered(9))
        abandon(again)
        after = Spool(str(directory), fsync=False)
        assert [b.payload for b in waiting(after)][complete:] == [numbered(9).payload]
        assert fresh.number == after.waiting[-1].number
        assert not after.damaged
        after.close()


@pytest.mark.system
def test_a_corrupt_byte_invalidates_only_its_record(tmp_path):
    stored, whole = written(tmp_path / "whole", 4, fsync=False)
    data = whole.read_bytes()
    for position in range(len(data)):
        if position == len(MAGIC) - 1:
            continue  # this byte is the format version
        directory = tmp_path / str(position)
        directory.mkdir()
        damaged = bytearray(data)
        damaged[position] ^= 0x55
        (directory / whole.name).write_bytes(damaged)
        again = Spool(str(directory), fsync=False)
        hit = [frame for frame in stored if frame.offset <= position < frame.offset + frame.size]
        kept = [batch.samples for batch in stored if batch not in hit]
        assert [batch.samples for batch in again.waiting] == kept
        assert again.damaged == total(hit)
        in_close = position >= stored[-1].offset + stored[-1].size
        assert again.unknown_since_unix_ns == (5 * SECOND if in_close else 0)
        again.close()


def test_corruption_in_a_cleanly_closed_spool_is_not_reported_as_a_kill(tmp_path, caplog):
    stored, path = written(tmp_path, 3)
    damage(path, stored[1].offset + 20)
    queue = ExportQueue(Nowhere(), spool=Spool(str(tmp_path)))
    counts = queue.counts().kinds
    assert {kind: one.lost for kind, one in counts.items()} == {
        "on_cpu": {LossCause.SPOOL_DAMAGED: 2},
        "off_cpu": {LossCause.SPOOL_DAMAGED: 1},
    }
    assert {kind: one.queued for kind, one in counts.items()} == {"on_cpu": 4, "off_cpu": 2}
    assert "was killed" not in caplog.text
    queue.shutdown(0)


def test_batch_numbers_are_not_reused_after_delivery(tmp_path, open_spool):
    spool, stored = fill(tmp_path, 2)
    spool.settle(stored[1].number, stored[0].samples + stored[1].samples)
    abandon(spool)
    damage(*segments(tmp_path), stored[1].offset)
    again = Spool(str(tmp_path))
    assert (len(again.waiting), again.damaged) == (0, {})
    again.append(numbered(3))
    abandon(again)
    assert [batch.payload[:2] for batch in waiting(open_spool())] == [b"3:"]


@pytest.mark.parametrize("size", [0, 5, 60])
def test_an_unreadable_segment_is_treated_as_evidence_of_a_kill(tmp_path, open_spool, size):
    _, path = written(tmp_path, 3)
    os.truncate(path, size)
    again = Spool(str(tmp_path))
    assert (len(again.waiting), again.damaged, again.unknown_since_unix_ns) == (0, {}, 1)
    again.close()
    assert open_spool().unknown_since_unix_ns == 0


def test_duplicated_records_are_delivered_once(tmp_path, open_spool):
    _, path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes() * 2)
    again = open_spool()
    assert [batch.payload[:2] for batch in waiting(again)] == [b"1:", b"2:", b"3:"]
    assert not again.damaged


def test_only_records_in_an_unreadable_block_are_lost(tmp_path, open_spool, monkeypatch):
    spool, _ = fill(tmp_path, 0)
    stored = [spool.append(numbered(number, size=3000)) for number in range(1, 6)]
    spool.close()
    real = os.pread

    def failing(fd, size, at):
        if at == 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, at)

    monkeypatch.setattr(os, "pread", failing)
    again = open_spool()
    kept = [frame for frame in stored if frame.offset + frame.size <= 4096 or frame.offset >= 8192]
    assert [one.number for one in again.waiting] == [one.number for one in kept]
    assert again.damaged == total(one for one in stored if one not in kept) != {}


def test_a_segment_in_another_format_version_is_set_aside(tmp_path, caplog):
    _, path = written(tmp_path, 2)
    content = b"kpspool1" + path.read_bytes()[len(MAGIC) :]
    path.write_bytes(content)
    for _ in range(3):
        again = Spool(str(tmp_path))
        assert not again.waiting
        stored = again.append(numbered(7))
        assert stored.segment > int(path.stem)
        again.settle(stored.number, stored.samples)
        again.close()
        assert path.with_suffix(".spool.aside").read_bytes() == content
    warning = "written by another version (format kpspool1), which can send it; kept as"
    assert caplog.text.count(warning) == 1


def rotated(directory):
    """Creates a closed spool with three segments, and returns the batches in each segment."""
    spool, _ = fill(directory, 0, max_bytes=8 * 400)
    stored = [spool.append(numbered(number)) for number in range(1, 7)]
    by_segment = {path: [] for path in segments(directory)}
    for one in stored:
        by_segment[Path(directory) / f"{one.segment:020}.spool"].append(one)
    assert len(by_segment) >= 3
    return spool, by_segment


def change_version(path):
    path.write_bytes(b"kpspool1" + path.read_bytes()[len(MAGIC) :])


def aside(by_segment, *positions):
    """Changes the format version of some segments, and returns the other segments' batches."""
    for position in positions:
        change_version(list(by_segment)[position])
    left = [path for path in by_segment if path.read_bytes().startswith(MAGIC)]
    return [one for path in left for one in by_segment[path]]


@pytest.mark.parametrize("positions", [(0,), (1,), (0, 1), (-1,)])
@pytest.mark.parametrize("end", [Spool.close, abandon])
def test_samples_in_segments_that_were_set_aside_are_not_counted_as_lost(tmp_path, positions, end):
    spool, by_segment = rotated(tmp_path)
    end(spool)
    left = aside(by_segment, *positions)
    for _ in range(2):
        again = Spool(str(tmp_path))
        assert [batch.samples for batch in again.waiting] == [batch.samples for batch in left]
        assert again.damaged == {}
        abandon(again)


def test_a_kill_after_segments_have_been_set_aside_changes_no_counts(tmp_path, open_spool):
    spool, by_segment = rotated(tmp_path)
    spool.close()
    middle = list(by_segment)[1]
    change_version(middle)
    middle.rename(f"{middle}.aside")
    assert open_spool().damaged == {}


@pytest.mark.parametrize("is_delivered", [False, True])
def test_samples_lost_to_corruption_are_counted_even_if_another_segment_is_set_aside(
    tmp_path, open_spool, is_delivered
):
    spool, by_segment = rotated(tmp_path)
    (path, first), *_, (last_path, last) = by_segment.items()
    kept = path.read_bytes()
    for stored in first * is_delivered:
        spool.settle(stored.number, stored.samples)
    spool.close()
    if is_delivered:
        path.write_bytes(kept)
    aside(by_segment, 0)
    damage(last_path, last[-1].offset + 20)
    assert open_spool().damaged == last[-1].samples


@pytest.mark.parametrize("number", [1 << 62, (1 << 63) - 1, (1 << 64) - 1, 10**20 - 1])
def test_a_spool_file_whose_number_is_out_of_range_is_ignored(tmp_path, caplog, number):
    stored, path = written(tmp_path, 2)
    planted = path.with_name(f"{number:020}.spool")
    planted.write_bytes(path.read_bytes())
    again = Spool(str(tmp_path))
    assert [batch.samples for batch in again.waiting] == [batch.samples for batch in stored]
    assert "is ignored: its number is out of range" in caplog.text
    assert again.append(numbered(3)).number < 100
    again.close()
    assert planted.exists()


def test_running_out_of_segment_numbers_is_reported_with_the_spool_file(tmp_path):
    (tmp_path / f"{(1 << 62) - 1:020}.spool").touch(0o600)
    with pytest.raises(
        ExportError, match=r"04611686018427387903\.spool has the maximum segment number"
    ):
        Spool(str(tmp_path))


def test_the_sparse_tail_of_a_segment_is_not_read(tmp_path, open_spool):
    stored, path = written(tmp_path, 2, abandon)
    os.truncate(path, 8 << 30)
    tracemalloc.start()
    again = open_spool()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [batch.samples for batch in again.waiting] == [batch.samples for batch in stored]
    assert peak < 16 << 20
    assert again.unknown_since_unix_ns
    again.append(numbered(3))


def test_a_record_that_claims_to_be_a_gigabyte_invalidates_only_itself(tmp_path, open_spool):
    stored, path = written(tmp_path, 3)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, stored[1].offset + 4, 1 << 30)
    path.write_bytes(data)
    again = open_spool()
    assert [one.number for one in again.waiting] == [stored[0].number, stored[2].number]
    assert again.damaged == stored[1].samples


@pytest.mark.parametrize(
    "body",
    [
        b'{"settled": 1, "color": "red", "more": {"a": []}}', b'{"settled": -1}', b'{"done": 1e99}',
        b'{"settled": 4611686018427387904}',
        b"[1]", b"null", b"\xff", b"{}" + b" " * 100_000, b"[" * 4000, b'{"appended": true}',
        b'{"end_unix_ns": 99999999999999999999999}', b'{"done": 1}', b'{"done": {"on_cpu": -1}}',
        b'{"appended": {"on_cpu": true}}', b'{"appended": [["on_cpu", 1]]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Kind.BATCH, Kind.MARK, Kind.CLOSE, 77])
def test_intact_but_invalid_records_are_skipped(tmp_path, open_spool, kind, body):
    spool, stored = fill(tmp_path, 1)
    spool._write(kind, body)
    stored.append(spool.append(numbered(2)))
    spool.close()
    again = open_spool()
    is_record = kind in (Kind.MARK, Kind.CLOSE) and b"color" in body
    assert [batch.samples for batch in again.waiting] == [
        batch.samples for batch in stored[is_record:]
    ]
    assert again.damaged == (stored[0].samples if is_record else {})
    assert again.unknown_since_unix_ns == 0
    again.append(numbered(3))


HEAD = {
    "before": {"on_cpu": 3},
    "put_unix_ns": 1,
    "start_unix_ns": 5,
    "end_unix_ns": 6,
    "form": "protobuf",
    "profiles": [["on_cpu", 2], ["off_cpu", 0]],
    "rest": {"on_cpu": 4},
}


def test_the_header_of_a_batch_is_read():
    head = json.dumps(HEAD).encode()
    number, before, put_unix_ns, batch, rest = unpack_batch(
        struct.pack("<QI", 7, len(head)) + head + b"p"
    )
    profiles = (ProfileSamples("on_cpu", 2), ProfileSamples("off_cpu", 0))
    assert content(batch) == (b"p", Form.PROTOBUF, profiles, 5, 6)
    assert (number, before, put_unix_ns, rest) == (7, {"on_cpu": 3}, 1, {"on_cpu": 4})


@pytest.mark.parametrize(
    "wrong",
    [
        {"before": 3}, {"before": {"on_cpu": "3"}}, {"put_unix_ns": None}, {"end_unix_ns": -1},
        {"form": "xml"}, {"form": []}, {"profiles": {"on_cpu": 2}}, {"profiles": [2]},
        {"profiles": [["on_cpu"]]}, {"profiles": [[1, 2]]}, {"profiles": [["on_cpu", 1 << 63]]},
        {"rest": 1},
    ],
)  # fmt: skip
def test_a_batch_with_an_invalid_header_is_rejected(wrong):
    head = json.dumps({**HEAD, **wrong}).encode()
    with pytest.raises(ValueError, match="not"):
        unpack_batch(struct.pack("<QI", 7, len(head)) + head)


def test_a_deleted_current_segment_is_restored_on_append_or_close(tmp_path, open_spool, caplog):
    spool, stored = fill(tmp_path, 2)
    for number, remove in enumerate((segments, lambda path: [path / "lock"]), start=3):
        for path in remove(tmp_path):
            path.unlink()
        stored.append(spool.append(numbered(number)))
        assert "was removed" in caplog.text
        caplog.clear()
        with pytest.raises(ExportError, match="is in use"):
            Spool(str(tmp_path))
    assert spool.read(stored[0]).payload == numbered(1).payload
    segments(tmp_path)[0].unlink()
    spool.close()
    again = open_spool()
    assert [batch.payload[:2] for batch in waiting(again)] == [b"1:", b"2:", b"3:", b"4:"]
    assert (again.damaged, again.unknown_since_unix_ns) == ({}, 0)


def test_a_removed_directory_is_recreated(tmp_path, open_spool, caplog):
    directory = tmp_path / "spool"
    spool, stored = fill(directory, 6, max_bytes=2000)
    old = [one for one in stored if one.segment != stored[-1].segment]
    assert old
    shutil.rmtree(directory)
    fresh = spool.append(numbered(7))
    assert "the directory was removed" in caplog.text
    assert spool.read(fresh).payload == numbered(7).payload
    assert spool.read(stored[-1]).payload == numbered(6).payload
    with pytest.raises(FileNotFoundError):
        spool.read(stored[0])
    abandon(spool)
    again = open_spool(directory)
    kept = [batch.samples for batch in [*stored[len(old) :], fresh]]
    assert [batch.samples for batch in again.waiting] == kept
    assert again.damaged == total(old)


def test_a_different_spool_at_the_same_path_is_not_touched(tmp_path, open_spool):
    spool, _ = fill(tmp_path / "spool", 1)
    fill(tmp_path / "other", 2)[0].close()
    (tmp_path / "spool").rename(tmp_path / "away")
    (tmp_path / "other").rename(tmp_path / "spool")
    with pytest.raises(OSError, match="another spool is now at this path"):
        spool.append(numbered(2))
    spool.close()
    assert len(open_spool(tmp_path / "spool").waiting) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change the owner of files")
@pytest.mark.parametrize(("owner", "mode"), [(65534, 0o700), (0, 0o770), (0, 0o1703)])
def test_a_directory_writable_by_other_users_is_rejected(tmp_path, owner, mode):
    tmp_path.chmod(mode)
    os.chown(tmp_path, owner, owner)
    with pytest.raises(ExportError, match="is not safe") as caught:
        Spool(str(tmp_path))
    assert "chmod 700" in caught.value.hint


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "foreign"])
def test_symlinks_and_segments_owned_by_other_users_are_not_touched(tmp_path, kind, caplog):
    directory = tmp_path / "spool"
    spool, stored = fill(directory, 3, max_bytes=2000)
    spool.close()
    path = next(path for path in segments(directory) if int(path.stem) == stored[1].segment)
    assert stored[0].segment != stored[1].segment != stored[2].segment
    path.rename(tmp_path / "content")
    if kind == "link":
        path.symlink_to(tmp_path / "content")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif os.geteuid() == 0:
        path.write_bytes((tmp_path / "content").read_bytes())
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("needs root, to change the owner of files")
    again = Spool(str(directory))
    assert f"{path.name} is ignored" in caplog.text
    assert [batch.samples for batch in again.waiting] == [stored[0].samples, stored[2].samples]
    assert again.damaged == stored[1].samples
    for batch in again.waiting:
        again.settle(batch.number, batch.samples)
    again.close()
    assert path.is_symlink() or path.exists()


def test_batches_age_while_the_spool_is_closed(tmp_path, monkeypatch):
    fill(tmp_path, 1)[0].close()
    later = time.time() + 3600
    monkeypatch.setattr("otel_kprofiler.export.spool.time.time", lambda: later)
    spool = Spool(str(tmp_path), max_age_s=1800)
    assert spool.find_overdue(spool.waiting, 0) == ([spool.waiting[0]], LossCause.SPOOL_AGED)
    spool.close()


def test_a_second_writer_to_a_spool_is_rejected(tmp_path):
    spool = Spool(str(tmp_path))
    with pytest.raises(ExportError, match="is in use"):
        Spool(str(tmp_path))
    spool.close()
    Spool(str(tmp_path)).close()


def test_the_error_for_an_unusable_spool_directory_names_the_setting(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ExportError, match="cannot be used") as caught:
        Spool(str(tmp_path / "file" / "below"))
    assert "sending_queue.storage" in caught.value.hint


def test_a_failed_write_leaves_the_spool_unchanged(tmp_path, open_spool, monkeypatch):
    spool, _ = fill(tmp_path, 1)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:-1], at))
    with pytest.raises(OSError, match="No space"):
        spool.append(numbered(2, size=9000))
    monkeypatch.undo()
    spool.append(numbered(3))
    spool.close()
    again = open_spool()
    assert [batch.payload[:2] for batch in waiting(again)] == [b"1:", b"3:"]
    assert (again.damaged, again.unknown_since_unix_ns) == ({}, 0)


def test_settling_a_segments_batches_frees_space_on_a_full_disk(tmp_path, open_spool, monkeypatch):
    spool, stored = fill(tmp_path, 3)
    (first,) = segments(tmp_path)
    real = os.pwrite

    def pwrite(fd, data, at):
        return 0 if first.exists() else real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        spool.settle(stored[0].number, stored[0].samples)
    with pytest.raises(OSError, match="No space"):
        spool.append(numbered(4))
    spool.settle(stored[2].number, stored[1].samples + stored[2].samples)
    spool.append(numbered(5))
    abandon(spool)
    again = open_spool()
    assert [batch.payload[:2] for batch in waiting(again)] == [b"5:"]
    assert not again.damaged


def test_corruption_is_counted_once_across_restarts(tmp_path):
    spool, stored = fill(tmp_path, 3, max_bytes=2000)
    abandon(spool)
    path = next(path for path in segments(tmp_path) if int(path.stem) == stored[1].segment)
    assert stored[0].segment != stored[1].segment != stored[2].segment
    damage(path, stored[1].offset + 20)
    for expected in (stored[1].samples, {}, {}):
        again = Spool(str(tmp_path), max_bytes=2000)
        assert (again.damaged, len(again.waiting)) == (expected, 2)
        abandon(again)


def test_the_undelivered_part_of_a_window_is_counted_once_after_a_kill(tmp_path):
    rest = SampleCounts({"on_cpu": 7})
    spool = Spool(str(tmp_path))
    for batch, after in ((numbered(1), numbered(2).sample_counts), (numbered(2), None)):
        spool.append(batch, after)
    spool.append(numbered(3), rest)
    abandon(spool)
    for expected in (rest, {}, {}):
        again = Spool(str(tmp_path))
        assert (again.damaged, len(again.waiting)) == (expected, 3)
        assert again.earlier == numbered(1).sample_counts + numbered(5).sample_counts + rest + (
            SampleCounts({"off_cpu": 1})
        )
        abandon(again)
    assert again.earlier_lost == {"on_cpu": {LossCause.SPOOL_DAMAGED: 7}}


def test_recorded_losses_are_reported_by_every_later_run(tmp_path):
    spool, stored = fill(tmp_path, 3)
    spool.settle(stored[0].number, stored[0].samples, {"on_cpu": {LossCause.REJECTED: 1}})
    spool.settle(stored[1].number, stored[1].samples, {"on_cpu": {LossCause.REJECTED: 2}})
    abandon(spool)
    for _ in range(3):
        again = Spool(str(tmp_path))
        assert again.earlier == total(stored)
        assert again.earlier_lost == {"on_cpu": {LossCause.REJECTED: 3}}
        abandon(again)


def test_samples_in_a_split_batch_are_not_counted_twice(tmp_path):
    spool, (stored,) = fill(tmp_path, 1)
    part = Batch(b"p", Form.PROTOBUF, (ProfileSamples("off_cpu", 1),), 1, 2)
    spool.append(part, is_part=True)
    spool.settle(stored.number, stored.samples - part.sample_counts)
    abandon(spool)
    again = Spool(str(tmp_path))
    assert [batch.payload for batch in waiting(again)] == [b"p"]
    assert (again.earlier, again.damaged) == (stored.samples, {})
    abandon(again)


def test_unrelated_files_are_not_touched(tmp_path):
    (tmp_path / "notes.spool").write_bytes(MAGIC)
    Spool(str(tmp_path)).close()
    assert (tmp_path / "notes.spool").read_bytes() == MAGIC


WRITER = """
import sys
sys.path.insert(0, {here!r})
from test_spool import numbered
from otel_kprofiler.export.spool import Spool
spool = Spool(sys.argv[1], max_bytes=50_000)
for number in range(1, 1_000_000):
    stored = spool.append(numbered(number))
    print(number, flush=True)
    if number % 3 == 0:
        spool.settle(number - 1, stored.samples)
"""


@pytest.mark.system
@pytest.mark.parametrize("said", [1, 40, 200])
def test_written_batches_survive_sigkill(tmp_path, said):
    script = WRITER.format(here=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "spool"], stdout=subprocess.PIPE
    )
    for _ in range(said):
        line = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    line = (line + process.stdout.read()).split()[-1]
    process.stdout.close()
    process.wait()
    spool = Spool(str(tmp_path / "spool"))
    numbers = [int(batch.payload.partition(b":")[0]) for batch in waiting(spool)]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
    assert not numbers or numbers[-1] >= int(line)
    spool.close()


def test_totals_of_many_kinds_and_causes_are_read_back():
    kinds = [f"tracepoint_{number:02}:of_a_long_system_name" for number in range(40)]
    lost = {f"{kind}\t{cause.value}": 1 << 40 for kind in kinds for cause in LossCause}
    counts = SampleCounts(dict.fromkeys(kinds, 1 << 40))
    totals = Totals(5, 7, counts, counts, SampleCounts(lost), counts)
    packed = totals.pack()
    assert len(packed) > 4096
    assert unpack_totals(packed) == totals
