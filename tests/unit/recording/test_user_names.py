"""Names of user frames in recordings."""

import json

import pytest

from otel_kprofiler.model import (
    ON_CPU,
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
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    Unresolved,
    Window,
    WindowSample,
)
from otel_kprofiler.recording.user_names import (
    RecordedNames,
    UserNameCollector,
    parse_user_names,
)

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
    profile = Profile(ON_CPU, 1, [ResourceSamples(Resource({}, ""), [sample])], 1, {})
    collector = UserNameCollector()
    collector.add(Window(0, 1, [profile]))
    return json.loads(json.dumps(collector.rows()))


def test_names_and_reasons_are_those_of_the_recording():
    known = KnownFiles()
    known.add(KEY, DETAILS)
    names = RecordedNames(known, parse_user_names(recorded()))
    for frame in FRAMES[:4]:
        lines, start, reason = names.name(KEY, frame.address)
        assert (lines, reason) == (frame.lines, frame.unresolved)
        assert (frame.address - start if start else 0) == frame.offset


def test_what_was_not_recorded_is_an_address():
    known = KnownFiles()
    names = RecordedNames(known, parse_user_names(recorded()))
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
def test_damaged_rows_are_refused(damage):
    rows = recorded()
    damage(rows[0])
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_user_names(rows)
