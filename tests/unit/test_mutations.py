"""The code that each mutation replaces exists in the source."""

import pytest

from otel_kprofiler.bpf import PROGRAMS
from tests.faults.mutations import MUTATIONS, ROOT
from tests.truth import mutations as unwinder
from tests.truth.python import mutations as python


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda case: case.fault)
def test_the_code_replaced_by_each_mutation_occurs_exactly_once(mutation):
    assert (ROOT / mutation.path).read_text().count(mutation.old) == 1
    for test in mutation.test.split():
        assert (ROOT / test.partition("::")[0]).exists()


@pytest.mark.parametrize(
    "mutation", [*unwinder.MUTATIONS, *python.MUTATIONS], ids=lambda case: case.name
)
def test_the_code_that_each_bpf_mutation_replaces_exists(mutation):
    assert mutation.old in (PROGRAMS / mutation.file).read_text()
