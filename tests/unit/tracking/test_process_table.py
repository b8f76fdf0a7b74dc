"""The process table is maintained from perf records and full scans of ``/proc``."""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.host import MemoryMapping
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.tracking import Exec, Exited, Mapped, Started, Unmapped
from otel_kprofiler.tracking.ksymbol_records import LostRecord
from otel_kprofiler.tracking.process_records import (
    ExecRecord,
    MapRecord,
    TaskRecord,
    parse_process_records,
)
from otel_kprofiler.tracking.process_table import Absent, Census, ProcessTable, Reading


def record(kind, body, misc=0):
    return struct.pack("=IHH", kind, misc, 8 + len(body)) + body


def mapping(start, end, offset=0, path="/lib"):
    return MemoryMapping(start, end, "r-xp", offset, 0, 0, path, False)


def mapped(time_ns, pid, *place, **more):
    return MapRecord(time_ns, pid, mapping(*place, **more), None)


def begun(time_ns, pid, parent=1, tid=None):
    return TaskRecord(time_ns, pid, parent, tid or pid, ended=False)


def ended(time_ns, pid, tid=None):
    return TaskRecord(time_ns, pid, 1, tid or pid, ended=True)


def apply_all(table, *changes):
    return [event for change in changes for event in table.apply(change)]


MMAP2 = struct.pack("=IIQQQIIQQII", 5, 6, 0x1000, 0x2000, 0x3000, 8, 2, 99, 1, 5, 1)
BUILD_ID = struct.pack("=IIQQQB3x20sII", 5, 6, 0x1000, 0x2000, 0, 20, bytes(range(20)), 7, 2)
MEMORY = struct.pack("=IIQQQIIQQII", 5, 6, 0x1000, 0x2000, 7, 0, 0, 0, 0, 4, 2)
DATA = struct.pack("=IIQQQIIQQII", 5, 6, 0x1000, 0x2000, 7, 0, 0, 0, 0, 3, 2)
TIME = struct.pack("=Q", 77)


def test_records_written_by_the_kernel_are_parsed():
    data = b"".join([
        record(7, struct.pack("=IIIIQ", 5, 4, 6, 4, 70) + TIME),
        record(4, struct.pack("=IIIIQ", 5, 4, 6, 4, 71) + TIME),
        record(3, struct.pack("=II", 5, 5) + b"na me\0\0\0" + TIME, 1 << 13),
        record(3, struct.pack("=II", 5, 5) + b"renamed\0" + TIME),
        record(10, MMAP2 + b"/a\nb (deleted)\0\0" + TIME),
        record(10, BUILD_ID + b"/c\0\0\0\0\0\0" + TIME, 1 << 14),
        record(10, MEMORY + b"//anon\0\0" + TIME),
        record(10, DATA + b"/data\0\0\0" + TIME),
        record(2, struct.pack("=QQ", 1, 12) + TIME),
        record(17, b"unknown"),
    ])  # fmt: skip
    assert parse_process_records(data) == (
        [
            TaskRecord(70, 5, 4, 6, ended=False),
            TaskRecord(71, 5, 4, 6, ended=True),
            ExecRecord(77, 5, "na me"),
            MapRecord(
                77, 5,
                MemoryMapping(0x1000, 0x3000, "r-xs", 0x3000, 8 << 20 | 2, 99, "/a\nb", True), None,
            ),
            MapRecord(
                77, 5, MemoryMapping(0x1000, 0x3000, "rwxp", 0, 0, 0, "/c", False),
                bytes(range(20)).hex(),
            ),
            MapRecord(77, 5, MemoryMapping(0x1000, 0x3000, "--xp", 0, 0, 0, "", False), None),
            LostRecord(77, 12),
        ],
        False,
    )  # fmt: skip
    for end in range(1, len(data)):
        records, damaged = parse_process_records(data[:end])
        assert len(records) <= 7
        assert damaged or records


