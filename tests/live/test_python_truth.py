"""The Python frames of each sample match the code running at that instant, in every interpreter."""

import platform
import sys
from pathlib import Path

import pytest

from tests.further import further_of
from tests.interpreters import VERSIONS, Python, find_pythons, require_pythons
from tests.needs import CLANG, LIBBPF
from tests.truth.python.chains import GREENLET, STYLES
from tests.truth.python.measure import building, churning, measure, running

SAMPLES = 1500
MAX_ABSENT = 0.04  # twice the usual fraction

pytestmark = [pytest.mark.live, LIBBPF, CLANG]


@pytest.fixture(scope="module")
def built():
    with building() as path:
        yield path


def check(report, samples):
    assert not report.wrong, report.describe()
    assert report.total >= samples, report.describe()
    assert report.absent + report.unknown <= MAX_ABSENT * report.total, report.describe()


@pytest.mark.parametrize("minor", further_of(VERSIONS, ("3.14",)))
def test_every_stack_matches_the_running_code(built, minor):
    for python in require_pythons(minor):
        with running(python) as target:
            (report,) = measure(built, [target], SAMPLES)
        check(report, SAMPLES)
        assert set(STYLES) <= set(report.styles)
        assert report.in_system_calls


def test_each_greenlet_has_separate_frames(built, monkeypatch):
    """Greenlets have no callers, and have no frames before they start or after they finish."""
    greenlet = pytest.importorskip("greenlet")
    monkeypatch.setenv("PYTHONPATH", str(Path(greenlet.__file__).parents[1]))
    python = Python(Path(sys.executable), platform.python_version())
    with running(python, styles=(*STYLES, GREENLET)) as target:
        (report,) = measure(built, [target], SAMPLES)
    check(report, SAMPLES)
    assert report.right >= SAMPLES // 2, report.describe()
    assert 0 < report.frameless <= report.outcomes["no_frame"]
    assert report.styles[GREENLET]


def test_two_versions_of_python_are_sampled_simultaneously(built):
    pythons = find_pythons()
    with running(pythons[0]) as first, running(pythons[-1]) as second:
        for report in measure(built, [first, second], SAMPLES // 4):
            check(report, SAMPLES // 4)


@pytest.mark.parametrize("index", [0, -1])
def test_code_at_a_reused_address_is_not_mistaken_for_earlier_code(built, index):
    with churning(find_pythons()[index]) as target:
        (report,) = measure(built, [target], SAMPLES)
    assert not report.wrong, report.describe()
    assert report.right >= SAMPLES // 2, report.describe()
