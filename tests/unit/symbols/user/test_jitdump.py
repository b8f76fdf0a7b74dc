"""Jitdumps yield the right name for JIT-compiled code at each point in time."""

import ctypes
import mmap
import os
import struct
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.clock import Clock, suspended_ns
from otel_kprofiler.host import TICK_NS, Access, read_start_ticks
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.symbols.user.jit_code import CHECK_NS, LOOK_AGAIN_NS, ProcessCode, subtract
from otel_kprofiler.symbols.user.jit_file import MAX_NAME_BYTES, MAX_UPDATE_BYTES
from otel_kprofiler.symbols.user.jitdump import JitDump, JitDumpParser, Loaded, find_place

PID = os.getpid()
ME = ProcessKey(PID, read_start_ticks(Access(), "self") * TICK_NS)
V8 = 0xDEADBEEF
SECOND = 1_000_000_000


def header(*, pid=PID, padding=0, flags=0, magic=0x4A695444, time_ns=1):
    return struct.pack("=IIIIIIQQ", magic, 1, 40, 62, padding, pid, time_ns, flags)


def record(kind, time_ns, body):
    return struct.pack("=IIQ", kind, 16 + len(body), time_ns) + body


def load(time_ns, start, size, name, *, pid=PID, code=b""):
    body = struct.pack("=IIQQQQ", pid, pid, start, start, size, 0) + name + b"\0" + code
    return record(0, time_ns, body)


def move(time_ns, old, new, size, *, pid=PID):
    return record(1, time_ns, struct.pack("=IIQQQQQ", pid, pid, new, old, new, size, 0))


def lines(start, *entries):
    body = struct.pack("=QQ", start, len(entries))
    for address, line, file in entries:
        body += struct.pack("=QII", address, line, 0) + file + b"\0"
    return record(2, 1, body)


def close(time_ns):
    return record(3, time_ns, b"")


@contextmanager
def mapped(path):
    """Maps a jitdump file, as a JIT compiler does to notify profilers of the file."""
    with open(path, "rb") as file:
        marker = mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    try:
        yield
    finally:
        marker.close()


@contextmanager
def written(*parts, suspended=lambda: 0, files=None, is_mapped=True):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"jit-{PID}.dump"
        path.write_bytes(b"".join(parts))
        dump = JitDump(ME, files or Access(), suspended)
        try:
            with mapped(path) if is_mapped else nullcontext():
                yield dump, path
        finally:
            dump.close()


def append(path, *parts):
    with open(path, "ab") as file:
        file.write(b"".join(parts))


def name_at(dump, address, at_ns):
    result = dump.lookup(address, at_ns)
    return result and result.name


def test_lines_are_looked_up_by_address():
    records = (
        header(),
        lines(0x100, (0x104, 7, b"/a.js"), (0x108, 7, b"\xff"), (0x10C, 9, b"\xff"),
              (0x110, 2, b"/b.js"), (0x10E, 8, b"/a.js")),
        load(1, 0x100, 0x20, b"one"),
        load(1, 0x200, 0x20, b"two"),
    )  # fmt: skip
    with written(*records) as (dump, _):
        dump.update(10)
        assert [dump.lookup(0x100 + at, 10)[3:] for at in (0, 4, 0xB, 0xC, 0xE, 0x1F)] == [
            ("", 0), ("/a.js", 7), ("/a.js", 7), ("/a.js", 9), ("/a.js", 8), ("/b.js", 2),
        ]  # fmt: skip
        assert dump.lookup(0x204, 10)[2:] == ("two", "", 0)


@pytest.mark.parametrize("file", [b"/tmp/a b/h.js", b"h.js"])
def test_file_names_that_v8_has_freed_are_recovered_from_function_names(file):
    freed = (b"\xfa\0\0x" * 9)[: len(file)]
    body = lines(0x100, *[(0x140 + at, 1 + at, freed) for at in range(9)])[16:]
    records = (header(padding=V8), record(2, 1, body + bytes(-len(body) % 8)))
    with written(*records, load(1, 0x100, 0x20, b"JS:*hot " + file + b":1:13")) as (dump, _):
        dump.update(10)
        assert [dump.lookup(0x100 + at, 10)[3:] for at in (0, 8)] == [
            (file.decode(), 1), (file.decode(), 9),
        ]  # fmt: skip


@pytest.mark.parametrize(
    "damaged",
    [lines(0x100, (0x100, 7, b"a"), (0x121, 8, b"a")), record(2, 1, b"short"),
     record(2, 1, struct.pack("=QQ", 0x100, 9) + b"x" * 20)],
)  # fmt: skip
def test_a_function_with_malformed_line_numbers_keeps_its_name(damaged):
    with written(header(), damaged, load(1, 0x100, 0x20, b"one")) as (dump, _):
        dump.update(10)
        assert dump.lookup(0x100, 10)[2:] == ("one", "", 0)


