"""Adding a row to ``SIDES`` adds a frame type to OTLP and to every report."""

import gzip
import json

import pytest

from otel_kprofiler.formats import folded, html, pprof, speedscope, table
from otel_kprofiler.model import (
    KERNEL_SIDE,
    SIDES,
    STACK_TRUNCATED,
    USER_SIDE,
    Form,
    Frame,
    Line,
    RawFrames,
    Side,
    SideKind,
    Stack,
    StackStatus,
    Unresolved,
    WindowSample,
)
from tests.windows import make_window, send

LUA = SideKind("lua", frame_type="luajit", color="user", folded_mark="_[j]")
VFS_READ = Frame(None, 1 << 63, (Line("vfs_read"),), 0, KERNEL_SIDE)
HANDLER = Frame(None, 0x10, (Line("handler", file="app.lua", line=42),), 0, LUA)
C_CALL = Frame(None, 0x7F0000001000, (), 0, USER_SIDE, Unresolved.USER_ADDRESS)


@pytest.fixture(autouse=True)
def lua():
    SIDES.append(LUA)
    yield
    SIDES.remove(LUA)


def window_of(*stacks):
    samples = [
        WindowSample(stack, number, "dd", 0, None, [5_000]) for number, stack in enumerate(stacks)
    ]
    attributes = {"process.pid": 7, "process.executable.name": "dd"}
    return make_window(5_000, 15_000, (attributes, samples), period_ns=1000)


def sides(stack):
    return [
        (side.kind, [frame.function for frame in side.frames], side.status) for side in stack.sides
    ]


WHOLE = Stack((Side(KERNEL_SIDE, (VFS_READ,)), Side(LUA, (HANDLER,), STACK_TRUNCATED)))


@pytest.mark.parametrize("form", Form)
def test_frames_of_a_new_kind_survive_an_otlp_round_trip(form):
    (sample,) = send(window_of(WHOLE), form).profiles[0].resources[0].samples
    assert sides(sample.stack) == sides(WHOLE)
    assert sample.stack.frames[1].lines == HANDLER.lines


def test_raw_addresses_of_a_new_frame_kind_survive_a_round_trip():
    raw = RawFrames(LUA, (0x30, 0x40), Unresolved.NO_SYMBOL)
    user = RawFrames(USER_SIDE, (0x30, 0x40), Unresolved.USER_ADDRESS)
    decoded = send(window_of(Stack((Side(USER_SIDE, user), Side(LUA, raw)))))
    frames = decoded.profiles[0].resources[0].samples[0].stack.frames
    assert [(frame.side, frame.address, frame.unresolved) for frame in frames] == [
        (USER_SIDE, 0x30, Unresolved.USER_ADDRESS),
        (USER_SIDE, 0x40, Unresolved.USER_ADDRESS),
        (LUA, 0x30, Unresolved.NO_SYMBOL),
        (LUA, 0x40, Unresolved.NO_SYMBOL),
    ]


def test_frequent_raw_addresses_are_decoded_with_the_correct_kind_of_frame():
    """Each frame kind has its own table, in which frequent addresses have the lowest indices."""
    numbers = range(200)
    user = [RawFrames(USER_SIDE, (0x1000, n), Unresolved.USER_ADDRESS) for n in numbers]
    raw = [RawFrames(LUA, (0x1000, 5 * n), Unresolved.NO_SYMBOL) for n in numbers]
    stacks = [
        Stack((Side(USER_SIDE, one), Side(LUA, other)))
        for one, other in zip(user, raw, strict=True)
    ]
    decoded = send(window_of(*stacks)).profiles[0].resources[0].samples
    assert [
        [(frame.side, frame.address) for frame in sample.stack.frames] for sample in decoded
    ] == [[(frame.side, frame.address) for frame in stack.frames] for stack in stacks]


def test_a_stack_that_could_not_be_captured_differs_from_an_unrequested_stack():
    failed = Stack((Side(KERNEL_SIDE, (VFS_READ,)), Side(LUA, (), StackStatus(-14))))
    unwanted = Stack((Side(KERNEL_SIDE, (VFS_READ,)),))
    first, second = send(window_of(failed, unwanted)).profiles[0].resources[0].samples
    results = [(side.kind, side.status) for side in first.stack.sides]
    assert results == [(KERNEL_SIDE, 0), (LUA, -14)]
    assert [side.kind for side in second.stack.sides] == [KERNEL_SIDE]


def test_alternating_frames_in_two_languages_keep_their_order():
    mixed = Stack.from_frames((C_CALL, HANDLER, C_CALL, HANDLER), {LUA: STACK_TRUNCATED})
    assert [side.kind for side in mixed.sides] == [USER_SIDE, LUA, USER_SIDE, LUA]
    assert [side.status for side in mixed.sides] == [0, 0, 0, STACK_TRUNCATED]
    (sample,) = send(window_of(mixed)).profiles[0].resources[0].samples
    assert sides(sample.stack) == sides(mixed)


def test_every_report_shows_frames_of_a_new_kind_below_kernel_frames():
    windows = [send(window_of(WHOLE))]
    assert folded(windows) == "dd;[truncated]_[j];handler_[j];vfs_read_[k] 1\n"
    rows = [line.split() for line in table(windows).splitlines()]
    assert ["0.0%", "100.0%", "handler", "lua"] in rows
    assert all(name in html(windows) for name in ("handler", "vfs_read"))
    frames = [frame["name"] for frame in json.loads(speedscope(windows))["shared"]["frames"]]
    assert frames == ["[truncated]", "handler", "vfs_read", "dd (7)"]
    assert b"handler" in gzip.decompress(pprof(windows))
