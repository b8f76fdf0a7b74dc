"""Samples read from perf.data files match the output of ``perf script``."""

import gzip
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from otel_kprofiler.analysis import load_samples
from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    USER_SIDE,
    BuildId,
    FileId,
    Frame,
    Line,
    LossCause,
    Module,
    ModuleKind,
    Unresolved,
)
from otel_kprofiler.perf_data import read_perf_data
from otel_kprofiler.perf_data.code_names import CodeNames
from otel_kprofiler.perf_data.processes import AddressSpace
from otel_kprofiler.perf_data.records import FileMapping

DATA = Path(__file__).parents[1] / "data" / "perf"
RECORDINGS = ("seekable", "pipe", "events")
WRITTEN = 1_790_000_000_000_000_000
SAMPLE = re.compile(r"(.{1,16}?)\s+(\d+)/(\d+) +(\d+)\.(\d{9}): +(\d+) +([\w-]+): *$")
FRAME = re.compile(r"\s+([0-9a-f]+) (.*) \((.*)\)$")
CALLCHAIN = 1 << 5


def content(name):
    return gzip.decompress((DATA / f"{name}.data.gz").read_bytes())


class NoNames:
    def find_user(self, path, build_id, offset):
        return None

    def find_kernel(self, module, rva, address):
        return None


class Runtime(NoNames):
    """A symbolizer that names each kernel frame after its recorded address."""

    def find_kernel(self, module, rva, address):
        return Frame(module, rva, (Line(f"{address:x}"),), 0, KERNEL_SIDE)


def read(data, names=None):
    problems = []
    (window,) = read_perf_data(data, WRITTEN, problems.append, names or NoNames())
    return window, problems


def script(name):
    """Returns the samples that ``perf script`` printed: event, period, thread, time and stack."""
    samples, stack = [], []
    for line in gzip.decompress((DATA / f"{name}.txt.gz").read_bytes()).decode().splitlines():
        if match := SAMPLE.match(line):
            comm, pid, tid, seconds, ns, period, event = match.groups()
            stack = []
            samples.append(
                (event.replace("-", "_"), int(period), comm, int(pid), int(tid),
                 int(seconds) * 10**9 + int(ns), stack)
            )  # fmt: skip
        elif (match := FRAME.match(line)) and int(match[1], 16):  # address 0 ends a call chain
            stack.append((match[3].rpartition("/")[2], int(match[1], 16)))
    return samples


def callers_exact(stack):
    """Returns a stack's frames as perf shows them: callers have return addresses."""
    frames = []
    side = None
    for frame in stack.frames:
        is_caller, side = frame.side is side, frame.side
        if frame.side is KERNEL_SIDE:
            address = int(frame.function, 16) if frame.lines else frame.address
            frames.append(("[kernel.kallsyms]", address + is_caller))
        else:
            name = frame.module.name if frame.module else "[unknown]"
            frames.append((name, frame.address + is_caller))
    return frames


@pytest.mark.parametrize("name", RECORDINGS)
def test_samples_match_the_output_of_perf_script(name):
    window, _ = read(content(name), Runtime())
    expected = script(name)
    first = min(sample[5] for sample in expected)
    start = min(
        time for _, sample in window.samples for time in sample.timestamps_unix_ns
    )  # fmt: skip
    ours = [
        (
            "cpu_clock" if profile.kind == ON_CPU else profile.kind.name,
            profile.period_ns or sample.values[at], sample.thread_name,
            resource.attributes["process.pid"], sample.tid, time - start,
            callers_exact(sample.stack),
        )
        for profile in window.profiles
        for resource, sample in profile.samples
        for at, time in enumerate(sample.timestamps_unix_ns)
    ]  # fmt: skip
    key = repr
    theirs = [(*sample[:5], sample[5] - first, sample[6]) for sample in expected]
    assert sorted(ours, key=key) == sorted(theirs, key=key)
    assert len(ours) > 40


def test_a_process_has_its_programs_name_and_its_hosts_attributes():
    window, _ = read(content("seekable"))
    attributes = [resource.attributes for resource, _ in window.samples]
    assert {row["process.executable.name"] for row in attributes} >= {"work"}
    assert {row["host.name"] for row in attributes} == {"vm"}
    assert {row["os.version"] for row in attributes} == {"6.18.44-fc-v657"}
    assert "/tmp/work/work" in {row.get("process.executable.path") for row in attributes}