def test_the_elf_header_size_is_subtracted_from_v8_line_addresses():
    records = (header(padding=V8), lines(0x100, (0x140, 7, b"a"), (0x150, 8, b"a")))
    with written(*records, load(1, 0x100, 0x20, b"one")) as (dump, _):
        dump.update(10)
        assert [dump.lookup(at, 10).line for at in (0x100, 0x10F, 0x110)] == [7, 7, 8]


def test_moved_jit_compiled_code_keeps_its_line_numbers():
    records = (header(), lines(0x100, (0x104, 7, b"a")), load(1, 0x100, 0x20, b"one"))
    with written(*records, move(3, 0x100, 0x110, 0x20), move(4, 0x900, 0x118, 8)) as (dump, _):
        dump.update(10)
        assert dump.lookup(0x118, 3)[2:] == ("one", "a", 7)
        assert name_at(dump, 0x118, 2) == "one"
        assert name_at(dump, 0x108, 3) is None
        assert name_at(dump, 0x118, 4) is None  # code without a record


CODES = st.tuples(st.just("load"), st.integers(0, 60), st.integers(1, 20), st.integers(0, 9))
MOVES = st.tuples(st.just("move"), st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
ENDS = st.just(("close",))


@pytest.mark.system
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(CODES | CODES | MOVES | ENDS, max_size=6), min_size=1, max_size=5))
def test_functions_have_the_correct_name_at_any_time(rounds):
    """Events occur at times 10, 20 and so on. Each iteration ends by reading the dump."""
    codes = []  # [start, end, name] of the functions currently in memory
    history = [[]]  # the code after each event
    with written(header()) as (dump, path):
        for events in rounds:
            for event in events:
                now = 10 * len(history)
                if event[0] == "load":
                    _, start, size, number = event
                    append(path, load(now, start, size, b"f%d" % number))
                    new = (start, start + size, f"f{number}")
                elif event[0] == "move":
                    _, old, start, size = event
                    append(path, move(now, old, start, size))
                    name = next((name for at, _, name in codes if at == old), None)
                    codes = [code for code in codes if code[0] != old]
                    new = (start, start + size, name)
                else:
                    append(path, close(now))
                    codes, new = [], None
                if new:
                    codes = [code for code in codes if code[1] <= new[0] or code[0] >= new[1]]
                    codes += [new] if new[2] else []
                history.append(codes)
            dump.update(10 * len(history) - 1)
            for at, there in enumerate(history):
                for address in range(0, 82, 3):
                    owner = [code for code in there if code[0] <= address < code[1]]
                    result = dump.lookup(address, 10 * at + 5)
                    assert (result and result[:3]) == (owner[0] if owner else None)


def test_timestamps_made_ambiguous_by_a_suspend_yield_no_name():
    suspended = 0
    records = (header(), load(10, 0x100, 0x10, b"old"))
    with written(*records, suspended=lambda: suspended) as (dump, path):
        dump.update(15)
        suspended = 1000
        # may have been written before or after the suspend
        append(path, load(20, 0x100, 0x10, b"new"))
        dump.update(1030)
        results = [name_at(dump, 0x100, at) for at in (19, 20, 21, 1019, 1020)]
        assert results == ["old", None, None, None, "new"]
        append(path, load(40, 0x100, 0x10, b"newest"))
        dump.update(1050)
        assert [name_at(dump, 0x100, at) for at in (1039, 1040)] == ["new", "newest"]


class ShiftedClock(Access):
    def read_bytes(self, path):
        if path.endswith("timens_offsets"):
            return b"monotonic          -5       100\nboottime           7         0\n"
        return super().read_bytes(path)


def test_timestamps_are_adjusted_for_the_time_namespace():
    with written(header(), load(3, 1, 1, b"a"), files=ShiftedClock()) as (dump, _):
        dump.update(10 * SECOND)
        at = 5 * SECOND - 100 + 3
        assert [name_at(dump, 1, one) for one in (at - 1, at)] == [None, "a"]


@pytest.mark.parametrize(("flags", "time_ns"), [(1, 5), (0, 1 << 63), (0, 1000)])
def test_the_read_time_replaces_an_unusable_record_timestamp(flags, time_ns):
    with written(*(header(flags=flags), load(time_ns, 0x100, 0x10, b"old"))) as (dump, path):
        dump.update(10)
        append(path, load(time_ns, 0x108, 0x10, b"new"))
        dump.update(20)
        assert [name_at(dump, 0x108, at) for at in (1, 10, 11, 19, 20)] == [
            "old", "old", None, None, "new",
        ]  # fmt: skip


