"""The summary of a recording."""

import pytest

from otel_kprofiler.cli.summary import find_whole_share
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    PYTHON_SIDE,
    STATUS_BY_END,
    USER_SIDE,
    Frame,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    StackEnd,
    Window,
    WindowSample,
)

PENDING = {USER_SIDE: STATUS_BY_END[StackEnd.PENDING]}


def sample(sides, statuses=None, count=1):
    stack = Stack.from_frames((Frame(None, 1, (), 0, side) for side in sides), statuses)
    return WindowSample(
        stack, tid=1, thread_name="t", cpu=0, link=None, timestamps_unix_ns=list(range(count))
    )


def whole_share(*samples):
    profile = Profile(ON_CPU, 1, [ResourceSamples(Resource({}), list(samples))], taken=9)
    return find_whole_share([Window(0, 1, [profile])])


MIXED = [USER_SIDE, PYTHON_SIDE, USER_SIDE, PYTHON_SIDE, USER_SIDE]


def test_a_stack_with_python_functions_counts_once():
    assert whole_share(sample(MIXED, PENDING), sample([USER_SIDE])) == pytest.approx(1 / 2)
    assert whole_share(sample(MIXED), sample([USER_SIDE], PENDING)) == pytest.approx(1 / 2)


def test_each_sample_of_a_stack_counts():
    assert whole_share(sample(MIXED, count=3), sample(MIXED, PENDING)) == pytest.approx(3 / 4)


def test_a_cut_stack_without_native_frames_counts():
    assert whole_share(sample([PYTHON_SIDE], PENDING), sample(MIXED)) == pytest.approx(1 / 2)


def test_samples_without_a_user_stack_are_left_out():
    assert whole_share(sample([KERNEL_SIDE])) is None
    assert whole_share(sample([KERNEL_SIDE]), sample([USER_SIDE])) == 1
