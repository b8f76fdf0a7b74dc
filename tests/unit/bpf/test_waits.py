"""Threads off the CPU, as the programs keep them."""

import mmap
import struct

import pytest

from otel_kprofiler.bpf import (
    KernelTypes,
    WaitOffsets,
    find_member_offsets,
    find_wait_offsets,
    parse_records,
    parse_threads,
)
from otel_kprofiler.bpf.waits import (
    THREAD_BYTES,
    THREAD_ENDED,
    WAIT_BEGUN,
    WAIT_ENDED,
    WAIT_WOKEN,
    WaitConfig,
    WaitCounts,
    WaitRecords,
    WaitSettings,
    WaitThread,
)
from otel_kprofiler.model import OFF_CPU, WaitState, Waker
from tests.bpf_object import object_btf
from tests.records import in_ring, pack_record

SLEEPING = WaitThread(7, 5, 1000, 0, (10, 20, 30, 40, 50), 3, 2, 100, 101, 1, 9, 77, 3)


def pack(thread, task=0xFFFF888000000000):
    return struct.pack(
        "=13Q12I16s", thread.id, task, thread.start_time_ns, thread.off_since_ns, thread.woken_ns,
        *thread.by_state, thread.waits, thread.below_ns, 66, thread.tgid, thread.tid, 4711,
        thread.state, thread.epoch, 1, thread.threshold_ns, 88, thread.flags, 44, 45, 1, b"waker",
    )  # fmt: skip


def test_python_and_the_compiled_program_agree_on_every_struct():
    btf = object_btf()
    times = ("id", "task", "start_time_ns", "off_since_ns", "woken_ns", "total_ns")
    assert find_member_offsets(btf, "thread", times) == (0, 8, 16, 24, 32, 40)
    rest = ("waits", "below_ns", "usual_ns", "tgid", "tid", "initial_tid", "state", "epoch", "cpu")
    assert find_member_offsets(btf, "thread", rest) == (80, 88, 96, 104, 108, 112, 116, 120, 124)
    last = ("threshold_ns", "likely_ns", "flags", "waker_tgid", "in_namespace", "waker_comm")
    assert find_member_offsets(btf, "thread", last) == (128, 132, 136, 140, 148, 152)
    assert KernelTypes(btf).size("thread") == THREAD_BYTES
    assert KernelTypes(btf).size("wait_line") == 128
    counters = find_member_offsets(btf, "wait_line", WaitCounts._fields)
    assert counters == tuple(range(0, 8 * len(WaitCounts._fields), 8))
    names = [f"{name}_offset" for name in WaitOffsets._fields if name != "iowait_mask"]
    names = [*names[:3], "iowait_mask", *names[3:], *WaitConfig._fields]
    assert find_member_offsets(btf, "wait_config", names) == tuple(range(0, 112, 8))


def test_settings_are_written_where_the_program_reads_them(tmp_path):
    path = tmp_path / "map"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        settings = WaitSettings(file.fileno(), WaitOffsets(*range(1, 10)))
        settings.change(WaitConfig(*range(10, 15)))
        settings.close()
    assert path.read_bytes() == struct.pack("=14Q", *range(1, 15)).ljust(mmap.PAGESIZE, b"\0")


def test_threads_are_parsed():
    stopped = SLEEPING._replace(id=8, state=WaitState.STOPPED)
    assert list(parse_threads(pack(SLEEPING) + pack(stopped))) == [SLEEPING, stopped]
    assert next(parse_threads(pack(SLEEPING._replace(state=99)))).state == WaitState.RUNNABLE
    with pytest.raises(ValueError, match="cut off"):
        list(parse_threads(pack(SLEEPING)[:-1]))


def in_phase(phase):
    record = bytearray(pack_record(3, (), start_ns=0, kernel=0, user=0))
    struct.pack_into("=Q", record, 48, 1000)
    struct.pack_into("=H", record, 66, 2)
    struct.pack_into("=H", record, 74, phase)
    return bytes(record)


def test_sums_of_ended_threads_are_between_the_samples():
    found = WaitRecords([], [])
    chunk = in_ring(in_phase(THREAD_ENDED) + pack(SLEEPING))
    assert parse_records(chunk, waits=found) == []
    assert found == ([], [SLEEPING])
    assert parse_records(chunk) == []
    with pytest.raises(ValueError, match="cut off"):
        parse_records(in_ring(in_phase(THREAD_ENDED) + pack(SLEEPING)[:-8]))


def test_begins_and_ends_come_in_order():
    found = WaitRecords([], [])
    end = struct.pack("=3Q6I16s", 1000, 20, 10, 99, 2, 3 | WAIT_WOKEN, 8, 9, 0, b"other")
    chunk = in_ring(in_phase(WAIT_BEGUN)) + in_ring(in_phase(WAIT_ENDED) + end)
    assert parse_records(chunk, waits=found) == []
    first, second = found.waits
    assert (first.sample.kind, first.sample.value, first.end) == (OFF_CPU, 1000, None)
    waker = Waker(8, 9, b"other")
    assert second.end == (1000, 20, 10, 99, WaitState.UNINTERRUPTIBLE, 3 | WAIT_WOKEN, waker)
    with pytest.raises(ValueError, match="cut off"):
        parse_records(in_ring(in_phase(WAIT_ENDED) + end[:-8]))


@pytest.mark.parametrize(
    ("since", "woken", "state", "passed"),
    [
        (0, 0, 1, (0, 0)),  # on a CPU
        (1000, 0, 1, (500, 0)),
        (1000, 1200, 1, (200, 300)),
        (1000, 1200, 0, (500, 0)),  # it did not sleep
        (1000, 900, 1, (0, 500)),
        (1000, 1600, 1, (500, 0)),  # woken after the reading began
        (1600, 0, 1, (0, 0)),
    ],
)
def test_what_has_passed_of_a_wait(since, woken, state, passed):
    thread = SLEEPING._replace(off_since_ns=since, woken_ns=woken, state=state)
    assert thread.passed(1500) == passed


def test_a_kernel_without_the_members_is_refused():
    assert find_wait_offsets(KernelTypes(object_btf())) is None
