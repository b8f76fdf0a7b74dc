"""Code objects are replayed as recorded."""

import json

import pytest

from otel_kprofiler.model import PythonCode
from otel_kprofiler.recording.python_codes import pack_python_code, parse_python_code

CODE = PythonCode(1 << 39, 7, 0x7F00, 1 << 60, "a\udc80.py", "C.f", 3, 1, b"\x80\x01\xff")


def test_a_code_description_survives_a_round_trip():
    assert parse_python_code(json.loads(pack_python_code(CODE))) == CODE


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("wrong", [None, -1, 1.5, [], "zz"])
def test_malformed_code_object_descriptions_are_rejected(place, wrong):
    row = json.loads(pack_python_code(CODE))
    row[place] = wrong
    if place in (4, 5) and wrong == "zz":
        assert parse_python_code(row)
        return
    with pytest.raises((ValueError, TypeError)):
        parse_python_code(row)


@pytest.mark.parametrize("row", [[], None, 5, [1] * 10, {}])
def test_malformed_code_description_rows_are_rejected(row):
    with pytest.raises((ValueError, TypeError)):
        parse_python_code(row)
