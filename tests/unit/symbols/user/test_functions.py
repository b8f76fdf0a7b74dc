"""Function tables stay correct at their limits."""

import re
import tempfile
from array import array
from pathlib import Path

import pytest

from otel_kprofiler.symbols.user.columns import NamedCode
from otel_kprofiler.symbols.user.functions import (
    MAX_DEPTH,
    MAX_NAME_BYTES,
    MAX_RANKED,
    Function,
    FunctionTable,
)
from tests.unit.symbols.user.function_tables import make_table


def test_a_long_name_is_truncated():
    table = make_table([Function(0, 1, "x" * (MAX_NAME_BYTES + 9))])
    assert table.lookup(0).name == "x" * MAX_NAME_BYTES


def test_invalid_utf8_in_names_is_shown_as_escaped_bytes():
    names = NamedCode(array("I", [0]), array("I", [1]), array("I", [0]), b"a\xff\0", b"\0")
    table = FunctionTable(0x1000, names)
    assert table.lookup(0x1000) == Function(0x1000, 0x1001, "a\\xff")
    assert table.find("a\udcff") == (table.lookup(0x1000),)


def test_a_name_stored_as_the_suffix_of_another_name_is_found_but_other_suffixes_are_not():
    names = NamedCode(
        array("I", [0, 8]), array("I", [4, 4]), array("I", [0, 3]), b"foobar\0", b"\0\0"
    )
    table = FunctionTable(0, names)
    assert table.find("bar") == (Function(8, 12, "bar"),)
    assert table.find("ar") == ()


def test_lookups_in_nested_functions_are_limited_in_depth():
    rows = [Function(i, 1000 - i, f"f{i}") for i in range(100)]
    for depth in (MAX_DEPTH + 1, len(rows)):
        table = make_table(rows[:depth])
        assert table.lookup(depth) == rows[depth - 1]
        assert table.lookup(999) == (rows[0] if depth == MAX_DEPTH + 1 else None)


@pytest.mark.parametrize(
    ("names", "ranked"),
    [
        ("__write __libc_write:1 write:2 x:3", "write __write __libc_write x"),
        ("_IO_puts puts:2", "puts _IO_puts"),
        ("_ZN3fooC2Ev _ZN3fooC1Ev", "_ZN3fooC1Ev _ZN3fooC2Ev"),
        ("common other_common:2 mon:2", "common mon other_common"),
        ("__write rewrite:2", "__write rewrite"),
    ],
)
def test_exported_names_are_preferred_over_internal_names(names, ranked):
    rows = [name.partition(":") for name in names.split()]
    text = "\0".join(name for name, *_ in rows).encode() + b"\0"
    places = array("I", [text.index(name.encode() + b"\0") for name, *_ in rows])
    same = array("I", [16] * len(rows))
    table = FunctionTable(
        0, NamedCode(same, same, places, text, bytes(int(rank or 0) for *_, rank in rows))
    )
    assert table.names_at(16) == tuple(ranked.split())
    assert table.lookup(20).name == ranked.split()[0]


def test_only_a_limited_number_of_aliases_is_compared():
    rows = [Function(8, 16, f"name{i:04}") for i in range(3 * MAX_RANKED)]
    table = make_table(rows)
    assert table.names_at(8) == tuple(row.name for row in rows[:MAX_RANKED])
    assert table.lookup(8) == rows[0]


def test_the_longest_function_is_found_even_if_too_many_functions_share_its_start_address():
    count = MAX_RANKED + 1
    starts, places = array("I", [8] * count), array("I", [0] * count)
    sizes = array("I", [4] * MAX_RANKED + [9])
    table = FunctionTable(0, NamedCode(starts, sizes, places, b"a\0", bytes(count)))
    assert table.lookup(8) == Function(8, 12, "a")
    assert table.lookup(14) == Function(8, 17, "a")


def test_a_function_occupies_thirteen_bytes_plus_its_name():
    rows = [Function(16 * i, 16 * i + 9, f"name{i:06}") for i in range(10_000)]
    assert make_table(rows).nbytes < 10_000 * (13 + 11) + 1000
    assert make_table([row._replace(name="") for row in rows]).nbytes < 10_000 * 8 + 1000


def read_resident_bytes(directory):
    """Returns the resident memory used by mapped files that were deleted from a directory."""
    mappings = re.findall(
        rf"{directory}/\S+ \(deleted\)\n(?:\w+: .*\n)*?Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
    )
    assert mappings
    return 1024 * sum(map(int, mappings))


@pytest.mark.system
def test_most_of_a_large_table_is_not_resident_in_memory(tmp_path, monkeypatch):
    """For each page that a lookup reads, the kernel maps up to 64 KiB of the table's file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = [Function(16 * i, 16 * i + 9, f"name{i:06}") for i in range(200_000)]
    table = make_table(rows + [row._replace(name="") for row in rows])
    assert table.nbytes > 200_000 * (13 + 11 + 8)
    for at in (0, 99_999, 199_999):
        assert table.lookup(rows[at].start + 3) == rows[at]
        assert table.lookup(rows[at].end + 1) is None
    assert read_resident_bytes(tmp_path) < table.nbytes / 3
    assert list(tmp_path.iterdir()) == []
    assert table.find("name000007") == (rows[7],)


def test_a_large_table_stays_in_memory_without_a_writable_directory(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/missing")
    rows = [Function(16 * i, 16 * i + 9, f"name{i:06}") for i in range(20_000)]
    table = make_table(rows)
    assert [table.lookup(row.start) for row in rows[::100]] == rows[::100]
