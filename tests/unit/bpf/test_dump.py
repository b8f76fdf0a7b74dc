"""Rows written by the thread-dumping BPF program are parsed."""

import struct

import pytest

from otel_kprofiler.bpf.dump import HAS_STACKS, ON_A_CPU, parse_dump_rows
from otel_kprofiler.model import WaitState

# time, monotonic, clock, arrived, ran, ran until, lacking, queued, switches, state;
# tgid, tid, flags, unused; comm
ROW = struct.Struct("=10Q3Ii16s")


def row(*, state=1, flags=HAS_STACKS, arrived=5_000, ran=50, until=4_000, lacking=1_100, queued=0):
    fields = (9_000, 8_000, 7_000, arrived, ran, until, lacking, queued, 3, state, 42, 43, flags, 0)
    return parse_dump_rows(ROW.pack(*fields, b"pool-1\0garbage"))[0]


def test_a_row_contains_the_values_written_by_the_bpf_program():
    parsed = row()
    assert (parsed.tgid, parsed.tid, parsed.comm, parsed.switches) == (42, 43, b"pool-1", 3)
    assert (parsed.time_ns, parsed.monotonic_ns, parsed.clock_ns) == (9_000, 8_000, 7_000)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": 0}, WaitState.RUNNABLE),
        ({"state": 0x1}, WaitState.INTERRUPTIBLE),
        ({"state": 0x2}, WaitState.UNINTERRUPTIBLE),
        ({"state": 0x102}, WaitState.UNINTERRUPTIBLE),  # killable
        ({"state": 0x4}, WaitState.STOPPED),
        ({"state": 0x8}, WaitState.STOPPED),
        ({"state": 0x402}, WaitState.IDLE),
        ({"state": 0x200}, WaitState.RUNNABLE),  # being woken
        ({"state": 0x1, "queued": 6_000}, WaitState.INTERRUPTIBLE),  # delayed dequeue
        ({"state": 0x1, "flags": ON_A_CPU}, None),
    ],
)
def test_wait_states_match_task_states(fields, expected):
    assert row(**fields).wait_state is expected


@pytest.mark.parametrize(
    ("fields", "since_ns"),
    [
        ({}, 5_050),  # the last run began at 5,000, and lasted 50
        # after a change of scheduling class, ran_ns includes earlier runs
        ({"ran": 10_000}, 5_100),
        ({"arrived": 0}, 5_100),  # the last arrival is unknown
        ({"arrived": 0, "until": 0}, 0),
        ({"queued": 6_000, "state": 0}, 6_000),
        ({"queued": 6_000}, 5_050),
    ],
)
def test_a_wait_begins_when_the_thread_last_stopped_running(fields, since_ns):
    assert row(**fields).since_ns == since_ns


def test_exited_threads_are_recognized():
    assert row(state=0x20).has_ended
    assert row(state=0x80).has_ended
    assert not row().has_ended


def test_truncated_rows_are_rejected():
    with pytest.raises(ValueError, match="truncated"):
        parse_dump_rows(bytes(ROW.size + 1))
