"""Comparisons of profiles of known difference, in which samples come in bursts."""

from functools import cache
from random import Random

import pytest

from otel_kprofiler.analysis import GROUPINGS, Part, compare, load_samples
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    Frame,
    Line,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    Window,
    WindowSample,
)

PAIRS = 20
SECONDS = 20
SECOND_NS = 10**9
HZ = 997
"""Of one CPU: some 20,000 samples."""


def call(name):
    """The stack of a system call, whose work is in one of three functions."""
    return [
        Stack.from_frames([
            Frame(None, at, (Line(function),), 0, KERNEL_SIDE)
            for at, function in enumerate([leaf, f"ksys_{name}", f"__x64_sys_{name}"])
        ])
        for leaf in (f"{name}_a", f"{name}_b", "copy_to_user")
    ]  # fmt: skip


CALLS = {name: call(name) for name in ("read", "write", "stat", "poll", "send")}


@cache
def profile(seed, read=20):
    """Of a thread that spends 2 ms on average in one system call, then in another."""
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
    samples = [WindowSample(stack, 1, "t", 0, None, found, []) for stack, found in times.items()]
    made = Profile(ON_CPU, SECOND_NS // HZ, [ResourceSamples(Resource({}), samples)])
    window = Window(0, SECONDS * SECOND_NS, [made])
    return Part(load_samples([window]), 0, SECONDS * SECOND_NS)


@pytest.mark.parametrize(("by", "per_second"), [("function", False), ("syscall", True)])
def test_equal_profiles_have_no_change_but_by_the_level_of_chance(by, per_second):
    found = [
        any(
            change.is_changed
            for change in compare(
                profile(seed), profile(PAIRS + seed), GROUPINGS[by], per_second=per_second
            )
        )
        for seed in range(PAIRS)
    ]  # fmt: skip
    assert sum(found) <= 2


def test_a_system_call_with_a_larger_share_comes_first():
    for seed in range(PAIRS):
        before, after = profile(seed), profile(PAIRS + seed, 24)
        assert before.samples.count >= 19_900
        first = compare(before, after, GROUPINGS["syscall"], per_second=False)[0]
        assert (first.key.name, first.is_changed) == ("read", True)
        assert abs(first.own.change - 0.04) < 2.5 * first.own.margin
