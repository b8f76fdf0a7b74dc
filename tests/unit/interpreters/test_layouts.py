"""CPython layouts come from built-in tables, or from offsets that the interpreter exports."""

import contextlib
import struct

import pytest

from otel_kprofiler.interpreters import InterpreterRefused, Refusal, Version, make_layout
from otel_kprofiler.interpreters.debug_offsets import parse_debug_offsets
from tests.interpreters import ROOT

DATA = ROOT / "tests" / "data" / "interpreters"
CAPTURED = ("3.13.0", "3.13.18", "3.14.10", "3.15.2")


def captured(name):
    return bytearray(DATA.joinpath(f"{name}.bin").read_bytes())


def version(name):
    return Version(*map(int, name.split(".")))


# The offset of each member, computed by offsetof() with the headers of each Python version.
COMPILED = {
    "interpreters_head": (40, 40, 632, 808, 936),
    "interpreter_next": (0, 0, 7264, 7272, 7264),
    "interpreter_threads": (16, 72, 7344, 7344, 7336),
    "thread_next": (8, 8, 8, 8, 8),
    "thread_interpreter": (16, 16, 16, 16, 16),
    "thread_native": (160, 144, 160, 160, 184),
    "thread_status": (0, 0, 32, 32, 32),
    "thread_frame": (56, 56, 72, 72, 72),
    "thread_chunk": (296, 232, 232, 232, 256),
    "frame_code": (32, 0, 0, 0, 0),
    "frame_instruction": (56, 56, 56, 56, 56),
    "frame_previous": (48, 8, 8, 8, 8),
    "frame_owner": (69, 70, 70, 74, 74),
    "frame_bytes": (72, 72, 72, 80, 80),
    "code_first_line": (72, 68, 68, 68, 68),
    "code_file": (112, 112, 112, 112, 112),
    "code_name": (128, 128, 128, 128, 128),
    "code_table": (136, 136, 136, 136, 136),
    "code_traceable": (168, 176, 184, 192, 192),
    "code_bytes": (184, 192, 200, 208, 208),
    "string_ascii": (48, 40, 40, 40, 40),
    "string_other": (72, 56, 56, 56, 56),
}


@pytest.mark.parametrize(
    ("column", "name"), list(enumerate(("3.11.7", "3.12.1", "3.13.0", "3.14.10", "3.15.2")))
)
def test_the_layout_of_each_python_version_matches_its_headers(column, name):
    runtime = captured(name) if name in CAPTURED else b"\0" * 1024
    layout = make_layout(version(name), bytes(runtime))
    assert {key: getattr(layout, key) for key in COMPILED} == {
        key: values[column] for key, values in COMPILED.items()
    }
    assert len(layout.pack()) == 8 * len(layout)


def test_all_releases_of_a_version_share_one_layout():
    first, last = (make_layout(version(one), bytes(captured(one))) for one in CAPTURED[:2])
    assert first == last


def refusal(name, runtime):
    with pytest.raises(InterpreterRefused) as refused:
        make_layout(version(name) if isinstance(name, str) else name, bytes(runtime))
    return refused.value.refusal


@pytest.mark.parametrize("name", ["2.7.18", "3.10.13", "3.16.0", "4.11.0"])
def test_unsupported_python_versions_are_rejected(name):
    assert refusal(name, captured("3.14.10")) is Refusal.UNKNOWN_VERSION


def test_prereleases_are_rejected():
    assert refusal(Version(3, 14, 0, 0xB), captured("3.14.10")) is Refusal.UNKNOWN_VERSION


@pytest.mark.parametrize("name", CAPTURED)
def test_free_threaded_builds_of_python_are_rejected(name):
    data = captured(name)
    struct.pack_into("<Q", data, 16, 1)
    assert refusal(name, data) is Refusal.FREE_THREADED


@pytest.mark.parametrize("name", CAPTURED)
def test_debug_offsets_of_another_python_version_or_build_are_rejected(name):
    assert refusal(name, bytes(1024)) is Refusal.OTHER_LAYOUT
    assert refusal(name, captured(name)[:100]) is Refusal.OTHER_LAYOUT
    other = next(one for one in CAPTURED if one[:4] != name[:4])
    assert refusal(name, captured(other)) is Refusal.OTHER_LAYOUT
    offsets = parse_debug_offsets(bytes(captured(name)), version(name).minor)
    for index, key in enumerate(offsets):
        data = captured(name)
        struct.pack_into("<Q", data, 8 + 8 * index, 1 << 40)
        if key in {"frame.previous", "thread.native_thread_id", "code.qualname", "string.state"}:
            assert refusal(name, data) is Refusal.OTHER_LAYOUT


@pytest.mark.parametrize("name", CAPTURED)
def test_corruption_of_any_word_is_detected_unless_the_word_is_unused(name):
    right = make_layout(version(name), bytes(captured(name)))
    for at in range(0, 1024, 8):
        data = captured(name)
        struct.pack_into("<Q", data, at, (1 << 64) - 1)
        with contextlib.suppress(InterpreterRefused):
            assert make_layout(version(name), bytes(data)) == right
