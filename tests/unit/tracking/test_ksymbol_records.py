"""Captured and synthetic ksymbol records are read from their ring and parsed."""

import struct
from pathlib import Path

import pytest

from otel_kprofiler.model import Ksymbol, KsymbolAction, ModuleKind
from otel_kprofiler.tracking.ksymbol_readers import parse_ksymbol_lines
from otel_kprofiler.tracking.ksymbol_records import (
    KsymbolRecord,
    LostRecord,
    PerfRing,
    ProgramRecord,
    make_changes,
    parse_perf_records,
)
from tests.ksymbol_records import ksymbol, program

CAPTURED = Path(__file__).parents[2] / "data/kernel/6.12-ksymbol"
BPF, OOL = ModuleKind.BPF, ModuleKind.OUT_OF_LINE
PAGE = 4096


def captured(name):
    perf_records = parse_perf_records((CAPTURED / f"{name}.records").read_bytes(), timed=False)
    assert not perf_records.damaged
    return perf_records.records


def test_captured_records_of_program_loads_and_unloads_are_parsed():
    """The kernel wrote these records for two programs, one of which has a subprogram."""
    records = captured("programs")
    loaded = [
        KsymbolRecord(0, 0xFFFFFFFFC0400648, 25, BPF, False, "bpf_prog_a04f5eef06a7f555_kprof_ks"),
        ProgramRecord(0, 1, 3, "a04f5eef06a7f555"),
        KsymbolRecord(
            0, 0xFFFFFFFFC040068C, 28, BPF, False, "bpf_prog_b2715c0f7f689679_kprof_ks_sub"
        ),
        KsymbolRecord(0, 0xFFFFFFFFC04006E0, 28, BPF, False, "bpf_prog_8923dad831f6fb51_F"),
        ProgramRecord(0, 1, 4, "b2715c0f7f689679"),
    ]
    assert records[:5] == loaded
    assert [r._replace(removed=True) if hasattr(r, "removed") else r._replace(event=2)
            for r in loaded] == records[5:]  # fmt: skip


def test_functions_in_a_bpf_program_have_the_programs_id():
    changes = make_changes(captured("programs"))
    assert [(c.action.value, c.symbols[0].name[26:], c.symbols[0].program_id) for c in changes] == [
        ("added", "kprof_ks", 3), ("added", "kprof_ks_sub", 4), ("added", "F", 4),
        ("removed", "kprof_ks", 0), ("removed", "kprof_ks_sub", 0), ("removed", "F", 0),
    ]  # fmt: skip


def test_captured_records_for_trampolines_and_instruction_pages_are_parsed():
    start = 0xFFFFFFFFC0615000
    assert [(c.action, c.symbols) for c in make_changes(captured("trampoline"))] == [
        (action, (Ksymbol(start, 229, "ftrace_trampoline", OOL),))
        for action in (KsymbolAction.ADDED, KsymbolAction.REMOVED)
    ]
    assert [(r.name, r.length) for r in captured("pages")] == [
        ("kprobe_insn_page", PAGE), ("kprobe_optinsn_page", PAGE), ("ftrace_trampoline", 362)
    ]  # fmt: skip


def test_captured_kallsyms_lines_are_parsed():
    symbols = parse_ksymbol_lines((CAPTURED / "kallsyms").read_bytes())
    assert len(symbols) == 9
    assert {s.name for s in symbols if s.kind is OOL} == {
        "ftrace_trampoline", "kprobe_insn_page", "kprobe_optinsn_page"
    }  # fmt: skip
    assert Ksymbol(0xFFFFFFFFC0400660, 0, "bpf_prog_a04f5eef06a7f555_kprof_simple", BPF) in symbols
    assert parse_ksymbol_lines(b"0000000000000000 t bpf_prog_1_a\t[bpf]") == []


