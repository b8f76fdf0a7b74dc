"""For each instruction in the standard library, the parsed line is the one CPython reports.

With ``KPROFILER_PYTHON_FILES=100000``, the test reads all files in the standard library.
"""

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.symbols.python.line_table import NO_LINE, parse_line_table
from tests.further import further_between
from tests.interpreters import find_pythons

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


PYTHONS = {python.minor: python for python in find_pythons()}


@pytest.mark.parametrize("version", further_between(tuple(PYTHONS)))
def test_every_standard_library_instruction_is_mapped_to_the_same_line_as_by_cpython(version):
    dump = PYTHONS[version].run("-W", "ignore", "-c", DUMP, str(FILES), check=True)
    rows = dump.stdout.splitlines()
    assert len(rows) > 10 * FILES or FILES > 1000
    for row in rows:
        table, first, *lines = row.split(" ")
        line_table = parse_line_table(bytes.fromhex(table), int(first))
        assert [line_table.line(at) for at in range(len(lines))] == list(map(int, lines))
        assert line_table.end == len(lines)
        assert line_table.line(len(lines)) == line_table.line(-1) == NO_LINE


def test_a_running_frame_has_the_line_of_its_instruction():
    frame, count = sys._getframe(), 0
    while frame is not None:
        code = frame.f_code
        table = parse_line_table(code.co_linetable, code.co_firstlineno)
        assert table.line(frame.f_lasti // 2) == frame.f_lineno
        frame, count = frame.f_back, count + 1
    assert count > 10


@given(st.binary(max_size=300), st.integers(-(2**31), 2**31 - 1))
def test_line_tables_of_arbitrary_bytes_are_parsed_safely(table, first):
    line_table = parse_line_table(table, first)
    assert all(0 <= line_table.line(at) < 2**31 for at in range(-1, line_table.end + 1))
    assert line_table.end <= 8 * len(table)
    assert list(line_table.ends) == sorted(set(line_table.ends))


def test_a_truncated_line_table_yields_the_entries_before_the_cut():
    code = compile(Path(__file__).read_text(), "a.py", "exec")
    whole = parse_line_table(code.co_linetable, 1)
    for size in random.Random(1).sample(range(len(code.co_linetable)), 50):
        part = parse_line_table(code.co_linetable[:size], 1)
        # The varint at the end of the truncated table may be incomplete.
        for at in range(part.end - 8):
            assert part.line(at) == whole.line(at)


def test_unterminated_varints_are_parsed_in_bounded_time():
    """A quadratic-time parser would take minutes."""
    assert parse_line_table((b"\xe8" + b"\x7f" * 60_000) * 20, 1).end == 0
