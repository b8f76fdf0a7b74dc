"""Cases of an expensive test beyond those of the default run."""

import pytest


def further(*cases):
    """Mark cases `long`: `make test-long` runs them, `make test` runs the others of their test."""
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


def further_of(cases, first):
    """All cases, of which only the ``first`` are not `long`."""
    return [*first, *further(*(case for case in cases if case not in first))]