def test_records_from_child_processes_are_ignored():
    records = (load(1, 1, 1, b"mine"), load(2, 1, 1, b"its", pid=PID + 1), move(3, 1, 5, 1, pid=1))
    with written(header(), *records) as (dump, _):
        dump.update(10)
        assert name_at(dump, 1, 10) == "mine"


def test_a_jitdump_record_is_read_only_after_it_is_complete():
    whole = load(1, 0x100, 0x10, b"name", code=bytes(50))
    with written(header()[:20]) as (dump, path):
        assert not dump.update(5)
        append(path, header()[20:], whole[:30])
        assert not dump.update(10)
        assert dump.lookup(0x100, 10) is None
        append(path, whole[30:-1])
        assert not dump.update(20)
        append(path, whole[-1:])
        assert not dump.update(30)
        assert name_at(dump, 0x100, 20) == "name"


def test_records_larger_than_a_chunk_are_read():
    large = load(1, 0x100, 0x10, b"large", code=bytes(3 * MAX_UPDATE_BYTES))
    with written(header(), load(1, 1, 1, b"a"), large, load(2, 2, 1, b"b")) as (dump, _):
        updates = 1
        while dump.update(10):
            updates += 1
        assert updates <= 3
        assert [name_at(dump, at, 10) for at in (1, 2, 0x100)] == ["a", "b", "large"]


@pytest.mark.parametrize(
    "damaged",
    [record(0, 1, b"short"), record(1, 1, bytes(20)),
     load(1, (1 << 64) - 1, 2, b"beyond"), load(1, 1, 1 << 40, b"huge")],
    ids=["short", "without a name", "beyond memory", "huge"],
)  # fmt: skip
def test_a_malformed_jitdump_record_is_skipped(damaged):
    with written(header(), record(99, 1, b"whatever"), damaged, load(1, 5, 1, b"a")) as (dump, _):
        dump.update(10)
        assert name_at(dump, 5, 10) == "a"


def test_parsing_stops_at_a_record_of_size_zero():
    with written(header(), load(1, 1, 1, b"a"), bytes(16), load(1, 2, 1, b"b")) as (dump, _):
        assert not dump.update(10)
        assert (name_at(dump, 1, 10), name_at(dump, 2, 10)) == ("a", None)


@pytest.mark.parametrize("replace", [False, True])
def test_a_rewritten_jitdump_is_read_again(replace):
    with written(header(), load(1, 1, 1, b"old"), load(1, 2, 1, b"gone")) as (dump, path):
        dump.update(10)
        if replace:
            path.unlink()
        path.write_bytes(header(time_ns=9) + load(15, 1, 1, b"new") + load(16, 3, 1, b"more"))
        if not replace:
            dump.update(20)
        else:
            dump.update(12)  # the mapped file is read, not the file now at its path
            assert name_at(dump, 1, 12) == "old"
    if not replace:
        assert [name_at(dump, 1, at) for at in (10, 12, 15)] == ["old", None, "new"]
        assert [name_at(dump, 2, at) for at in (10, 12)] == ["gone", None]


def test_names_are_no_longer_valid_after_the_dump_is_unmapped():
    with written(header(), load(1, 1, 1, b"a"), is_mapped=False) as (dump, path):
        with mapped(path):
            dump.update(10)
            append(path, load(12, 2, 1, b"b"))
        dump.update(20)
        assert [name_at(dump, 1, at) for at in (10, 11)] == ["a", None]
        assert name_at(dump, 2, 15) is None


CHANGES = {
    "writable for all": lambda path: path.chmod(0o666),
    "another process": lambda path: path.write_bytes(header(pid=1)),
    "another format": lambda path: path.write_bytes(header(magic=0x4454694A)),
}
if os.geteuid() == 0:
    CHANGES["another user"] = lambda path: os.chown(path, 12345, -1)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_jitdump_that_another_user_could_have_written_is_not_read(change):
    with written(header(), load(1, 1, 1, b"a")) as (dump, path):
        change(path)
        with pytest.raises(OSError):
            dump.update(10)
        assert dump.lookup(1, 5) is None


def test_a_jitdump_is_read_only_if_its_process_maps_it(tmp_path):
    path = tmp_path / f"jit-{PID}.dump"
    path.write_bytes(header())
    other = tmp_path / f"jit-{PID + 1}.dump"
    other.write_bytes(header())
    with mapped(other), pytest.raises(FileNotFoundError):
        JitDump(ME, Access()).update(10)
    with mapped(path), pytest.raises(OSError):
        JitDump(ME._replace(start_time_ns=ME.start_time_ns - TICK_NS), Access()).update(10)


@pytest.fixture
def write_map():
    """Returns a function that writes this process's perf map, which exists until the test ends."""
    path = Path(f"/tmp/perf-{PID}.map")
    if path.exists():
        pytest.skip("this process has a perf map")

    def write(content):
        path.write_bytes(content)
        path.chmod(0o600)

    yield write
    path.unlink(missing_ok=True)


