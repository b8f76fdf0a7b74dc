"""Compares profiles that have known differences, with both bursty and independent samples."""

from functools import cache
from itertools import accumulate
from random import Random

import pytest

from otel_kprofiler.analysis import GROUPINGS, Part, compare, comparison, load_samples
from otel_kprofiler.model import KERNEL_SIDE, Frame, Line, Stack, WindowSample
from tests.further import further
from tests.windows import make_window

PAIRS = 20
SECONDS = 20
SECOND_NS = 10**9
HZ = 997
"""The sampling rate on one CPU, which yields about 20,000 samples."""


def call(name):
    """Returns the stacks of a system call that spends its time in three functions."""
    return [
        Stack.from_frames([
            Frame(None, at, (Line(function),), 0, KERNEL_SIDE)
            for at, function in enumerate([leaf, f"ksys_{name}", f"__x64_sys_{name}"])
        ])
        for leaf in (f"{name}_a", f"{name}_b", "copy_to_user")
    ]  # fmt: skip


CALLS = {name: call(name) for name in ("read", "write", "stat", "poll", "send")}
STACKS = {name: call(name)[0] for name in map(str, range(60))}
MANY, MOST = 100, 13
"""More than ``MOST`` of ``MANY`` events with a probability of 5 % occur in 1 of 2,000 tests."""


@cache
def profile(seed, read=20):
    """Returns the profile of a thread that switches system calls every 2 ms on average."""
    random, times = Random(seed), {}
    shares = {**dict.fromkeys(CALLS, (100 - read) / 4), "read": read}
    now, name, left = 0, "read", 0.0
    while now < SECONDS * SECOND_NS:
        if left <= 0:
            name = random.choices(list(shares), list(shares.values()))[0]
            left = random.expovariate(1 / 2e6)
        times.setdefault(random.choice(CALLS[name]), []).append(now)
        now += SECOND_NS // HZ
        left -= SECOND_NS // HZ
    return part(times)


def part(times):
    samples = [WindowSample(stack, 1, "t", 0, None, result, []) for stack, result in times.items()]
    length_ns = SECONDS * SECOND_NS
    window = make_window(0, length_ns, ({}, samples), period_ns=SECOND_NS // HZ)
    return Part(load_samples([window]), 0, length_ns)


def independent(random, shares, count):
    drawn = random.choices(list(shares), cum_weights=list(accumulate(shares.values())), k=count)
    times = {name: [] for name in drawn}
    for name in drawn:
        times[name].append(random.randrange(SECONDS * SECOND_NS))
    return part({STACKS[name]: result for name, result in times.items()})


@pytest.mark.parametrize("count", [300, *further(3000)])
def test_at_most_5_percent_of_comparisons_of_equal_distributions_show_a_change(count):
    """Sixty functions take 0.3 to 18 % of the time, so that some occur in few or no samples."""
    random, shares = Random(count), {name: 1 / (2 + at) ** 1.2 for at, name in enumerate(STACKS)}
    false = sum(
        any(
            change.is_changed
            for change in compare(
                independent(random, shares, count), independent(random, shares, count),
                GROUPINGS["function"], per_second=False,
            )
        )
        for _ in range(MANY)
    )  # fmt: skip
    assert false <= MOST


def test_groups_too_rare_to_reach_significance_are_not_counted_as_tests():
    """If only groups that differ were counted, the significance level would depend on results."""
    assert comparison._reject([0.0004, *[0.7] * 100]) == set()
    assert comparison._reject([0.0004, *[1.0] * 100]) == {0}


@pytest.mark.parametrize(("by", "per_second"), [("syscall", True), *further(("function", False))])
def test_profiles_from_the_same_distribution_rarely_differ_significantly(by, per_second):
    results = [
        any(
            change.is_changed
            for change in compare(
                profile(seed), profile(PAIRS + seed), GROUPINGS[by], per_second=per_second
            )
        )
        for seed in range(PAIRS)
    ]  # fmt: skip
    assert sum(results) <= 2


def test_the_system_call_with_an_increased_percentage_is_listed_first():
    for seed in range(PAIRS):
        before, after = profile(seed), profile(PAIRS + seed, 24)
        assert before.samples.count >= 19_900
        first = compare(before, after, GROUPINGS["syscall"], per_second=False)[0]
        assert (first.key.name, first.is_changed) == ("read", True)
        assert abs(first.own.change - 0.04) < 2.5 * first.own.margin


def untimed(random, shares, count):
    """Returns a profile like that of a pprof file, in which all samples have the same time."""
    drawn = random.choices(list(shares), cum_weights=list(accumulate(shares.values())), k=count)
    return part({STACKS[name]: [0] * drawn.count(name) for name in dict.fromkeys(drawn)})


@pytest.mark.parametrize("per_second", [False, True])
def test_changes_between_profiles_without_times_rarely_exceed_their_margins(per_second):
    random, shares, outside = Random(1), {"0": 2, "1": 1}, 0
    for _ in range(MANY):
        before, after = (
            untimed(random, shares, round(random.gauss(300, 300**0.5))) for _ in range(2)
        )
        changes = compare(before, after, GROUPINGS["function"], per_second=per_second)
        (change,) = [change.own for change in changes if change.key.name == "0_a"]
        outside += abs(change.change) > change.margin
    assert outside <= MOST


@pytest.mark.parametrize("per_second", [False, True])
def test_a_change_between_profiles_without_times_is_significant(per_second):
    before = untimed(Random(2), {"0": 1, "1": 4}, 300)
    after = untimed(Random(3), {"0": 2, "1": 3}, 300)
    first = compare(before, after, GROUPINGS["function"], per_second=per_second)[0]
    assert first.is_changed
    assert 0 < first.own.margin < abs(first.own.change)
