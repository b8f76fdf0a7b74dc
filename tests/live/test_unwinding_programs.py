"""User stacks of real programs, compared frame by frame with an independent unwinder.

``make test-unwinding-truth`` compares more programs.
"""

import subprocess

import pytest

from otel_kprofiler.model import StackEnd
from tests.further import further_of
from tests.needs import CLANG, LIBBPF, X86_64
from tests.truth import dumps
from tests.truth.compare import Verdict
from tests.truth.measure import measure
from tests.truth.programs import PROGRAMS, find_missing

pytestmark = [pytest.mark.live, X86_64, LIBBPF, CLANG]

STACKS = 200
SHORT = (
    "Rust", "Go", "Go and C", "node", "python3", "python3 and libcrypto", "bash",
    "clang and libLLVM",
)  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return dumps.build(tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("name", further_of(SHORT, ("Go", "Go and C", "node", "python3", "bash")))
def test_stacks_of_real_programs_are_correct(built, tmp_path, name):
    (program,) = [program for program in PROGRAMS if program.name == name]
    if missing := find_missing(program):
        pytest.skip(missing)
    try:
        report = measure(program, built, tmp_path, STACKS)
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.stderr.decode()) from error
    assert not report.wrong, f"{len(report.wrong)} wrong:\n" + "\n\n".join(report.wrong[:3])
    # If there are few stacks, a single rare stack accounts for a large fraction.
    assert report.ends[StackEnd.COMPLETE] >= (program.share - 0.03) * report.total, report.ends
    assert report.verdicts[Verdict.EQUAL] >= 0.8 * report.total, report.verdicts
