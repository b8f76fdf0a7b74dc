"""Each mutation of the fault tests still matches the code that it replaces."""

import pytest

from tests.faults.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda case: case.fault)
def test_the_code_replaced_by_each_mutation_occurs_exactly_once(mutation):
    assert (ROOT / mutation.path).read_text().count(mutation.old) == 1
    for test in mutation.test.split():
        assert (ROOT / test.partition("::")[0]).exists()
