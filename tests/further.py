"""Marks test cases that are too expensive for the default run."""

import pytest


def further(*cases):
    """Marks test cases as ``long``. A tuple is a case with several parameters."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*value, marks=pytest.mark.long) for value in values]


def further_between(cases):
    """Marks all cases ``long`` except the first and the last."""
    ends = (*cases[:1], *cases[-1:])
    return [case if case in ends else pytest.param(case, marks=pytest.mark.long) for case in cases]


def further_of(cases, first):
    return [*first, *further(*(case for case in cases if case not in first))]
