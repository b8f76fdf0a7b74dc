"""Threads off the CPU, as the programs keep them."""

import struct

import pytest

from otel_kprofiler.bpf import (
    KernelTypes,
    WaitOffsets,
    find_member_offsets,
    find_wait_offsets,
    pack_wait_config,
    parse_records,
    parse_threads,
)
from otel_kprofiler.bpf.waits import THREAD_BYTES, THREAD_ENDED, WaitThread
from otel_kprofiler.model import WaitState
from tests.bpf_object import object_btf
from tests.records import in_ring, pack_record

SLEEPING = WaitThread(7, 5, 1000, 0, (10, 20, 30, 40, 50), 3, 2, 100, 101, 1, 9)


def pack(thread, task=0xFFFF888000000000):
    return struct.pack(
        "=12Q6I", thread.id, task, thread.start_time_ns, thread.off_since_ns, thread.woken_ns,
        *thread.by_state, thread.waits, thread.below_ns, thread.tgid, thread.tid, 4711,
        thread.state, thread.epoch, 1,
    )  # fmt: skip


def test_python_and_the_compiled_program_agree_on_every_struct():
    btf = object_btf()
    times = ("id", "task", "start_time_ns", "off_since_ns", "woken_ns", "total_ns")
    assert find_member_offsets(btf, "thread", times) == (0, 8, 16, 24, 32, 40)
    rest = ("waits", "below_ns", "tgid", "tid", "initial_tid", "state", "epoch", "cpu")
    assert find_member_offsets(btf, "thread", rest) == (80, 88, 96, 100, 104, 108, 112, 116)
    assert KernelTypes(btf).size("thread") == THREAD_BYTES
    assert KernelTypes(btf).size("wait_line") == 64
    assert find_member_offsets(btf, "wait_line", ("no_room", "missed", "lost")) == (0, 8, 16)
    names = ("state_offset", "on_rq_offset", "epoch")
    assert find_member_offsets(btf, "wait_config", names) == (0, 8, 16)
    assert pack_wait_config(WaitOffsets(1, 2), 3) == struct.pack("=3Q", 1, 2, 3)


def test_threads_are_parsed():
    stopped = SLEEPING._replace(id=8, state=WaitState.STOPPED)
    assert list(parse_threads(pack(SLEEPING) + pack(stopped))) == [SLEEPING, stopped]
    assert next(parse_threads(pack(SLEEPING._replace(state=99)))).state == WaitState.RUNNABLE
    with pytest.raises(ValueError, match="cut off"):
        list(parse_threads(pack(SLEEPING)[:-1]))


def test_sums_of_ended_threads_are_between_the_samples():
    ended = bytearray(pack_record(3, (), start_ns=0, kernel=0, user=0))
    struct.pack_into("=HH", ended, 66, 2, 0)
    struct.pack_into("=H", ended, 74, THREAD_ENDED)
    found = []
    chunk = in_ring(bytes(ended) + pack(SLEEPING))
    assert parse_records(chunk, ended=found) == []
    assert found == [SLEEPING]
    assert parse_records(chunk) == []
    with pytest.raises(ValueError, match="cut off"):
        parse_records(in_ring(bytes(ended) + pack(SLEEPING)[:-8]))


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
