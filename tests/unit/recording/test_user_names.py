"""The names of user frames are replayed as recorded."""

import json

import pytest

from otel_kprofiler.model import (
    USER_SIDE,
    BuildId,
    FileDetails,
    FileId,
    FileKey,
    Frame,
    KnownFiles,
    Line,
    Module,
    ModuleKind,
    ProcessKey,
    Stack,
    Unresolved,
    WindowSample,
)
from otel_kprofiler.recording.user_names import (
    CodeNameCollector,
    RecordedNames,
    UserNameCollector,
    parse_code_names,
    parse_user_names,
)
from otel_kprofiler.symbols import NamedAddress
from tests.windows import make_window

KEY = FileKey(1, 2, 3)
DETAILS = FileDetails("/lib/libx.so", BuildId("ab" * 20), FileId("1" * 32))
LIBRARY = Module("libx.so", ModuleKind.USER, DETAILS.build_id, DETAILS.file_id, 0)
FRAMES = (
    Frame(LIBRARY, 0x1010, (Line("in()", "_Zin", "a.c", 3), Line("f")), 0x10, USER_SIDE),
    Frame(LIBRARY, 0x2020, (), 0x20, USER_SIDE, Unresolved.NO_NAME),
    Frame(LIBRARY, 0x3000, (), 0, USER_SIDE, Unresolved.SYMBOLS_REFUSED),
    Frame(LIBRARY, 0x4000, (), 0, USER_SIDE, Unresolved.USER_ADDRESS),
    Frame(None, 0x7000, (Line("jit"),), 0, USER_SIDE),
)


def recorded():
    sample = WindowSample(Stack.from_frames(FRAMES), 1, "t", 0, None, [1], [])
    collector = UserNameCollector()
    collector.add(make_window(0, 1, ({}, [sample]), taken=1))
    return json.loads(json.dumps(collector.rows()))


def test_names_and_the_reasons_for_missing_names_are_read_from_the_recording():
    known = KnownFiles()
    known.add(KEY, DETAILS)
    names = RecordedNames(known, parse_user_names(recorded()), {})
    for frame in FRAMES[:4]:
        lines, start, reason, _ = names.name(KEY, frame.address)
        assert (lines, reason) == (frame.lines, frame.unresolved)
        assert (frame.address - start if start else 0) == frame.offset


def test_an_address_without_a_recorded_name_is_shown_as_an_address():
    names = RecordedNames(KnownFiles(), parse_user_names(recorded()), {})
    assert names.name(KEY, 0x1010).unresolved is Unresolved.USER_ADDRESS
    assert names.name_code(ProcessKey(1, 1), 0x7000, 1).unresolved is Unresolved.NO_FILE


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop(),
        lambda row: row.__setitem__(1, 7),
        lambda row: row.__setitem__(2, -1),
        lambda row: row.__setitem__(4, "NO_SUCH_REASON"),
        lambda row: row.__setitem__(5, []),
        lambda row: row.__setitem__(5, [["f", "", "", "x"]]),
    ],
)
def test_malformed_rows_in_a_recording_are_rejected(damage):
    rows = recorded()
    damage(rows[0])
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_user_names(rows)


PROCESS = ProcessKey(7, 100)
NO_NAME = NamedAddress((), 0, Unresolved.NO_FILE)
PENDING = NamedAddress((), 0, Unresolved.SYMBOLS_PENDING)


def made(name):
    return NamedAddress((Line(name, file="a.js", line=3),), 0x7000, None)


def recorded_code(*given):
    collector = CodeNameCollector()
    for at_ns, named in given:
        collector.add(PROCESS, 0x7004, at_ns, named)
    return json.loads(json.dumps(collector.rows()))


def test_code_without_a_file_is_given_the_name_recorded_for_the_samples_timestamp():
    given = [(5, NO_NAME), (10, made("old")), (12, PENDING), (20, made("old")), (18, made("old")),
             (30, made("new")), (40, made("old"))]  # fmt: skip
    names = RecordedNames(KnownFiles(), {}, parse_code_names(recorded_code(*given)))
    wanted = {5: NO_NAME, 10: made("old"), 12: made("old"), 20: made("old"), 30: made("new"),
              31: made("new"), 40: made("old"), 99: made("old")}  # fmt: skip
    assert {at: names.name_code(PROCESS, 0x7004, at) for at in wanted} == wanted
    assert names.name_code(ProcessKey(7, 101), 0x7004, 10) == NO_NAME
    assert names.name_code(PROCESS, 0x7005, 10) == NO_NAME


def test_code_that_never_had_a_name_is_not_recorded():
    assert recorded_code((5, NO_NAME), (6, PENDING)) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop(),
        lambda row: row.__setitem__(0, "7"),
        lambda row: row.__setitem__(2, -1),
        lambda row: row[5][0].pop(),
        lambda row: row[5][0].__setitem__(0, None),
        lambda row: row[5][0].__setitem__(4, []),
    ],
)
def test_malformed_rows_with_code_names_are_rejected(damage):
    rows = recorded_code((5, made("a")))
    damage(rows[0])
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_code_names(rows)
