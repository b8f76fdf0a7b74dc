"""Addresses in JIT-compiled code are resolved from perf maps even as the code changes."""

import contextlib
import os
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import TICK_NS, Access, read_start_ticks
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.symbols.user.jit_file import MAX_NAME_BYTES, MAX_UPDATE_BYTES, MadeFunction
from otel_kprofiler.symbols.user.jit_table import MAX_FORMER_BYTES, JitCode, JitTable
from otel_kprofiler.symbols.user.perf_map import PerfMap, parse_perf_map

ME = ProcessKey(os.getpid(), read_start_ticks(Access(), "self") * TICK_NS)


@pytest.fixture
def path(tmp_path):
    """Returns the path of this process's map in a /proc below ``tmp_path``."""
    directory = tmp_path / "proc" / str(ME.tgid) / "root" / "tmp"
    directory.mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    return directory / f"perf-{ME.tgid}.map"


@pytest.fixture
def opened(path, tmp_path):
    perf_map = PerfMap(ME, Access(), Clock(), str(tmp_path))
    yield perf_map
    perf_map.close()


def name_at(perf_map, address, at_ns):
    result = perf_map.lookup(address, at_ns)
    return result and result.name


def test_maps_written_by_all_known_runtimes_are_parsed():
    text = (
        b"18c4000 300 Builtin:DeoptimizationEntry_Eager\n"
        b"7F3736FC5B80 168 JS:^hot /a b/j.js:1:13\r\n"
        b"0x00007f0000001000 0x00000010 java.lang.Object::<init>\n"
        b"10 5 \xff\n"
    )
    assert parse_perf_map(text) == [
        JitCode(0x18C4000, 0x18C4300, b"Builtin:DeoptimizationEntry_Eager"),
        JitCode(0x7F3736FC5B80, 0x7F3736FC5CE8, b"JS:^hot /a b/j.js:1:13"),
        JitCode(0x7F0000001000, 0x7F0000001010, b"java.lang.Object::<init>"),
        JitCode(0x10, 0x15, b"\xff"),
    ]


@pytest.mark.parametrize(
    "line",
    [b"10 5", b"10 5  ", b"x 5 name", b"10 -5 name", b"1_0 5 name", b"ffffffffffffffff 2 name",
     b"10 ffffffff name", b"11112222333344445 1 name", b"\0"],
)  # fmt: skip
def test_a_malformed_perf_map_line_is_skipped(line):
    codes = parse_perf_map(b"10 5 a\n" + line + b"\n20 5 b\n\n20 0 nothing\n")
    assert [code.name for code in codes] == [b"a", b"b"]


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.text("0123af x\n", max_size=200).map(str.encode))
def test_arbitrary_text_parses_without_an_error(text):
    codes = parse_perf_map(text)
    assert len(codes) <= text.count(b"\n") + 1
    table = JitTable()
    for code in codes:
        table.add(code, since_ns=0, seen_ns=0, gone_ns=0)


CODES = st.builds(
    lambda start, size, name: JitCode(start, start + size, b"f%d" % name),
    st.integers(0, 60), st.integers(1, 20), st.integers(0, 9),
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.lists(CODES, max_size=6), min_size=1, max_size=6), st.integers(0, 60))
def test_lookups_at_any_time_never_yield_a_wrong_name(tmp_path_factory, rounds, address):
    """Functions are written at increasing times; the map is read after each list of functions."""
    root = tmp_path_factory.mktemp("root")
    (root / "tmp").mkdir()
    perf_map = PerfMap(ME, Access(), Clock(), str(root))
    written_code = []  # time and function
    now = 0
    with open(root / "tmp" / f"perf-{ME.tgid}.map", "wb", buffering=0) as file:
        for codes in rounds:
            for code in codes:
                now += 1
                written_code.append((now, code))
                file.write(b"%x %x %s\n" % (code.start, code.end - code.start, code.name))
            now += 1
            assert not perf_map.update(now)
            for at in range(now + 3):
                owner = None
                for time_ns, code in written_code:
                    if time_ns <= at and code.start <= address < code.end:
                        owner = code
                    elif (
                        time_ns <= at
                        and owner
                        and code.start < owner.end
                        and owner.start < code.end
                    ):
                        owner = None
                result = perf_map.lookup(address, at)
                if at > now:
                    assert result is None
                elif owner and result:
                    assert result == MadeFunction(owner.start, owner.end, owner.name.decode())
                if at == now:
                    assert bool(owner) == bool(result)
    perf_map.close()


def test_appended_perf_map_lines_are_read_and_the_newer_name_wins(path, opened):
    path.write_bytes(b"100 10 first\n200 10 other\n")
    assert not opened.update(10)
    assert opened.lookup(0x105, 10) == MadeFunction(0x100, 0x110, "first")
    assert opened.lookup(0x110, 10) is None
    assert opened.lookup(0x105, 11) is None  # the file has not been reread yet
    with open(path, "ab") as file:
        file.write(b"10f 2 second\n300 10 half")
    assert not opened.update(20)
    names = [name_at(opened, 0x10F, at) for at in (5, 10, 11, 19, 20)]
    assert names == ["first", "first", None, None, "second"]
    assert opened.lookup(0x105, 20) is None  # the rest of the first function is dropped
    assert name_at(opened, 0x205, 20) == "other"
    assert opened.lookup(0x305, 20) is None
    with open(path, "ab") as file:
        file.write(b" a name\n")
    opened.update(30)
    assert name_at(opened, 0x305, 15) == "half a name"


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("rest", [b"", b"900 1 more\n" * 50])
def test_a_rewritten_perf_map_is_read_again(path, opened, replace, rest):
    path.write_bytes(b"100 10 old\n200 10 same\n300 10 gone\n")
    opened.update(10)
    if replace:
        path.unlink()
    path.write_bytes(b"100 20 new\n200 10 same\n" + rest)
    opened.update(20)
    assert [name_at(opened, 0x100, at) for at in (10, 15, 20)] == ["old", None, "new"]
    assert [name_at(opened, 0x200, at) for at in (10, 15, 20)] == ["same"] * 3
    assert [name_at(opened, 0x300, at) for at in (10, 15, 20)] == ["gone", None, None]


