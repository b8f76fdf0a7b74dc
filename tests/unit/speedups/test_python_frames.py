"""The C functions for Python frames check their arguments."""

import gc

import pytest

from otel_kprofiler.model import PYTHON_SIDE, USER_SIDE, Side
from tests.speedups import load_compiled, measure_growth

compiled = load_compiled()
INTERLEAVE = {
    "native": ("loop", "a"), "marks": b"\1\0", "python": ("p", "q"), "entries": (1,),
    "side_type": Side, "kinds": (USER_SIDE, PYTHON_SIDE), "rest": (0, False, ()),
}  # fmt: skip


def interleave(**changes):
    return compiled.interleave(*{**INTERLEAVE, **changes}.values())


def test_chains_replace_marked_frames_and_further_chains_follow():
    python, native, rest = interleave(python=("p", "q", "r"), entries=(1, 2))[:3]
    assert [python, native, rest] == [
        Side(PYTHON_SIDE, ("p",)), Side(USER_SIDE, ("a",)), Side(PYTHON_SIDE, ("q", "r")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"native": ["loop", "a"]}, TypeError), ({"marks": b"\1"}, TypeError),
        ({"marks": "\1\0"}, TypeError), ({"python": ["p", "q"]}, TypeError),
        ({"entries": [1]}, TypeError), ({"entries": ("1",)}, TypeError),
        ({"entries": (2, 1)}, ValueError), ({"entries": (-1,)}, ValueError),
        ({"entries": (3,)}, ValueError), ({"entries": (2**70,)}, OverflowError),
        ({"side_type": str}, TypeError), ({"side_type": 5}, TypeError),
        ({"kinds": (USER_SIDE,)}, TypeError), ({"rest": [0]}, TypeError), ({"more": 1}, TypeError),
    ],
)  # fmt: skip
def test_invalid_arguments_of_interleave_are_rejected_without_a_leak(changes, error):
    def call():
        with pytest.raises(error):
            interleave(**changes)

    def work():
        for _ in range(300):
            call()

    work()
    gc.collect()
    assert measure_growth(work) < 5_000  # a leaked object takes more


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError), (("", 1, 0), TypeError), ((bytearray(b"\xd0"), 1, 0), TypeError),
        ((b"\xd0", None, 0), TypeError), ((b"\xd0", 1, 1.0), TypeError),
        ((b"\xd0", 2**70, 0), OverflowError), ((b"\xd0", 1, 0, 5), TypeError),
    ],
)  # fmt: skip
def test_invalid_arguments_of_find_line_are_rejected(arguments, error):
    with pytest.raises(error):
        compiled.find_line(*arguments)
