"""Descriptions of code objects use bounded memory, and their eviction is reported."""

import pickle

import pytest

from otel_kprofiler.model import KnownCodes, PythonCode
from tests.speedups import measure_growth

SHARED = ("file", "function", "line_table")


def code(number, table=b""):
    return PythonCode(number, 7, 0x1000 * number, 1, "app.py", "f", number, 0, table)


def test_a_code_description_is_looked_up_by_its_id():
    codes = KnownCodes()
    codes.add(code(1))
    assert codes.get(1) == code(1)
    assert codes.get(2) is None
    assert list(codes) == [code(1)]


def test_each_added_code_description_increments_the_version():
    codes = KnownCodes()
    versions = [codes.version]
    for number in (1, 2):
        codes.add(code(number))
        versions.append(codes.version)
    assert versions == sorted(set(versions))


def test_the_oldest_code_descriptions_are_evicted_and_passed_to_the_callback():
    dropped = []
    codes = KnownCodes(max_bytes=10 * code(1).size_bytes, on_dropped=dropped.append)
    for number in range(100):
        codes.add(code(number))
    assert len(codes) == 10
    assert [one.id for one in dropped] == list(range(90))
    assert [one.id for one in codes] == list(range(90, 100))
    assert codes.dropped == 90


def test_a_repeated_description_replaces_the_first():
    codes = KnownCodes()
    codes.add(code(1, bytes(1000)))
    codes.add(code(1))
    assert codes.size_bytes == code(1).size_bytes
    assert list(codes) == [code(1)]


@pytest.mark.parametrize("table", [bytes(5000), bytes(1 << 20)])
def test_a_code_description_above_the_limit_is_dropped_immediately(table):
    dropped = []
    codes = KnownCodes(max_bytes=5000, on_dropped=dropped.append)
    codes.add(code(1, table))
    assert not list(codes)
    assert codes.size_bytes == 0
    assert dropped == [code(1, table)]


def test_the_eviction_callback_may_look_up_descriptions():
    codes = KnownCodes(max_bytes=1, on_dropped=lambda value: codes.get(value.id) or list(codes))
    codes.add(code(1))
    assert codes.dropped == 1


def copy_of(code):
    """Returns an equal description that shares no string or line table."""
    return code._replace(
        **{name: pickle.loads(pickle.dumps(getattr(code, name))) for name in SHARED}
    )


def test_equal_code_objects_of_several_processes_share_strings_and_line_tables():
    codes, first = KnownCodes(), code(1, b"a table")
    other_name = copy_of(first)._replace(id=3, function="g")
    for added in (first, copy_of(first)._replace(id=2, process=8), other_name):
        codes.add(added)
        assert codes.get(added.id) == added
    assert [getattr(codes.get(2), name) is getattr(first, name) for name in SHARED] == [True] * 3
    assert codes.get(3).line_table is first.line_table


def test_nothing_is_kept_of_evicted_descriptions():
    codes = KnownCodes(max_bytes=10 * code(1, bytes(900)).size_bytes)

    def add_codes():
        for number in range(300):
            table = number % 7  # some equal descriptions are kept, others are evicted
            codes.add(code(number, table.to_bytes(2, "big") + bytes(898)))

    add_codes()
    assert measure_growth(add_codes) < 900
    assert len(codes) == 10