def test_interleaved_records_of_two_program_loads_are_not_mixed_up():
    """A thread that loads a BPF program may be preempted between the program's records."""
    first, second = "1" * 16, "2" * 16
    data = (
        ksymbol(1, f"bpf_prog_{first}_a") + ksymbol(2, f"bpf_prog_{second}_b")
        + program(8, second) + program(7, first)
    )  # fmt: skip
    results = {c.symbols[0].start: c.symbols[0].program_id
             for c in make_changes(parse_perf_records(data).records)}  # fmt: skip
    assert results == {1: 0, 2: 8}, "no id rather than a wrong one"


@pytest.mark.parametrize("others", [0, 1, 5])
def test_the_record_time_is_parsed_if_other_events_are_open_on_the_cpu(others):
    """If other events are open, the kernel leaves a gap of stale bytes after the time."""
    rest = b"\xaa" * 8 * others

    def longer(record):
        kind, misc, size = struct.unpack_from("=IHH", record)
        return struct.pack("=IHH", kind, misc, size + len(rest)) + record[8:] + rest

    data = b"".join(
        longer(ksymbol(1, "bpf_prog_1_" + "x" * padding, time_ns=70 + padding))
        for padding in range(1, 9)
    )
    data += longer(program(3, "1" * 16, time_ns=90))
    data += longer(struct.pack("=IHHQQQ", 2, 0, 32, 99, 127, 91))
    times = [record.time_ns for record in parse_perf_records(data).records]
    assert times == [*range(71, 79), 90, 91]


def test_lost_records_are_parsed_and_unknown_records_are_ignored():
    lost = struct.pack("=IHHQQQ", 2, 0, 32, 99, 127, 5)
    unknown = struct.pack("=IHHQ", 77, 0, 16, 5)
    assert parse_perf_records(unknown + lost).records == [LostRecord(5, 127)]


@pytest.mark.parametrize(
    "data", [b"\0\0\0", struct.pack("=IHH", 17, 0, 0), struct.pack("=IHH", 17, 0, 4000) + bytes(64)]
)
def test_a_malformed_record_stops_parsing_and_is_reported(data):
    records, damaged = parse_perf_records(ksymbol(1, "bpf_prog_1_a") + data)
    assert damaged
    assert len(records) == 1


class Memory:
    """Emulates a perf ring buffer and the kernel's writes to it."""

    def __init__(self, size):
        self.control = [0] * 512
        self.data = memoryview(bytearray(size))
        self.lost = 0

    def write(self, record):
        head, size = self.control[128], len(self.data)
        if head + len(record) - self.control[129] > size:
            self.lost += 1
            return
        for index, byte in enumerate(record):
            self.data[(head + index) % size] = byte
        self.control[128] = head + len(record)


def test_ksymbol_records_are_intact_where_the_ring_wraps_around():
    memory = Memory(PAGE)
    ring = PerfRing(memory, PAGE)
    taken = []
    for number in range(1000):
        memory.write(ksymbol(number, f"bpf_prog_{number}_x" + "y" * (number % 40)))
        if number % 7 == 0:
            chunk = ring.take()
            assert not chunk.was_full
            taken += parse_perf_records(chunk.data).records
    taken += parse_perf_records(ring.take().data).records
    assert [record.start for record in taken] == list(range(1000))
    assert memory.lost == 0
    assert ring.take() == (b"", False)


def test_a_full_ring_is_reported():
    memory = Memory(PAGE)
    ring = PerfRing(memory, PAGE)
    full_chunks = 0
    for round_ in range(20):
        for number in range(10 * round_):
            memory.write(ksymbol(number, "bpf_prog_1_a"))
        lost, memory.lost = memory.lost, 0
        chunk = ring.take()
        assert not parse_perf_records(chunk.data).damaged
        assert chunk.was_full or not lost
        full_chunks += chunk.was_full
    assert full_chunks


@pytest.mark.parametrize("head", [PAGE + 8, 1 << 40])
def test_a_torn_head_does_not_cause_an_out_of_bounds_read(head):
    memory = Memory(PAGE)
    memory.control[128] = head
    ring = PerfRing(memory, PAGE)
    assert ring.take() == (b"", True)
    memory.write(ksymbol(1, "bpf_prog_1_a"))
    assert len(parse_perf_records(ring.take().data).records) == 1
