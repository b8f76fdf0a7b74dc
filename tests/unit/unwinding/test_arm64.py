"""The unwinder's arm64 code, built for this machine, unwinds stacks from an arm64 kernel."""

import shutil
import struct

import pytest

from tests.truth import native
from tests.truth.recorded import read_recorded
from tests.truth.reference import ARM64, unwind
from tests.truth.tables import ElfTables
from tests.unit.unwinding.files import DATA, content

PROGRAMS = ("arm64", "arm64-pac")
SAME, AT_CFA, IN_REGISTER, UNDEFINED = 0, 1, 3, 4
KINDS = {"OFFSET": AT_CFA, "REGISTER": IN_REGISTER, "UNDEFINED": UNDEFINED, "SAME_VALUE": SAME}
FP, RA, SP, PC = 29, 30, 31, 32
JIT = 0xFFFF_F000_0000

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return native.build(tmp_path_factory.mktemp("native"))


@pytest.fixture(params=PROGRAMS)
def program(request, tmp_path):
    path = tmp_path / request.param
    path.write_bytes(content(request.param))
    return path


def rule_of(row, column):
    rule = row.get(column)
    if rule is None:
        return SAME, 0
    return KINDS[rule.type], rule.arg or 0


def found_rule(kind, from_column, offset):
    return kind, {AT_CFA: offset, IN_REGISTER: from_column}.get(kind, 0)


def test_every_row_matches_an_independent_decoder(built, program):
    unwinder = native.NativeUnwinder(built, "aarch64")
    slot = unwinder.add_table(program, 1)
    with program.open("rb") as file:
        rows = list(ElfTables(file).rows())
    assert len(rows) > 10
    for row in rows:
        result = unwinder.row(slot, row["pc"])
        assert result is not None, hex(row["pc"])
        cfa = row["cfa"]
        assert (result.cfa_kind, result.cfa_column, result.cfa_offset) == (0, cfa.reg, cfa.offset)
        assert found_rule(result.fp, result.fp_column, result.fp_offset) == rule_of(row, FP)
        assert found_rule(result.ra, result.ra_column, result.ra_offset) == rule_of(row, RA)


def test_stacks_match_a_real_kernel_and_the_reference_unwinder(built, program, tmp_path):
    """The stacks contain signal frames and signed return addresses."""
    vdso = tmp_path / "vdso"
    recorded = read_recorded(DATA / "arm64.json.xz", program.name, program, vdso)
    unwinder = native.NativeUnwinder(built, "aarch64")
    recorded.add_to(unwinder, program, vdso)
    assert sum(stack.signal for stack in recorded.stacks) >= 5
    for one in recorded.stacks:
        truth = unwind(recorded.maps, one.dump, processor=ARM64)
        assert (truth.frames, truth.complete) == (one.frames, True)
        stack = unwinder.unwind(one.pt_regs(), *one.dump.stacks[0])
        assert list(stack.addresses) == one.frames, stack
        assert stack.end.name == "COMPLETE"


class Records:
    """A process that runs ``records.S``."""

    base = 0x40_0000
    main, bottom, middle, none = (0x40_0000 + at for at in (0xB4, 0xC4, 0xDC, 0xF0))
    """The return addresses of the calls in the program's functions."""
    untabled = 0x40_00F8
    """A function that has no unwind rule, and whose second instruction is a call."""
    stack = 0xFFFF_FF00_0000

    def __init__(self, built, tmp_path):
        path = tmp_path / "records"
        path.write_bytes(content("arm64-records"))
        self.unwinder = native.NativeUnwinder(built, "aarch64")
        self.unwinder.add_table(path, 1)
        self.unwinder.add_mapping(self.base, self.base + 4096, 0, 1)
        self.unwinder.add_memory(self.base, path.read_bytes())
        self.unwinder.add_mapping(JIT, JIT + 4096, 0, native.ANONYMOUS)

    def unwind(self, words, pc, *, fp=0, link=0):
        """Unwinds from ``pc``; ``words`` maps offsets from the stack pointer to 8-byte words."""
        memory = bytearray(1024)
        for at, value in words.items():
            struct.pack_into("=Q", memory, at, value)
        registers = [0] * 33
        registers[FP], registers[RA] = self.stack + fp, link
        registers[SP], registers[PC] = self.stack, pc
        return self.unwinder.unwind(struct.pack("=34Q", *registers, 0), self.stack, bytes(memory))


def test_callers_of_code_without_tables_are_unwound_by_their_frame_records(built, tmp_path):
    """On arm64, a frame record does not show where its function's frame ends."""
    records = Records(built, tmp_path)
    at = records.stack
    words = {
        0: at + 96, 8: records.middle,  # the function without tables, whose locals end at 64
        96: at + 224, 104: records.bottom,  # a record in the middle of its frame (64 to 224)
        224: 0, 232: records.main,
    }  # fmt: skip
    stack = records.unwind(words, JIT)
    assert list(stack.addresses) == [JIT, records.middle, records.bottom, records.main]
    assert stack.end.name == "COMPLETE"


def test_a_caller_without_a_frame_record_ends_the_stack(built, tmp_path):
    records = Records(built, tmp_path)
    words = {0: records.stack + 96, 8: records.none, 16: records.middle, 104: records.bottom}
    stack = records.unwind(words, JIT)
    assert list(stack.addresses) == [JIT, records.none]
    assert stack.end.name == "NO_RULE"


def test_the_caller_of_a_leaf_without_a_rule_is_read_from_the_link_register(built, tmp_path):
    records = Records(built, tmp_path)
    stack = records.unwind({0: 0, 8: records.main}, records.untabled, link=records.bottom)
    assert list(stack.addresses) == [records.untabled, records.bottom, records.main]
    assert stack.end.name == "COMPLETE"


def test_a_link_register_that_points_into_the_leaf_ends_the_stack(built, tmp_path):
    """After a call, the link register still holds the address to which that call returned."""
    records = Records(built, tmp_path)
    words = {0: records.stack, 8: records.main}
    stack = records.unwind(words, records.untabled + 12, link=records.untabled + 8)
    assert list(stack.addresses) == [records.untabled + 12]
    assert stack.end.name == "NO_RULE"