@settings(max_examples=400)
@given(st.binary(max_size=200), st.sampled_from([2, 3, 4, 7, 10]), st.integers(0, 0xFFFF))
def test_arbitrary_bytes_are_parsed_as_perf_records_without_an_exception(body, kind, misc):
    parse_process_records(body)
    parse_process_records(record(kind, body, misc) + body)


def test_a_process_is_tracked_from_start_to_exit():
    table = ProcessTable()
    key = ProcessKey(5, 10)
    assert apply_all(
        table,
        begun(10, 5), ExecRecord(11, 5, "x"), mapped(12, 5, 0, 4), begun(13, 5, 5, tid=6),
        ended(14, 5), ended(15, 5, tid=6), ended(16, 5, tid=6), mapped(17, 5, 8, 9),
    ) == [
        Started(10, key, 1), Exec(11, key, "x"), Mapped(12, key, mapping(0, 4), None),
        Exited(15, key),
    ]  # fmt: skip


def test_a_child_inherits_mappings_but_later_changes_affect_only_one_process():
    table = ProcessTable()
    apply_all(table, begun(1, 5), mapped(2, 5, 0, 4), begun(3, 6, 5), mapped(4, 6, 8, 9))
    apply_all(table, mapped(5, 5, 16, 17))
    assert table.mappings(6) == (mapping(0, 4), mapping(8, 9))
    assert table.mappings(5) == (mapping(0, 4), mapping(16, 17))
    apply_all(table, ExecRecord(6, 6, "x"))
    assert (table.mappings(6), len(table.mappings(5))) == ((), 2)


def test_an_exec_in_one_thread_ends_the_other_threads_of_its_process():
    table = ProcessTable()
    apply_all(table, begun(1, 5), begun(2, 5, 5, tid=6), ended(3, 5), ExecRecord(4, 5, "x"))
    assert apply_all(table, ended(5, 5)) == [Exited(5, ProcessKey(5, 1))]


def test_a_mapping_replaces_the_mappings_it_covers():
    table = ProcessTable()
    key = ProcessKey(5, 1)
    apply_all(table, begun(1, 5), mapped(2, 5, 10, 40, offset=100))
    assert apply_all(table, mapped(3, 5, 20, 30, path="/other")) == [
        Unmapped(3, key, mapping(10, 40, 100)),
        Mapped(3, key, mapping(10, 20, 100), None),
        Mapped(3, key, mapping(30, 40, 120), None),
        Mapped(3, key, mapping(20, 30, 0, "/other"), None),
    ]
    assert not apply_all(table, mapped(4, 5, 20, 30, path="/other"))


def test_merged_mappings_are_not_reported_as_unmapped():
    table = ProcessTable()
    apply_all(table, begun(1, 5), mapped(2, 5, 20, 30, offset=10), mapped(2, 5, 0, 5, path=""))
    joined = [mapped(3, 5, 10, 30), mapped(3, 5, 0, 8, path="")]
    assert [type(event) for event in apply_all(table, *joined)] == [Mapped] * 2
    assert table.mappings(5) == (mapping(0, 8, path=""), mapping(10, 30))


def reading(time_ns, pid, start, *mappings, threads=None):
    return Reading(time_ns, ProcessKey(pid, start), frozenset(threads or [pid]), mappings)


def test_a_full_read_of_proc_returns_changes_to_processes_and_mappings():
    table = ProcessTable(same_start_ns=5)
    old, new = ProcessKey(5, 10), ProcessKey(5, 30)
    assert apply_all(table, reading(20, 5, 10, mapping(0, 4), threads=[5, 6])) == [
        Started(20, old, None), Mapped(20, old, mapping(0, 4), None),
    ]  # fmt: skip
    assert not apply_all(table, begun(12, 5), mapped(13, 5, 0, 4), ended(21, 5))
    assert apply_all(table, reading(22, 5, 10, mapping(4, 8), threads=[6])) == [
        Unmapped(22, old, mapping(0, 4)), Mapped(22, old, mapping(4, 8), None),
    ]  # fmt: skip
    assert apply_all(table, reading(35, 5, 30)) == [Exited(35, old), Started(35, new, None)]
    assert apply_all(table, Census(40, frozenset([7]))) == [Exited(40, new)]


