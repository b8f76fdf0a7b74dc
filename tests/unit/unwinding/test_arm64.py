"""The unwinder's arm64 code, built for this machine, unwinds stacks from an arm64 kernel."""

import lzma
import shutil
from pathlib import Path

import pytest

from tests.truth import native
from tests.truth.recorded import read_recorded
from tests.truth.reference import ARM64, unwind
from tests.truth.tables import ElfTables

DATA = Path(__file__).parents[2] / "data" / "unwinding"
PROGRAMS = ("arm64", "arm64-pac")
SAME, AT_CFA, IN_REGISTER, UNDEFINED = 0, 1, 3, 4
KINDS = {"OFFSET": AT_CFA, "REGISTER": IN_REGISTER, "UNDEFINED": UNDEFINED, "SAME_VALUE": SAME}
FP, RA = 29, 30

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds the unwinder for this machine."""
    return native.build(tmp_path_factory.mktemp("native"))


@pytest.fixture(params=PROGRAMS)
def program(request, tmp_path):
    """Extracts an arm64 program."""
    path = tmp_path / request.param
    path.write_bytes(lzma.decompress((DATA / f"{request.param}.xz").read_bytes()))
    return path


def rule_of(row, column):
    """Returns the kind and operand of a register's rule."""
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
    """The stacks pass through signal frames and have signed return addresses."""
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