@pytest.fixture
def open_code():
    """Yields a function that creates a `ProcessCode`, which is closed after the test."""
    opened = []

    def open_process():
        opened.append(ProcessCode(ME, Access(), Clock()))
        return opened[-1]

    yield open_process
    for code in opened:
        code.close()


def test_a_perf_map_names_code_missing_from_the_jitdump(write_map, open_code):
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    records = now - suspended_ns() - SECOND
    code = open_code()
    write_map(b"1 1 map\n3 1 map\n5 1 map\n")
    with written(header(), load(records, 1, 1, b"dump"), load(now + SECOND, 5, 1, b"later")):
        assert not code.update(now)
        assert [code.lookup(at, now) and code.lookup(at, now).name for at in (1, 3, 7)] == [
            "dump", "map", None,
        ]  # fmt: skip
        assert code.lookup(1, records - 1) is None, "the dump knows when its code came"
        assert code.read_ns == now
    code = open_code()
    assert not code.update(now)
    assert code.lookup(1, now).name == "map"


@pytest.mark.parametrize("then", ["nothing", "a file", "other permissions"])
def test_a_jit_name_is_valid_only_until_its_code_is_unmapped(then, write_map, open_code):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    read, code_bits, private, anonymous, fixed = 1, 5, 2, 0x20, 0x10
    at = libc.mmap(None, 4096, code_bits, private | anonymous, -1, 0)
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    later = now + CHECK_NS
    code = open_code()
    write_map(b"%x 10 made\n" % at)
    try:
        assert not code.update(now)
        assert code.lookup(at, now).name == "made"
        if then == "nothing":
            libc.munmap(at, 4096)
        elif then == "a file":
            with open(__file__, "rb") as file:
                assert libc.mmap(at, 4096, code_bits, private | fixed, file.fileno(), 0) == at
        else:
            libc.mprotect(at, 4096, read)
        assert not code.update(later)
        assert code.lookup(at, now).name == "made", "the sample was before"
        assert (code.lookup(at, later) is not None) == (then == "other permissions")
    finally:
        libc.munmap(at, 4096)


RANGES = st.lists(st.integers(0, 40), max_size=8, unique=True).map(
    lambda edges: list(zip(*[iter(sorted(edges))] * 2, strict=False))
)


@given(RANGES, RANGES)
def test_range_subtraction_matches_brute_force(ranges, others):
    def points(some):
        return {at for start, end in some for at in range(start, end)}

    assert points(subtract(ranges, others)) == points(ranges) - points(others)


def test_a_file_created_after_the_first_lookup_is_also_read(write_map, open_code):
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    code = open_code()
    with pytest.raises(OSError):
        code.update(now)
    with written(header(), load(now - suspended_ns() - SECOND, 1, 1, b"dump")):
        assert not code.update(now)
        assert code.lookup(3, now) is None
        write_map(b"3 1 map\n")
        later = now + LOOK_AGAIN_NS
        assert not code.update(later)
        assert [code.lookup(at, later).name for at in (1, 3)] == ["dump", "map"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.binary(max_size=80)
        | st.builds(record, st.integers(0, 5), st.integers(0, 1 << 64 - 1), st.binary(max_size=90))
        | st.builds(load, st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.binary())
        | st.builds(lines, st.integers(0, 99), st.tuples(
            st.integers(0, 999), st.integers(0, 99), st.binary(max_size=3))),
        max_size=6,
    ),
    st.integers(0, 400),
)  # fmt: skip
def test_arbitrary_bytes_are_parsed_as_records_or_skipped(parts, cut):
    text = b"".join([header(), *parts])
    parser = JitDumpParser(PID)
    at = 0
    for end in (min(cut, len(text)), len(text)):
        parsed = parser.parse(text[at:end], end - at)
        at += parsed.used
        assert at <= end
        for event in parsed.events:
            if isinstance(event, Loaded):
                for offset in (0, 1, 50):
                    file, line = find_place(event.code.lines, offset)
                    assert 0 <= file < len(parser.sources)
                    assert line >= 0


def test_memory_and_time_for_a_large_jitdump_are_bounded():
    parts = [header()]
    for at in range(20_000):
        entry = (at * 16, at, b"%d" % at * 20)
        parts += [lines(at * 16, entry, entry), load(1, at * 16, 16, b"name" * (at % 600))]
    with written(*parts) as (dump, path):
        began, updates = time.process_time(), 1
        while dump.update(10):
            assert dump.nbytes < 10 << 20
            updates += 1
        assert updates >= path.stat().st_size // MAX_UPDATE_BYTES
        assert time.process_time() - began < 30
        assert len(dump.lookup(299 * 16, 10).name) == MAX_NAME_BYTES