def test_the_start_time_in_proc_may_be_earlier_than_the_time_of_the_start_event():
    table = ProcessTable(same_start_ns=5)
    assert len(apply_all(table, begun(12, 5), reading(20, 5, 10))) == 1
    assert len(apply_all(table, begun(112, 5), reading(120, 5, 110))) == 2


def test_only_selected_processes_and_their_children_are_tracked():
    changes = [begun(1, 5), begun(2, 6, 5), begun(3, 7), mapped(4, 7, 0, 4), begun(5, 8, 6)]
    for children, pids in ((False, [5]), (True, [5, 6, 8])):
        table = ProcessTable([5], children=children)
        assert [event.process.tgid for event in apply_all(table, *changes)] == pids
        assert not apply_all(table, reading(6, 7, 0))
        apply_all(table, ended(7, 5))
        assert not table.wants(5)


def test_the_pid_of_an_unreadable_child_can_be_reused():
    table = ProcessTable([5], children=True)
    apply_all(table, begun(1, 5), begun(2, 6, 5))
    table.wanted.add(7)
    assert apply_all(table, Absent(3, 7)) == []
    assert not apply_all(table, begun(4, 7))
    assert apply_all(table, Absent(5, 6)) == [Exited(5, ProcessKey(6, 2))]
    assert apply_all(table, ended(6, 6)) == []


CHANGES = st.one_of(
    st.builds(
        lambda pid, other: begun(0, pid, other + (other >= pid)),
        st.integers(1, 4), st.integers(1, 3),
    ),
    st.builds(lambda pid: ended(0, pid), st.integers(1, 4)),
    st.builds(lambda pid: ExecRecord(0, pid, "x"), st.integers(1, 4)),
    st.builds(
        lambda pid, start, size, path: mapped(0, pid, start, start + size, start, path=path),
        st.integers(1, 4), st.integers(0, 20), st.integers(1, 8), st.sampled_from(["/a", "/b"]),
    ),
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(CHANGES, max_size=40))
def test_mappings_are_tracked_through_events_without_full_reads(changes):
    table, bytes_of, mapped = ProcessTable(), {}, {}
    for time_ns, one in enumerate(changes, 1):
        change = one._replace(time_ns=time_ns)
        match change:
            case TaskRecord(ended=False):
                bytes_of[change.pid] = dict(bytes_of.get(change.parent, {}))
            case TaskRecord():
                bytes_of.pop(change.pid, None)
            case ExecRecord() if change.pid in bytes_of:
                bytes_of[change.pid] = {}
            case MapRecord() if change.pid in bytes_of:
                place = change.mapping
                for at in range(place.start, place.end):
                    bytes_of[change.pid][at] = place.path
        for event in table.apply(change):
            pid = event.process.tgid
            match event:
                case Started():
                    mapped[pid] = set(mapped.get(event.parent, ()))
                case Exited():
                    del mapped[pid]
                case Exec():
                    mapped[pid] = set()
                case Unmapped():
                    mapped[pid].remove(event.mapping)
                case Mapped():
                    inside = {
                        old for old in mapped[pid]
                        if event.mapping.start <= old.start and old.end <= event.mapping.end
                    }  # fmt: skip
                    mapped[pid] = mapped[pid] - inside | {event.mapping}
        for pid, places in bytes_of.items():
            assert set(table.mappings(pid)) == mapped[pid]
            assert {
                at: row.path for row in mapped[pid] for at in range(row.start, row.end)
            } == places
            assert sum(row.end - row.start for row in mapped[pid]) == len(places)
    assert set(table.pids()) == set(bytes_of) == set(mapped)
