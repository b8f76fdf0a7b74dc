"""Off-CPU records are parsed in the format that the BPF programs write."""

import mmap
import struct

import pytest

from otel_kprofiler.bpf import (
    PLACES,
    WAIT_UNIT_NS,
    KernelTypes,
    ThreadTable,
    WaitOffsets,
    find_wait_offsets,
    parse_records,
    parse_threads,
)
from otel_kprofiler.bpf.wait_maps import (
    THREAD_BYTES,
    THREAD_ENDED,
    WAIT_BEGUN,
    WAIT_ENDED,
    WAIT_WOKEN,
    WaitConfig,
    WaitCounts,
    WaitLines,
    WaitRecords,
    WaitSettings,
    WaitThread,
)
from otel_kprofiler.model import OFF_CPU, WaitState, Waker
from tests.bpf_object import check_adjacent, object_btf
from tests.records import in_ring, pack_record

THRESHOLD_NS = 77 * WAIT_UNIT_NS
SLEEPING = WaitThread(7, 5, 1000, 0, (10, 20, 30, 40, 50), 3, 2, 100, 101, 1, 9, THRESHOLD_NS, 3)


def pack(thread, task=0xFFFF888000000000):
    return struct.pack(
        "=3Q10I8Q2Q8I16s", task, thread.off_since_ns, 33, 4711, thread.state, thread.epoch, 1,
        thread.flags, thread.threshold_ns // WAIT_UNIT_NS, 88, 66, 67, 1,
        *thread.by_state, thread.waits, thread.below_ns, thread.start_time_ns,
        thread.id, thread.woken_ns, thread.tgid, thread.tid, 1, 44, 45, 0, 0, 0, b"waker",
    )  # fmt: skip


def test_python_and_the_bpf_object_agree_on_every_struct_layout():
    types = KernelTypes(object_btf())
    check_adjacent(types, "thread", ("task", "off_since_ns", "run_delay_ns", "initial_tid"))
    wait = ("initial_tid", "state", "epoch", "cpu", "flags", "threshold", "likely")
    check_adjacent(types, "thread", (*wait, "usual", "usual_preempted", "claims"), 4, 24)
    check_adjacent(types, "thread", ("total_ns",), first=64)
    check_adjacent(
        types, "thread", ("waits", "below_ns", "start_time_ns", "id", "woken_ns", "tgid"), 8, 104
    )
    last = ("tgid", "tid", "in_namespace", "waker_tgid", "waker_tid", "ran_ns")
    check_adjacent(types, "thread", last, 4, 144)
    check_adjacent(types, "thread", ("begun_ns", "waker_comm"), first=168)
    assert types.size("thread") == THREAD_BYTES
    assert types.size("bucket") == PLACES * 8
    assert types.size("wait_line") == 192
    check_adjacent(types, "wait_line", (*WaitCounts._fields, "offset_ns", "set_ns"))
    check_adjacent(types, "wait_layout", (*WaitOffsets._fields, "bucket_mask"))
    assert types.size("wait_layout") == len(WaitOffsets(1, 2, 3).pack(64))
    check_adjacent(types, "wait_config", WaitConfig._fields)


def test_settings_are_written_where_the_bpf_program_reads_them(tmp_path):
    path = tmp_path / "map"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        settings = WaitSettings(file.fileno())
        settings.change(WaitConfig(*range(10, 16)))
        settings.allow_late_begins(16)
        settings.change(WaitConfig(*range(10, 16)))
        settings.close()
    assert path.read_bytes() == struct.pack("=7Q", *range(10, 17)).ljust(mmap.PAGESIZE, b"\0")


def test_the_most_recently_measured_clock_offset_is_used(tmp_path):
    path = tmp_path / "map"
    lines = [[*range(6), -5, 100], [*range(6), -7, 300], [*range(6), 9, 200]]
    data = b"".join(struct.pack("=8q128x", *line) for line in lines)
    path.write_bytes(data.ljust(mmap.PAGESIZE, b"\0"))
    with open(path, "rb") as file:
        lines = WaitLines(file.fileno(), 3)
        assert lines.offset_ns() == -7
        assert lines.counts() == WaitCounts(0, 3, 6, 9, 12, 15)
        lines.close()


