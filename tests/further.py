"""Additional cases of an expensive test, beyond the default run."""

import pytest


def further(*cases):
    """Mark cases `long`: `make test-long` runs them; `make test` runs the test's other cases.

    A tuple is a case of several parameters.
    """
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*value, marks=pytest.mark.long) for value in values]


def further_between(cases):
    """All cases, such as versions of an interpreter, with only the first and last not `long`."""
    ends = (*cases[:1], *cases[-1:])
    return [case if case in ends else pytest.param(case, marks=pytest.mark.long) for case in cases]


def further_of(cases, first):
    """All cases; all but the ``first`` are marked `long`."""
    return [*first, *further(*(case for case in cases if case not in first))]