def test_the_last_record_is_assigned_the_modification_time_of_the_file():
    window, _ = read(content("seekable"))
    assert WRITTEN - 10**9 < window.end_unix_ns <= WRITTEN + 1


def test_code_without_symbols_has_a_file_offset_and_a_reason_for_the_missing_name():
    window, problems = read(content("seekable"))
    frames = {frame for _, sample in window.samples for frame in sample.stack.frames}
    user = {frame for frame in frames if frame.module and frame.module.name == "work"}
    assert {frame.unresolved for frame in user} == {Unresolved.NOT_HERE}
    assert all(frame.module.build_id for frame in user)
    assert problems == []


def test_a_fix_is_suggested_for_a_recording_without_build_ids():
    _, problems = read(content("pipe"))
    assert len(problems) == 1
    assert "perf inject -b" in problems[0]


# The functions below create perf.data files with one event.


def string(text):
    raw = text.encode() + b"\0"
    return raw + bytes(-len(raw) % 8)


def record(type_, body, misc=0):
    return struct.pack("<IHH", type_, misc, 8 + len(body)) + body


def made(*records, sample_type=1 << 0 | 1 << 1 | 1 << 2 | CALLCHAIN, config=0, flags=1 << 18):
    """Creates a seekable file with one event, a period of 10 ms, and no feature sections."""
    attr = struct.pack("<IIQQQQQ", 1, 64, config, 10_000_000, sample_type, 0, flags) + bytes(16)
    start = 104 + len(attr) + 16
    body = b"".join(records)
    header = b"PERFILE2" + struct.pack(
        "<QQQQQQQQ", 104, len(attr) + 16, 104, len(attr) + 16, start, len(body), 0, 0
    )
    return header + bytes(32) + attr + struct.pack("<QQ", 0, 0) + body


def ids(pid, time):
    """Packs the trailer for records that are not samples."""
    return struct.pack("<IIQ", pid, pid, time)


def sample(pid, time, *chain, mode=2):
    words = struct.pack(f"<{len(chain)}Q", *(word % 2**64 for word in chain))
    body = struct.pack("<QIIQQ", chain[-1] % 2**64, pid, pid, time, len(chain)) + words
    return record(9, body, mode)


def mmap(pid, time, start, length, offset, path, misc=2):  # noqa: PLR0917 - a record's fields
    body = struct.pack("<IIQQQ", pid, pid, start, length, offset) + string(path)
    return record(1, body + ids(pid, time), misc)


def comm(pid, time, name, misc=0):
    return record(3, struct.pack("<II", pid, pid) + string(name) + ids(pid, time), misc)


def fork(pid, parent, time):
    return record(7, struct.pack("<IIIIQ", pid, parent, pid, parent, time) + ids(pid, time))


USER, KERNEL = -512, -128
EXEC = 1 << 13


def frames(window):
    return {
        (sample.thread_name, resource.attributes.get("process.executable.name"), sample.tid): [
            (frame.module and frame.module.name, frame.address, frame.side) for frame in
            sample.stack.frames
        ]
        for resource, sample in window.samples
    }  # fmt: skip


def test_records_are_applied_in_chronological_order():
    """A file consists of blocks of records, each block from one CPU."""
    window, _ = read(made(
        sample(7, 30, USER, 0x1010, 0x2021),
        mmap(7, 10, 0x1000, 0x1000, 0, "/bin/a"),
        comm(7, 5, "a", EXEC),
        mmap(7, 20, 0x2000, 0x1000, 0x500, "/lib/b.so"),
    ))  # fmt: skip
    assert frames(window) == {("a", "a", 7): [("a", 0x10, USER_SIDE), ("b.so", 0x520, USER_SIDE)]}


def test_a_forked_process_has_its_parents_mappings_until_it_executes_a_program():
    window, _ = read(made(
        comm(7, 1, "a", EXEC), mmap(7, 2, 0x1000, 0x1000, 0, "/bin/a"),
        fork(8, 7, 3), sample(8, 4, USER, 0x1010),
        fork(9, 7, 5), comm(9, 6, "c", EXEC), mmap(9, 7, 0x1000, 0x1000, 0, "/bin/c"),
        sample(9, 8, USER, 0x1010), sample(7, 9, USER, 0x1020),
    ))  # fmt: skip
    assert frames(window) == {
        ("a", "a", 8): [("a", 0x10, USER_SIDE)],
        ("c", "c", 9): [("c", 0x10, USER_SIDE)],
        ("a", "a", 7): [("a", 0x20, USER_SIDE)],
    }