def test_packed_wait_offsets_end_with_the_bucket_mask():
    assert WaitOffsets(*range(1, 15)).pack(64) == struct.pack("=15Q", *range(1, 15), 63)


@pytest.mark.parametrize("places", [16, 4096, 3 * 4096])
def test_all_occupied_slots_are_read(tmp_path, places):
    taken = sorted({0, 5, places // 2, places - 1})
    tasks, threads = [0] * places, bytearray(places * THREAD_BYTES)
    for at in taken:
        tasks[at] = 0xFFFF888000000000 + at
        threads[at * THREAD_BYTES : (at + 1) * THREAD_BYTES] = pack(SLEEPING._replace(id=at))
    paths = tmp_path / "buckets", tmp_path / "threads"
    for path, data in zip(paths, (struct.pack(f"={places}Q", *tasks), threads), strict=True):
        path.write_bytes(bytes(data).ljust(-(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE, b"\0"))
    with open(paths[0], "rb") as buckets, open(paths[1], "rb") as table:
        read = ThreadTable(buckets.fileno(), table.fileno(), places // PLACES).read()
    assert [thread.id for thread in parse_threads(read)] == taken


def test_thread_records_are_parsed_and_truncated_records_are_rejected():
    stopped = SLEEPING._replace(id=8, state=WaitState.STOPPED)
    assert list(parse_threads(pack(SLEEPING) + pack(stopped))) == [SLEEPING, stopped]
    assert next(parse_threads(pack(SLEEPING._replace(state=99)))).state == WaitState.RUNNABLE
    with pytest.raises(ValueError, match="truncated"):
        list(parse_threads(pack(SLEEPING)[:-1]))


def in_phase(phase):
    record = bytearray(pack_record(3, (), start_ns=0, kernel=0, user=0))
    struct.pack_into("=Q", record, 48, 1000)
    struct.pack_into("=H", record, 82, 2)
    struct.pack_into("=H", record, 90, phase)
    return bytes(record)


def test_wait_totals_for_exited_threads_are_parsed_but_not_returned_as_samples():
    result = WaitRecords([], [])
    chunk = in_ring(in_phase(THREAD_ENDED) + pack(SLEEPING))
    assert parse_records(chunk, waits=result) == []
    assert result == ([], [SLEEPING._replace(ended_ns=3)])
    assert parse_records(chunk) == []
    with pytest.raises(ValueError, match="truncated"):
        parse_records(in_ring(in_phase(THREAD_ENDED) + pack(SLEEPING)[:-8]))


def test_wait_starts_and_ends_are_parsed_in_order():
    result = WaitRecords([], [])
    end = struct.pack("=4Q4I16s", 1000, 20, 10, 99, 2, 3 | WAIT_WOKEN, 8, 9, b"other")
    chunk = in_ring(in_phase(WAIT_BEGUN)) + in_ring(in_phase(WAIT_ENDED) + end)
    assert parse_records(chunk, waits=result) == []
    first, second = result.waits
    assert (first.sample.kind, first.sample.value, first.end) == (OFF_CPU, 1000, None)
    waker = Waker(8, 9, b"other")
    assert second.end == (1000, 20, 10, 99, WaitState.UNINTERRUPTIBLE, 3 | WAIT_WOKEN, waker)
    with pytest.raises(ValueError, match="is truncated"):
        parse_records(in_ring(in_phase(WAIT_ENDED) + end[:-8]))


@pytest.mark.parametrize(
    ("since", "woken", "state", "passed"),
    [
        (0, 0, 1, (0, 0)),  # on a CPU
        (1000, 0, 1, (500, 0)),
        (1000, 1200, 1, (200, 300)),
        (1000, 1200, 0, (500, 0)),  # the thread was runnable, so it did not sleep
        (1000, 900, 1, (500, 0)),  # the thread was woken during an earlier wait
        (1000, 1000, 1, (0, 500)),
        (1000, 1600, 1, (500, 0)),  # the thread was woken after the read started
        (1600, 0, 1, (0, 0)),
    ],
)
def test_elapsed_time_of_an_ongoing_wait_is_computed(since, woken, state, passed):
    assert SLEEPING._replace(off_since_ns=since, woken_ns=woken, state=state).passed(1500) == passed


def test_a_kernel_whose_structs_lack_required_members_is_rejected():
    assert find_wait_offsets(KernelTypes(object_btf())) is None
