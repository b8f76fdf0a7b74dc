"""User stacks in code without unwind tables, including C libraries, match the known call chains."""

import pytest

from tests.needs import CLANG, LIBBPF, X86_64
from tests.truth import dumps
from tests.truth.untabled import PROGRAMS, find_missing, measure

pytestmark = [pytest.mark.live, X86_64, LIBBPF, CLANG]

STACKS = 400


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            each,
            id=f"{each.libc}: {each.name}",
            marks=[pytest.mark.long] * (each.name != "C without tables, static"),
        )
        for each in PROGRAMS
    ],
)
def test_stacks_of_stripped_programs_without_unwind_tables_are_correct(tmp_path, program):
    if missing := find_missing(program):
        pytest.skip(missing)
    result = measure(program, dumps.build(tmp_path), tmp_path, STACKS)
    assert result.is_good, (result.wrong.most_common(3), result.ends)
