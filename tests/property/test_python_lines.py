"""For each instruction in the standard library, the line is the one that CPython reports.

With ``KPROFILER_PYTHON_FILES=100000``, the test reads all files in the standard library.
"""

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.speedups import pure
from tests.further import further_between
from tests.interpreters import find_pythons
from tests.speedups import load_compiled

FILES = int(os.environ.get("KPROFILER_PYTHON_FILES", "30"))
DUMP = """
import json, random, sys, types
from pathlib import Path

def codes(code):
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from codes(one)

paths = sorted(Path(json.__file__).parents[1].rglob("*.py"))
random.Random(5).shuffle(paths)
for path in paths[:int(sys.argv[1])]:
    try:
        module = compile(path.read_text("utf-8"), str(path), "exec")
    except (SyntaxError, UnicodeDecodeError, ValueError):
        continue
    for code in codes(module):
        lines = [line or 0 for line, *_ in code.co_positions()]
        print(code.co_linetable.hex(), code.co_firstlineno, *lines)
"""


VERSIONS = [load_compiled(), pure]
PYTHONS = {python.minor: python for python in find_pythons()}


def find_lines(table, first_line, count):
    """Returns the lines of the first instructions, which the C and the Python version agree on."""
    compiled, python = (
        [version.find_line(table, first_line, at) for at in range(-1, count)]
        for version in VERSIONS
    )
    assert compiled == python
    assert compiled[0] == 0
    return compiled[1:]


@pytest.mark.parametrize("version", further_between(tuple(PYTHONS)))
def test_every_standard_library_instruction_is_mapped_to_the_same_line_as_by_cpython(version):
    dump = PYTHONS[version].run("-W", "ignore", "-c", DUMP, str(FILES), check=True)
    rows = dump.stdout.splitlines()
    assert len(rows) > 10 * FILES or FILES > 1000
    compiled = VERSIONS[0].find_line
    for number, row in enumerate(rows):
        table, first, *lines = row.split(" ")
        arguments = bytes.fromhex(table), int(first)
        expected = [*map(int, lines), 0]
        assert [compiled(*arguments, at) for at in range(len(expected))] == expected
        if len(expected) < 100 or not number % 20:
            assert find_lines(*arguments, len(expected)) == expected


def test_a_running_frame_has_the_line_of_its_instruction():
    frame, count = sys._getframe(), 0
    while frame is not None:
        code, at, line = frame.f_code, frame.f_lasti // 2, frame.f_lineno
        assert find_lines(code.co_linetable, code.co_firstlineno, at + 1)[at] == line
        frame, count = frame.f_back, count + 1
    assert count > 10


entries = st.builds(
    lambda kind, units, rest: bytes([0x80 | kind << 3 | units]) + rest,
    st.integers(0, 15),
    st.integers(0, 7),
    st.binary(max_size=8).map(lambda rest: bytes(byte & 0x7F for byte in rest)),
)
tables = st.binary(max_size=300) | st.lists(entries, max_size=60).map(b"".join)


@given(tables, st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300))
def test_line_tables_of_arbitrary_bytes_are_decoded_safely(table, first):
    lines = find_lines(table, first, 8 * len(table) + 2)
    assert all(0 <= line < 2**31 for line in lines)
    assert lines[-1] == 0


@pytest.mark.parametrize("version", VERSIONS, ids=["compiled", "python"])
@pytest.mark.parametrize(("first", "at"), [(2**31, 0), (-(2**31) - 1, 0), (2**40, 0), (1, 2**40)])
def test_numbers_out_of_range_yield_no_line(version, first, at):
    assert version.find_line(b"\xd0\0", first, at) == 0
    assert version.find_line(b"\xd0\0", 1, 0) == 1


def test_a_truncated_line_table_yields_the_entries_before_the_cut():
    code = compile(Path(__file__).read_text(), "a.py", "exec")
    table = code.co_linetable
    count = len(list(code.co_positions()))
    whole = find_lines(table, 1, count)
    for size in random.Random(1).sample(range(len(table)), 20):
        starts = [at for at in range(size) if table[at] & 0x80]
        # The varint at the end of the truncated table may be incomplete.
        complete = sum((table[at] & 7) + 1 for at in starts[:-1])
        part = find_lines(table[:size], 1, count)
        assert part[:complete] == whole[:complete]
        assert not any(part[complete + 8 :])


def test_unterminated_varints_are_decoded_in_bounded_time():
    """A quadratic-time decoder would take minutes."""
    assert find_lines((b"\xe8" + b"\x7f" * 60_000) * 20, 1, 1) == [0]