def test_samples_in_execve_have_the_callers_stack_until_the_new_program_runs():
    start = [comm(7, 1, "a", EXEC), mmap(7, 2, 0x1000, 0x1000, 0, "/bin/a")]
    end = [comm(7, 3, "b", EXEC), mmap(7, 4, 0x5000, 0x1000, 0, "/bin/b")]
    window, _ = read(made(
        *start, *end, sample(7, 5, KERNEL, -(2**31), USER, 0x1010, mode=1),
        sample(7, 6, USER, 0x5010), sample(7, 7, KERNEL, -(2**31), USER, 0x1010, mode=1),
    ))  # fmt: skip
    leaves = [
        (sample.timestamps_unix_ns[0] - window.start_unix_ns,
         frame.module.name if frame.module else frame.unresolved)
        for _, sample in window.samples for frame in sample.stack.frames[-1:]
    ]  # fmt: skip
    assert leaves == [(0, "a"), (1, "b"), (2, Unresolved.UNMAPPED)]


def test_a_mapping_replaces_the_mappings_that_it_overlaps():
    space = AddressSpace()
    for start, end, offset, path in [(0, 100, 0, b"a"), (20, 40, 0, b"b"), (30, 60, 5, b"c")]:
        space.add(FileMapping(0, 1, start, end, offset, path, ""))
    assert [
        (space.find(at).path, at - space.find(at).start + space.find(at).offset)
        for at in (10, 25, 30, 59, 60, 99)
    ] == [(b"a", 10), (b"b", 5), (b"c", 5), (b"c", 34), (b"a", 60), (b"a", 99)]
    assert space.find(100) is None


def test_leaf_addresses_of_kernel_and_user_stacks_are_not_decremented():
    kernel = mmap(2**32 - 1, 0, 0xFFFFFFFF81000000, 2**24, 0xFFFFFFFF81000000,
                  "[kernel.kallsyms]_text", 1)  # fmt: skip
    module = mmap(2**32 - 1, 0, 0xFFFFFFFFC0000000, 4096, 0, "/lib/modules/6/nf-tables.ko.xz", 1)
    window, _ = read(made(
        kernel, module, comm(7, 1, "a", EXEC), mmap(7, 2, 0x1000, 0x1000, 0, "/bin/a"),
        sample(7, 3, KERNEL, 0xFFFFFFFFC0000010, 0xFFFFFFFF81000101, USER, 0x1010, 0x1021, mode=1),
    ))  # fmt: skip
    assert list(frames(window).values()) == [[
        ("nf_tables", 0x10, KERNEL_SIDE), ("vmlinux", 0x100, KERNEL_SIDE),
        ("a", 0x10, USER_SIDE), ("a", 0x20, USER_SIDE),
    ]]  # fmt: skip


def test_names_are_searched_by_path_and_build_id_of_the_mapping():
    """Paths are byte strings; they are passed as os.fsdecode() returns them."""
    searched = []

    class Searched(NoNames):
        def find_user(self, path, build_id, offset):
            searched.append((path, build_id, offset))

    identity = struct.pack("<BxxxBBBB16x", 4, 0xAB, 0xCD, 0xEF, 0x01)
    body = struct.pack("<IIQQQ", 7, 7, 0x1000, 0x1000, 0x300) + identity
    body += struct.pack("<II", 5, 2) + b"/srv/a\xff\0" + ids(7, 10)
    read(made(record(10, body, 1 << 14 | 2), sample(7, 30, USER, 0x1010)), Searched())
    assert searched == [("/srv/a\udcff", "abcdef01", 0x310)]


def test_bpf_programs_are_named_by_their_ksymbol_records():
    symbol = struct.pack("<QIHH", 0xFFFFFFFFC1000000, 64, 1, 0) + string("bpf_prog_1_x")
    window, _ = read(made(
        record(17, symbol + ids(0, 1)), comm(7, 1, "a"),
        sample(7, 3, KERNEL, 0xFFFFFFFFC1000010, mode=1),
    ))  # fmt: skip
    (frame,) = next(sample for _, sample in window.samples).stack.frames
    assert (frame.function, frame.module.kind) == ("bpf_prog_1_x", ModuleKind.BPF)


