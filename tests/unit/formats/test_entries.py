"""Reports show each frame's function, or the reason why it has no name."""

from otel_kprofiler.formats import function_rows
from otel_kprofiler.formats.entries import frame_entries
from otel_kprofiler.model import (
    USER_SIDE,
    FileId,
    Frame,
    Module,
    ModuleKind,
    Stack,
    Unresolved,
    WindowSample,
)
from tests.windows import make_window

LIBRARY = Module("libx.so", ModuleKind.USER, None, FileId("1" * 32), 0)


def unnamed(address, offset):
    return Frame(LIBRARY, address, (), offset, USER_SIDE, Unresolved.NO_NAME)


def test_a_function_without_a_name_is_shown_by_its_start_address():
    (entry,) = frame_entries(unnamed(0x1234, 0x34))
    assert (entry.name, entry.module, entry.reason) == (
        "fun_1200", "libx.so", "the file has no name for the function",
    )  # fmt: skip


def test_nameless_functions_have_separate_rows():
    stacks = [Stack.from_frames([unnamed(0x1200 + at, at % 0x100)]) for at in (1, 2, 0x101)]
    samples = [WindowSample(stack, 1, "t", 0, None, [1], []) for stack in stacks]
    window = make_window(0, 9, ({}, samples))
    rows = {row.function: row.self_count for row in function_rows(window.profiles)}
    assert rows == {"fun_1200": 2, "fun_1300": 1}
