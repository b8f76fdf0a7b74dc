"""The code that each mutation replaces, and the test that must fail, exist."""

import pytest

from otel_kprofiler.bpf import PROGRAMS
from tests.faults.mutations import MUTATIONS, ROOT
from tests.truth import mutations as unwinder
from tests.truth.python import mutations as python


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda case: case.fault)
def test_the_code_replaced_by_each_mutation_occurs_exactly_once(mutation):
    assert (ROOT / mutation.path).read_text().count(mutation.old) == 1
    for test in mutation.test.split():
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in source


@pytest.mark.parametrize(
    "mutation", [*unwinder.MUTATIONS, *python.MUTATIONS], ids=lambda case: case.name
)
def test_the_code_that_each_bpf_mutation_replaces_exists(mutation):
    assert mutation.old in (PROGRAMS / mutation.file).read_text()