def test_samples_that_perf_lost_are_counted():
    window, _ = read(made(sample(7, 3, USER, 1), record(2, struct.pack("<QQ", 0, 5) + ids(0, 9))))
    (profile,) = window.profiles
    assert (profile.taken, profile.lost) == (6, {LossCause.RING_FULL: 5})
    assert (profile.kind, profile.period_ns) == (ON_CPU, 10_000_000)


def test_throttling_and_copied_user_stacks_are_reported_in_remarks():
    throttle = record(5, struct.pack("<QQQ", 4, 0, 0) + ids(0, 4))
    kind = 1 << 0 | 1 << 1 | 1 << 2 | CALLCHAIN | 1 << 13
    _, problems = read(made(sample(7, 3, USER, 1), throttle, sample_type=kind))
    assert [problem.partition(":")[0].partition(" because")[0] for problem in problems] == [
        "the kernel suspended sampling 1 time",
        "code has no names,",
        "user stacks end at their first frame",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PERFILE2", "the header of the perf.data file is truncated"),
        (made(), "contains no samples"),
        (made(record(81, bytes(16))), "are compressed"),
        (b"PERFILE2" + struct.pack("<Q", 50) + bytes(100), "unsupported header size of 50 bytes"),
    ],
)
def test_the_error_for_an_unreadable_recording_states_the_reason(data, message):
    with pytest.raises(PayloadError) as refused:
        read(data)
    assert message in refused.value.message


def test_the_samples_in_a_truncated_file_are_read():
    window, problems = read(made(sample(7, 3, USER, 1), sample(7, 4, USER, 1))[:-20])
    assert window.sample_count == 1
    assert problems[0] == "data is missing or corrupt: the file is truncated"


def test_samples_with_numbers_out_of_range_are_skipped():
    whole = made(sample(7, 3, USER, 1), sample(7, 1 << 63, USER, 1), sample(7, 4, USER, 1))
    window, problems = read(whole)
    assert (window.sample_count, window.end_unix_ns) == (2, WRITTEN + 1)
    assert "malformed" in problems[0]


def test_times_are_not_before_1970_even_if_the_file_is_older_than_its_samples():
    """Archives with reproducible contents set modification times to 0."""
    (window,) = read_perf_data(made(sample(7, 100, USER, 1), sample(7, 130, USER, 1)), 0,
                               [].append, NoNames())  # fmt: skip
    assert sorted(load_samples([window]).times) == [0, 30]
    with pytest.raises(PayloadError, match="clock"):
        read_perf_data(made(sample(7, 1, USER, 1)), 1 << 63, [].append, NoNames())


def test_samples_are_read_from_a_recording_whose_perf_process_was_killed():
    """If perf is killed, the data size in the header remains 0."""
    whole = made(sample(7, 3, USER, 1))
    window, problems = read(whole[:48] + bytes(8) + whole[56:])
    assert window.sample_count == 1
    assert problems[0] == "data is missing or corrupt: perf record was killed"


class TestNames:
    """Kernel addresses are resolved with the running kernel's symbols if its build id matches."""

    LIVE = Module("vmlinux", ModuleKind.VMLINUX, BuildId("ab" * 20), FileId(""), 0x5000)

    def names(self):
        symbolizer = SimpleNamespace(
            module=lambda name: self.LIVE if name == "vmlinux" else None,
            resolve_addresses=lambda pcs: [
                Frame(self.LIVE, pcs[0] - 0x5000, (Line("read"),), 0, KERNEL_SIDE)
            ],
        )
        return CodeNames(symbolizer=symbolizer)

    def recorded(self, build_id):
        return Module("vmlinux", ModuleKind.VMLINUX, build_id, FileId(""), 0x9000)

    def test_addresses_recorded_with_a_different_kaslr_offset_are_resolved(self):
        frame = self.names().find_kernel(self.recorded(self.LIVE.build_id), 0x10, 0x9010)
        assert (frame.function, frame.address) == ("read", 0x10)

    @pytest.mark.parametrize("build_id", [BuildId("cd" * 20), None])
    def test_addresses_recorded_on_a_different_kernel_are_not_resolved(self, build_id):
        assert self.names().find_kernel(self.recorded(build_id), 0x10, 0x9010) is None

    def test_addresses_in_a_user_file_without_a_build_id_are_not_resolved(self):
        assert CodeNames(symbolizer=None).find_user("/bin/sh", "", 0x1000) is None
