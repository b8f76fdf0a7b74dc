"""Stacks found and samples grouped in C equal those from Python code."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.clock import Clock, SystemTime
from otel_kprofiler.host.cpu_share import BURST_NS
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    PYTHON_SIDE,
    STACK_OK,
    STACK_TRUNCATED,
    USER_SIDE,
    FileDetails,
    FileKey,
    Frame,
    FrameSource,
    KnownFiles,
    RawSample,
    Resource,
    Segment,
    Side,
    SpanLink,
    Stack,
    StackEnd,
    StackMapping,
    Wait,
    WaitState,
    pack_user_stack,
)
from otel_kprofiler.pipeline import WindowSchedule
from otel_kprofiler.pipeline import windows as windows_module
from otel_kprofiler.pipeline.budget import GROUP_NS, ProcessBudgets
from otel_kprofiler.symbols import StackResolver
from otel_kprofiler.symbols import resolver as resolver_module
from otel_kprofiler.symbols.resolver import RawAddresses
from otel_kprofiler.symbols.user import resolver as user_module
from otel_kprofiler.symbols.user.resolver import UserResolver
from tests.speedups import load_compiled

compiled = load_compiled()
RESOURCE = Resource({"process.pid": 5})
FILE = FileKey(1, 2, 3)
LATER_FILE = FileKey(1, 2, 4)
DETAILS = FileDetails("program", "aa", "bb", (Segment(0, 0x4000, 0x400000),))
LINKS = (None, SpanLink(b"t" * 16, b"s" * 8))


def plain(**fields):
    sample = RawSample(ON_CPU, 1, 1, 0, 5, 5, 1, 0, b"work", (), (), None)
    return sample._replace(**fields)


class Variable:
    """Kernel frames that differ between samples at different times."""

    def __init__(self, side):
        self.sides = [side, side._replace(status=STACK_TRUNCATED)]

    def of(self, sample):
        return self.sides[sample.time_ns % 2]


class KernelNames:
    """A resolver with a state, in which frames at odd addresses vary between samples."""

    def __init__(self):
        self.raw = RawAddresses(KERNEL_SIDE)

    def state(self, sample):
        return sample.time_ns // 8

    def resolve(self, raw, state):
        frames = tuple([
            Frame(None, address + state, (), 0, KERNEL_SIDE) for address in raw.addresses()
        ])  # fmt: skip
        side = Side(KERNEL_SIDE, frames, raw.status)
        return Variable(side) if any(address % 2 for address in raw.addresses()) else side


class PythonNames:
    def state(self, sample):
        return None

    def resolve(self, raw, state):
        return Side(PYTHON_SIDE, (), raw.status)


def arrange(sides):
    return tuple(sides[::-1])


def user_words(places, start, key):
    frames = [(start + place, 0, FrameSource.TABLE) for place in places]
    return pack_user_stack(StackEnd.COMPLETE, frames, (StackMapping(key, start),))


kernel_words = st.lists(st.integers(2, 5), max_size=3).map(
    lambda addresses: struct.pack(f"={len(addresses)}Q", *addresses)
)
native_words = st.builds(
    user_words,
    st.lists(st.integers(1, 6), max_size=4),
    st.sampled_from([0x1000, 0x2000]),
    st.sampled_from([FILE, FILE, LATER_FILE]),
)


@st.composite
def stacked(draw):
    statuses = st.sampled_from([STACK_OK, STACK_TRUNCATED])
    sides = [(KERNEL_SIDE, kernel_words), (PYTHON_SIDE, st.just(b"")), (USER_SIDE, native_words)]
    chosen = [side for side in sides if draw(st.integers(0, 3))]
    return plain(
        time_ns=draw(st.integers(0, 20)),
        collected=tuple([(kind, draw(statuses)) for kind, _ in chosen]),
        stacks=tuple([draw(words) for _, words in chosen]),
    )


def resolve_all(in_c, batches, arranged, max_frames):
    """Returns the resolved stacks, and the first of the stacks that are the same object."""
    files = KnownFiles()
    files.add(FILE, DETAILS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolver_module, "find_stacks", compiled.find_stacks if in_c else None)
        if in_c:
            patch.setattr(user_module, "FrameCache", compiled.FrameCache)
        resolvers = {
            KERNEL_SIDE: KernelNames(),
            PYTHON_SIDE: PythonNames(),
            USER_SIDE: UserResolver(files, max_frames=max_frames),
        }
        stacks = StackResolver(resolvers, arrange if arranged else None)
        resolved = []
        for batch in batches:
            if len(resolved) > 20:
                files.add(LATER_FILE, DETAILS)
            for sample, stack in zip(batch, stacks.find_all(batch), strict=True):
                resolved.append(stack or stacks.resolve(sample))
    first = {}
    same = [first.setdefault(id(stack), at) for at, stack in enumerate(resolved)]
    return [_describe(stack) for stack in resolved], same


def _describe(stack):
    return [
        (side.kind, side.status, side.is_provisional, tuple(side.frames)) for side in stack.sides
    ]


@given(
    st.lists(st.lists(stacked(), min_size=1, max_size=8), max_size=12),
    st.booleans(),
    st.sampled_from([4, 8192]),
)
def test_stacks_are_found_alike(batches, arranged, max_frames):
    batches = [*batches, *batches]
    in_c, in_python = (resolve_all(is_c, batches, arranged, max_frames) for is_c in (True, False))
    assert in_c == in_python


STACKS = [Stack(), Stack((Side(KERNEL_SIDE, ()),)), Stack((Side(KERNEL_SIDE, (), 0, True),))]
WAITS = (*[None] * 9, Wait(WaitState.INTERRUPTIBLE, 5, None))
samples = st.builds(
    plain,
    value=st.integers(1, 3),
    time_ns=st.integers(0, 50),
    cpu=st.integers(0, 1),
    tid=st.integers(5, 6),
    comm=st.sampled_from([b"work", b"rest"]),
    link=st.sampled_from(LINKS),
    labels=st.sampled_from([0] * 9 + [1]),
    wait=st.sampled_from(WAITS),
    context=st.sampled_from([b""] * 9 + [b"\x01\x00"]),
)


def make_budgets():
    """Returns budgets for more groups than a test adds."""
    budgets = ProcessBudgets(None, None, now_ns=int)
    budgets.charge_groups(plain(), BURST_NS // GROUP_NS - 1000)
    return budgets


def spend(budgets):
    """Spends the budgets; returns how many groups they would have admitted."""
    left = 0
    while budgets.admits(plain(), RESOURCE):
        budgets.charge_groups(plain())
        left += 1
    return left


def group_all(in_c, batches, admitted, labels):
    """Groups the batches; from the batch ``admitted`` on, the budgets are spent."""
    budgets = None if admitted is None else make_budgets()
    left = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows_module, "group_samples", compiled.group_samples if in_c else None)
        window = windows_module.WindowBuilder(
            Clock(SystemTime()),
            WindowSchedule(10**9),
            start_boot_ns=0,
            period_ns=1,
            find_labels=labels,
            budgets=budgets,
        )
        for number, batch in enumerate(batches):
            if number == admitted:
                left = spend(budgets)
            window.add(*map(list, zip(*batch, strict=True)), RESOURCE)
    groups = [*window._kinds.get(ON_CPU, {}).get(RESOURCE, {}).items()]
    return groups, window._unfinished, window._count, window._last_ns, left


@given(
    st.lists(st.lists(st.tuples(samples, st.sampled_from(STACKS)), min_size=1), max_size=4),
    st.none() | st.integers(0, 4),
    st.sampled_from([None, lambda number: (("label", str(number)),)]),
)
def test_samples_are_grouped_alike(batches, admitted, labels):
    in_c, in_python = (group_all(is_c, batches, admitted, labels) for is_c in (True, False))
    assert in_c == in_python
