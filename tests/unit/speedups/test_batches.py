"""The C functions for batches of samples check their arguments, and release all references."""

import contextlib

import pytest

from otel_kprofiler.model import KERNEL_SIDE, ON_CPU, USER_SIDE, RawSample, Side, Stack
from tests.speedups import load_compiled, measure_growth

compiled = load_compiled()
COLLECTED = ((KERNEL_SIDE, 0),)
SAMPLE = RawSample(ON_CPU, 1, 2, 3, 4, 5, 6, 7, b"work", COLLECTED, (b"stack",), None)
SIDE = Side(KERNEL_SIDE, ())


def find(*samples, states=(), recent=None, earlier=None, sides=None, make=Stack):
    stacks = []
    recent = {} if recent is None else recent
    sides = {KERNEL_SIDE: ({(b"stack", 0, None): SIDE}, -1)} if sides is None else sides
    size = compiled.find_stacks(
        list(samples), states, recent, earlier or {}, sides, Side, make, stacks
    )
    return stacks, recent, size


def test_new_stacks_are_made_from_cached_sides_and_kept():
    stacks, recent, size = find(SAMPLE, SAMPLE)
    assert stacks[0] is stacks[1] is recent[COLLECTED, (b"stack",)]
    assert stacks[0].sides == (SIDE,)
    assert size == len(b"stack")


def test_earlier_stacks_become_recent():
    stack, key = Stack(), (COLLECTED, (b"stack",), 2)
    stacks, recent, size = find(SAMPLE, states=(lambda s: s.time_ns,), earlier={key: stack})
    assert stacks == [stack]
    assert recent == {key: stack}
    assert size == len(b"stack")


def test_sides_depend_on_the_state_of_their_resolver():
    other = SIDE._replace(status=1)
    cached = {(b"stack", 0, 2): SIDE, (b"stack", 0, 9): other}
    samples = SAMPLE, SAMPLE._replace(time_ns=9), SAMPLE._replace(time_ns=10)
    states = (lambda s: None, lambda s: s.time_ns)
    stacks, *_ = find(*samples, states=states, sides={KERNEL_SIDE: (cached, 3)})
    assert [stack and stack.sides for stack in stacks] == [(SIDE,), (other,), None]


@pytest.mark.parametrize(
    "sides",
    [
        {},
        {USER_SIDE: ({}, -1)},
        {KERNEL_SIDE: ({}, -1)},
        {KERNEL_SIDE: ({(b"stack", 0, None): 5}, -1)},
    ],
)
def test_stacks_without_cached_sides_are_left(sides):
    assert find(SAMPLE, sides=sides) == ([None], {}, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": [5]}, {"samples": [SAMPLE[:17]]}, {"samples": (SAMPLE,)},
        {"samples": [SAMPLE._replace(collected=5)]}, {"samples": [SAMPLE._replace(stacks=5)]},
        {"samples": [SAMPLE._replace(collected=(5,))]}, {"samples": [SAMPLE._replace(stacks=(5,))]},
        {"samples": [SAMPLE._replace(stacks=([],))]},
        {"states": [str]}, {"states": (5,)}, {"recent": []}, {"earlier": []}, {"sides": []},
        {"sides": {KERNEL_SIDE: 5}}, {"sides": {KERNEL_SIDE: ({},)}},
        {"sides": {KERNEL_SIDE: ([], -1)}}, {"sides": {KERNEL_SIDE: ({}, "0")}},
        {"make": 5}, {"stacks": ()},
    ],
)  # fmt: skip
def test_invalid_arguments_of_find_stacks_are_rejected(change):
    arguments = {
        "samples": [SAMPLE], "states": (), "recent": {}, "earlier": {},
        "sides": {KERNEL_SIDE: ({(b"stack", 0, None): SIDE, (5, 0, None): SIDE}, -1)},
        "type": Side, "make": Stack, "stacks": [],
    }  # fmt: skip
    with pytest.raises(TypeError):
        compiled.find_stacks(*{**arguments, **change}.values())


def test_missing_states_and_stacks_are_rejected():
    with pytest.raises(IndexError):
        find(SAMPLE, sides={KERNEL_SIDE: ({}, 2)})
    with pytest.raises(IndexError):
        find(SAMPLE._replace(stacks=()))
    with pytest.raises(IndexError):
        compiled.group_samples([SAMPLE], [], 0, {})


def test_exceptions_of_callbacks_are_raised():
    def fail(_):
        raise LookupError

    with pytest.raises(LookupError):
        find(SAMPLE, states=(fail,))
    with pytest.raises(LookupError):
        find(SAMPLE, make=fail)


def test_samples_may_be_removed_by_callbacks():
    samples = [SAMPLE] * 3
    stacks, sides = [], {KERNEL_SIDE: ({(b"stack", 0, None): SIDE}, -1)}

    def state(_):
        samples.clear()

    compiled.find_stacks(samples, (state,), {}, {}, sides, Side, Stack, stacks)
    assert len(stacks) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (), ([], [], 0), ((), [], 0, {}), ([], (), 0, {}), ([], [], "0", {}), ([], [], 0, []),
        ([5], [Stack()], 0, {}), ([SAMPLE[:17]], [Stack()], 0, {}),
        ([SAMPLE._replace(comm=[])], [Stack()], 0, {}), ([SAMPLE], [Side(KERNEL_SIDE, ())], 0, {}),
    ],
)  # fmt: skip
def test_invalid_arguments_of_group_samples_are_rejected(arguments):
    with pytest.raises((TypeError, AttributeError)):
        compiled.group_samples(*arguments)


@pytest.mark.parametrize("sides", [[], (5,), ((1, 2, 3),)])
def test_stacks_without_valid_sides_are_rejected(sides):
    with pytest.raises(TypeError):
        compiled.group_samples([SAMPLE], [Stack(sides)], 0, {})


def test_a_group_that_is_not_a_list_is_rejected():
    stack = Stack()
    groups = {(stack, 5, b"work", 3, None, (), None): 5}
    with pytest.raises(TypeError):
        compiled.group_samples([SAMPLE], [stack], 0, groups)


@pytest.mark.system
def test_batches_leak_no_memory():
    stack = Stack((SIDE,))
    left = SAMPLE._replace(context=b"x")

    def work():
        for _ in range(10_000):
            find(SAMPLE, SAMPLE, SAMPLE._replace(stacks=(b"other",)), states=(len,))
            find(SAMPLE, SAMPLE._replace(stacks=(b"other",)))
            compiled.group_samples([SAMPLE, SAMPLE, left], [stack] * 3, 0, {})
            with contextlib.suppress(TypeError):
                find(SAMPLE, 5)

    # A leak of a byte in each round would exceed this.
    assert measure_growth(work) < 10_000
