"""Process mappings are parsed from the text in /proc."""

import os
import time

from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.host import Access, MemoryMapping, parse_mappings, read_maps
from otel_kprofiler.host.maps import MAX_MAPS_BYTES

TEXT = b"""\
00400000-00452000 r-xp 00001000 08:02 173521                             /usr/bin/dbus daemon
7f00-7f10 rw-p 00000000 00:00 0 
7ffff7fc1000-7ffff7fc5000 r--p 00000000 00:00 0                          [vvar]
7ffff7fc5000-7ffff7fc7000 rwxs 00000000 fe:1f 18446744073709551615       /a\\012b (deleted)
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""  # noqa: W291 - as the kernel writes it
ROWS = [
    MemoryMapping(
        0x400000, 0x452000, "r-xp", 0x1000, 8 << 20 | 2, 173521, "/usr/bin/dbus daemon", False
    ),
    MemoryMapping(0x7F00, 0x7F10, "rw-p", 0, 0, 0, "", False),
    MemoryMapping(0x7FFFF7FC1000, 0x7FFFF7FC5000, "r--p", 0, 0, 0, "[vvar]", False),
    MemoryMapping(
        0x7FFFF7FC5000, 0x7FFFF7FC7000, "rwxs", 0, 0xFE << 20 | 0x1F, (1 << 64) - 1, "/a\nb", True
    ),
    MemoryMapping(
        0xFFFFFFFFFF600000, 0xFFFFFFFFFF601000, "--xp", 0, 0, 0, "[vsyscall]", False
    ),
]  # fmt: skip


def test_every_field_in_proc_maps_is_parsed():
    assert list(parse_mappings(TEXT)) == ROWS
    assert [row.is_executable for row in ROWS] == [True, False, False, True, True]
    assert list(parse_mappings(TEXT, only_code=True)) == [row for row in ROWS if row.is_executable]


def write(row):
    """Returns a line in the format written by fs/proc/task_mmu.c."""
    start, end, permissions, offset, device, inode, path, deleted = row
    head = b"%08x-%08x %s %08x %02x:%02x %d " % (
        start, end, permissions.encode(), offset, device >> 20, device & 0xFFFFF, inode
    )  # fmt: skip
    name = os.fsencode(path).replace(b"\n", rb"\012") + b" (deleted)" * deleted
    return (head.ljust(73) + name if name else head) + b"\n"


NUMBERS = st.integers(0, (1 << 64) - 1)
NAMES = st.binary(max_size=40).map(
    lambda name: b"/" + name.replace(b"\0", b"").removesuffix(b" (deleted)").replace(b"\\", b"")
)
MAPPINGS = st.builds(
    MemoryMapping,
    NUMBERS, NUMBERS, st.from_regex(r"[r-][w-][x-][ps]", fullmatch=True), NUMBERS,
    st.integers(0, (1 << 32) - 1), NUMBERS, NAMES.map(os.fsdecode), st.booleans(),
)  # fmt: skip


@given(st.lists(MAPPINGS, max_size=5), st.binary(max_size=60))
def test_valid_lines_between_malformed_lines_are_parsed(rows, other):
    assert list(parse_mappings(b"".join(map(write, rows)))) == rows
    between = b"\n".join([b""] + [b"!" + line for line in other.split(b"\n")] + [b""])
    assert list(parse_mappings(between.join(map(write, rows)))) == rows


@given(st.integers(0, len(TEXT)))
def test_a_truncated_line_in_proc_pid_maps_is_not_parsed_as_a_mapping(length):
    assert list(parse_mappings(TEXT[:length])) == ROWS[: TEXT[:length].count(b"\n")]


def test_an_endless_line_is_parsed_in_bounded_time():
    began = time.process_time()
    assert not list(parse_mappings(b"0" * (8 << 20)))
    assert not list(parse_mappings(b"0-0 r-xp 0 00:00 0" + b" " * (8 << 20)))
    assert time.process_time() - began < 10


def test_reading_mappings_stops_at_the_limit(tmp_path):
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "maps").write_bytes(b"x" * (MAX_MAPS_BYTES + 5))
    assert len(read_maps(Access(str(tmp_path)), 7)) == MAX_MAPS_BYTES