def test_perf_maps_are_searched_for_in_the_container_then_on_the_host(path, opened, tmp_path):
    (tmp_path / "tmp" / path.name).write_bytes(b"100 10 host\n")
    opened.update(10)
    assert name_at(opened, 0x100, 0) == "host"
    path.write_bytes(b"100 10 own\n")
    opened.update(20)
    assert name_at(opened, 0x100, 20) == "own"


@pytest.mark.parametrize(
    ("inner", "name"), [(ME.tgid, "mine"), (1, None)], ids=["host", "container"]
)
def test_the_map_of_another_container_is_not_read(opened, tmp_path, monkeypatch, inner, name):
    """In the host's /tmp, a pid is one of the host, not of the process's own namespace."""
    read = Access.read_bytes

    def read_bytes(self, path):
        own = f"NSpid:\t{ME.tgid}"
        return read(self, path).replace(own.encode(), f"{own}\t{inner}".encode())

    monkeypatch.setattr(Access, "read_bytes", read_bytes)
    (tmp_path / f"tmp/perf-{inner}.map").write_bytes(b"100 10 mine\n")
    with contextlib.suppress(FileNotFoundError):
        opened.update(10)
    assert name_at(opened, 0x100, 10) == name


def write_link(path):
    target = path.with_name("target")
    target.write_bytes(b"1 1 a\n")
    path.symlink_to(target)


def write_for_all(path):
    path.write_bytes(b"1 1 a\n")
    path.chmod(0o666)


def write_of_another_user(path):
    path.write_bytes(b"1 1 a\n")
    os.chown(path, 12345, -1)


def write_before_the_process(path):
    path.write_bytes(b"1 1 a\n")
    os.utime(path, (1.6e9, 1.6e9))


@pytest.mark.parametrize(
    "write",
    [write_link, write_for_all, write_before_the_process, os.mkfifo, os.mkdir, lambda path: None]
    + [write_of_another_user] * (os.geteuid() == 0),
)  # fmt: skip
def test_a_map_that_another_user_could_have_written_is_not_read(path, opened, write):
    write(path)
    with pytest.raises(OSError):
        opened.update(10)
    assert opened.lookup(1, 0) is None


def test_a_symlink_in_place_of_the_perf_map_directory_is_not_followed(path, opened):
    path.write_bytes(b"1 1 a\n")
    moved = path.parent.with_name("moved")
    path.parent.rename(moved)
    path.parent.symlink_to(moved)
    with pytest.raises(OSError):
        opened.update(10)


def test_the_map_from_an_earlier_process_with_the_same_pid_is_not_read(path, opened, tmp_path):
    path.write_bytes(b"1 1 a\n")
    for start_time_ns in (None, ME.start_time_ns - TICK_NS, ME.start_time_ns + TICK_NS):
        earlier = ProcessKey(ME.tgid, start_time_ns)
        with pytest.raises(OSError):
            PerfMap(earlier, Access(), Clock(), str(tmp_path)).update(10)
    assert not opened.update(10)


def test_memory_and_time_for_a_large_perf_map_are_bounded(path, opened):
    with open(path, "wb") as file:
        file.writelines(b"%x 10 %s\n" % (at * 16, b"name" * (at % 300)) for at in range(40_000))
        file.write(b"1" * (3 * MAX_UPDATE_BYTES) + b"\n0 ffff last\n")
    updates, began = 1, time.process_time()
    while opened.update(updates):
        assert opened.nbytes < 10 << 20
        updates += 1
    assert updates > os.stat(path).st_size // MAX_UPDATE_BYTES
    assert time.process_time() - began < 30
    assert name_at(opened, 5, updates) == "last"


def test_a_long_name_is_truncated():
    (code,) = parse_perf_map(b"1 1 " + b"n" * 10_000 + b"\n")
    assert len(code.name) == MAX_NAME_BYTES


def test_parsing_many_short_perf_map_lines_requires_little_memory(path, opened):
    path.write_bytes(b"0 1 a\n" * (2 * MAX_UPDATE_BYTES))
    tracemalloc.start()
    try:
        assert opened.update(1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20 << 20


def test_replaced_functions_are_kept_up_to_a_limit():
    table = JitTable()
    tracemalloc.start()
    try:
        for at_ns in range(100):
            code = JitCode(0x10, 0x20, b"f%d" % at_ns, bytes(500_000))
            table.add(code, since_ns=at_ns, seen_ns=at_ns, gone_ns=at_ns)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < MAX_FORMER_BYTES + 600_000
    assert table.lookup(0x10, 98).name == b"f98"
    assert table.lookup(0x10, 99).name == b"f99"
    assert table.lookup(0x10, 50) is None
