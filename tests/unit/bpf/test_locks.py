"""Lock contention layouts are packed; lock contention counters and records are parsed."""

import os
import struct

from otel_kprofiler.bpf import KernelTypes, find_lock_offsets, pack_lock_layout, parse_records
from otel_kprofiler.bpf.layout import FIRST_EVENT, number_kinds
from otel_kprofiler.bpf.locks import LOCK_PHASE, LockOffsets, parse_lock_lines
from otel_kprofiler.model import LOCK_CONTENTION, LockHolder, LockTotal, LockWait
from tests.bpf_object import Btf
from tests.records import in_ring, pack_record

SPIN, WRITE, UNKNOWN = 1, 4, 63


def line(gaps=(0, 0, 0, 0), **sums):
    by_flags = [words for flags in range(64) for words in sums.get(f"of_{flags}", (0, 0))]
    return struct.pack("=136Q", *gaps, 7, 8, 9, 0, *by_flags)


def test_lock_wait_totals_are_summed_over_cpus_by_lock_type():
    """The flags of a mutex depend on whether its waiters spin."""
    first = line(of_32=(2, 100), of_33=(1, 10), of_1=(5, 50), of_63=(1, 1))
    assert parse_lock_lines(first + line((1, 2, 3, 4), of_32=(1, 1000), of_4=(1, 3))) == {
        "mutex": LockTotal(4, 1110),
        "spinlock": LockTotal(5, 50),
        "rwsem:W": LockTotal(1, 3),
        "other": LockTotal(1, 1),
        "uncounted": LockTotal(10, 0),
    }
    assert parse_lock_lines(line()) == {}


def make_types(*tracepoints, has_owners=True):
    made = Btf()
    number = made.add("unsigned int", 1, 4, tail=bytes(4))
    for name in tracepoints:
        made.tracepoint(name, number, number)
    member = "owner" if has_owners else "rtmutex"
    for name, at in (("mutex", 0), ("rw_semaphore", 8)):
        made.struct(name, 32, [(member, at, number)])
    made.struct("task_struct", 99, [("pid", 40, number)])
    return KernelTypes(made.pack())


def test_a_kernel_that_lacks_either_lock_tracepoint_yields_no_lock_offsets():
    assert find_lock_offsets(make_types("contention_begin")) is None
    assert find_lock_offsets(make_types("contention_begin", "contention_end")) == (0, 8, 40)


def test_lock_waits_are_measured_even_if_lock_structs_have_no_owner_field():
    types = make_types("contention_begin", "contention_end", has_owners=False)
    assert find_lock_offsets(types) == (None, None, 40)


def test_an_owner_field_at_offset_0_is_distinguished_from_a_missing_field():
    for offsets, owners in (((0, 8, 40), (1, 9)), ((None, None, 40), (0, 0))):
        packed = struct.unpack("=10Q", pack_lock_layout(LockOffsets(*offsets), 3, 1, python=True))
        assert packed[:3] == (3, 1, 1)
        assert packed[6:] == (os.getpid(), *owners, 40)


def test_a_record_contains_the_lock_and_its_holder_after_the_stacks():
    kinds = number_kinds([LOCK_CONTENTION])
    records = [
        pack_record(1, (2, 3), kind=FIRST_EVENT, value=500, phase=LOCK_PHASE + flags, holder=holder)
        + comm.ljust(16, b"\0")
        for flags, holder, comm in ((WRITE, 12, b"writer"), (SPIN, 0, b"old"), (UNKNOWN, 1, b""))
    ]
    samples = parse_records(b"".join(map(in_ring, records)), kinds=kinds)
    assert [sample.wait for sample in samples] == [
        LockWait("rwsem:W", LockHolder(12, b"writer")),
        LockWait("spinlock"),
        LockWait("other", LockHolder(1, b"")),
    ]
    assert {(sample.kind, sample.value, sample.stacks) for sample in samples} == {
        (LOCK_CONTENTION, 500, (struct.pack("<2Q", 2, 3),))
    }
