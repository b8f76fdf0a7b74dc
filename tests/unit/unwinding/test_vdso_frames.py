"""The unwind tables for the arm64 vDSO are derived from its code."""

import base64
import json
import shutil

import pytest

from otel_kprofiler.elf import ImageSource, read_elf
from otel_kprofiler.model import FrameSource
from otel_kprofiler.unwinding.vdso_frames import make_vdso_tables
from tests.truth import native
from tests.truth.recorded import read_recorded
from tests.unit.unwinding.files import DATA, content
from tests.unit.unwinding.test_go_frames import decode

CLOCK_GETTIME = 0x2D0
"""Address of ``__kernel_clock_gettime`` in the recorded vDSO."""
SP, LINK = 31, 30


@pytest.fixture(scope="module")
def vdso():
    return base64.b64decode(json.loads(content("arm64.json"))["arm64"]["vdso"])


def make(code, machine="aarch64"):
    source = ImageSource(code)
    return make_vdso_tables(source, read_elf(source, machine))


def rules(code):
    """Returns each function's rule for the return address, by start address."""
    entries = decode(make(code).made_frames, 0)
    result = {}
    for start, entry in entries.items():
        (row,) = entry.get_decoded().table
        assert row["cfa"].reg == SP
        result[start] = (row["cfa"].offset, row[LINK].type if LINK in row else None)
    return result


def test_the_return_address_of_functions_that_read_clocks_is_in_x30(vdso):
    assert rules(vdso) == dict.fromkeys((CLOCK_GETTIME, 1392, 1824), (0, None))


@pytest.mark.parametrize("word", [0xA9BE7BFD, 0xD10043FF, 0x94000010, 0xAA0303FD])
def test_a_vdso_function_that_changes_sp_x29_or_x30_has_no_unwind_rule(vdso, word):
    """The inserted instruction adds a frame, a local variable, a call, or a write to x29."""
    changed = bytearray(vdso)
    changed[CLOCK_GETTIME + 8 : CLOCK_GETTIME + 12] = word.to_bytes(4, "little")
    assert rules(bytes(changed)) == {
        CLOCK_GETTIME: (16, "VAL_EXPRESSION"), 0x570: (0, None), 0x720: (0, None)
    }  # fmt: skip


def test_no_unwind_tables_are_built_for_unrecognized_vdsos(vdso):
    assert make(vdso.replace(b"__kernel_", b"__others_")) is None
    other = bytearray(vdso)
    other[18:20] = (62).to_bytes(2, "little")
    assert make(bytes(other), "x86_64") is None


@pytest.mark.system
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_a_thread_in_the_vdso_is_unwound_to_its_caller(tmp_path):
    program, path = tmp_path / "arm64", tmp_path / "vdso"
    program.write_bytes(content("arm64"))
    recorded = read_recorded(DATA / "arm64.json.xz", "arm64", program, path)
    unwinder = native.NativeUnwinder(native.build(tmp_path), "aarch64")
    recorded.add_to(unwinder, program, path)
    recording = next(
        stack for stack in recorded.stacks if not stack.signal and len(stack.frames) > 1
    )
    (start,) = (m[0] for m in recorded.maps.mappings if m[4] == "[vdso]")
    registers = bytearray(recording.pt_regs())
    registers[32 * 8 : 33 * 8] = (start + CLOCK_GETTIME + 40).to_bytes(8, "little")
    registers[30 * 8 : 31 * 8] = recording.frames[1].to_bytes(8, "little")
    stack = unwinder.unwind(bytes(registers), *recording.dump.stacks[0])
    assert stack.addresses[:2] == (start + CLOCK_GETTIME + 40, recording.frames[1])
    assert stack.sources[1] is FrameSource.DISASSEMBLY
