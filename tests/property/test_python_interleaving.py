"""Python and native frames appear in the order of randomly generated calls between C and Python."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    STACK_OK,
    STACK_TRUNCATED,
    USER_SIDE,
    Frame,
    KnownLoops,
    Line,
    Module,
    ModuleKind,
    Side,
    Stack,
    StackStatus,
    Unresolved,
)
from otel_kprofiler.symbols import Interleaver

KERNEL = Side(KERNEL_SIDE, (Frame(None, 1, (Line("vfs_read"),), 0, KERNEL_SIDE),))
CUT = StackStatus(21)
BUILD_ID = "b" * 40
C_FRAMES = st.lists(st.sampled_from(["cfunction_call", "memcpy", "PyObject_Call"]), max_size=4)
EVALUATION = st.sampled_from(["_PyEval_EvalFrameDefault", "_PyEval_EvalFrameDefault.cold"])
NAMES = st.integers(1, 20).map("f{}".format)
CALLS = st.lists(
    st.tuples(C_FRAMES, EVALUATION, st.lists(NAMES, min_size=1, max_size=5)), max_size=5
)
"""Calls, leaf first: C functions, and the chain of Python functions that called them."""


def native(name, number=0):
    return Frame(None, 0x1000 + number, (Line(name),), 0, USER_SIDE)


def python(name):
    return Frame(None, 0, (Line(name, "", "app.py", 3),), 0, PYTHON_SIDE)


class Calls:
    """Expected frames for each call, and the native and Python stacks that contain them."""

    def __init__(self, calls, start):
        self.truth, self.native, self.python, self.entries = [], [], [], []
        for c_names, loop, chain in calls:
            c_frames, python_frames = (
                [native(name) for name in c_names],
                [python(name) for name in chain],
            )
            self.truth += c_frames + python_frames
            self.native += [*c_frames, native(loop)]
            self.python += python_frames
            self.entries.append(len(self.python))
        outer = [native(name) for name in start]
        self.native += outer
        self.truth += outer

    def sides(self, native_frames=None, python_frames=None):
        user, frames = self.native[:native_frames], self.python[:python_frames]
        is_whole, is_own_whole = len(user) == len(self.native), len(frames) == len(self.python)
        return (
            KERNEL,
            Side(USER_SIDE, tuple(user), STACK_OK if is_whole else CUT),
            Side(
                PYTHON_SIDE,
                tuple(frames),
                STACK_OK if is_own_whole else STACK_TRUNCATED,
                entries=tuple(end for end in self.entries if end <= len(frames)),
            ),
        )


def outside_kernel(sides):
    return list(Stack(sides).frames)[1:]


def is_loop(frame):
    return frame.function.startswith("_PyEval")


@given(CALLS, C_FRAMES)
def test_complete_interleaved_stacks_match_the_calls(calls, start):
    stack = Calls(calls, start)
    merged = Interleaver()(stack.sides())
    assert list(map(id, outside_kernel(merged))) == list(map(id, stack.truth))
    assert merged[0] is KERNEL
    assert all(side.kind is not after.kind for side, after in pairwise(merged) if after.frames)


@given(CALLS, C_FRAMES, st.integers(0, 20), st.integers(0, 20))
def test_interleaving_truncated_stacks_keeps_all_frames_in_order(calls, start, kept, kept_python):
    stack = Calls(calls, start)
    sides = stack.sides(kept, kept_python)
    merged = Interleaver()(sides)
    results = [frame for frame in outside_kernel(merged) if not is_loop(frame)]
    truth = iter(stack.truth)
    assert all(any(frame is called for called in truth) for frame in results), "in that order"
    assert len(results) == len([frame for frame in outside_kernel(sides) if not is_loop(frame)])
    statuses = {side.kind: side.status for side in sides if side.status}
    assert {side.kind: side.status for side in merged if side.status} == statuses


@given(CALLS, C_FRAMES, st.data())
def test_stacks_with_mismatched_frame_counts_are_not_interleaved(calls, start, data):
    stack = Calls(calls, start)
    sides = stack.sides()
    at = data.draw(st.integers(0, len(stack.native)))
    frames = (*stack.native[:at], native("_PyEval_EvalFrameDefault"), *stack.native[at:])
    more = (sides[0], sides[1]._replace(frames=frames), sides[2])
    assert Interleaver()(more) == more


def test_truncated_stacks_unwound_by_frame_pointers_are_not_interleaved():
    """An unwinder that uses only frame pointers may miss the frame of an interpreter's loop."""
    sides = Calls([(["memcpy"], "_PyEval_EvalFrameDefault", ["f1"])] * 3, []).sides(4)
    assert len(Interleaver()(sides)) > 3
    doubtful = tuple(frame._replace(found_by="frame_pointer") for frame in sides[1].frames)
    sides = (sides[0], sides[1]._replace(frames=doubtful), sides[2])
    assert Interleaver()(sides) == sides


def test_functions_split_from_the_eval_loop_are_treated_as_part_of_it():
    stack = Calls([(["memcpy", "_TAIL_CALL_CALL"], "_PyEval_EvalFrameDefault", ["f1"])], [])
    merged = outside_kernel(Interleaver()(stack.sides()))
    assert [frame.function for frame in merged] == ["memcpy", "f1"]


def test_nameless_eval_loops_are_recognized_by_address():
    """Recordings name the replaced frames, so that replays also recognize these frames."""
    stack = Calls([(["memcpy"], "_PyEval_EvalFrameDefault", ["f1"])], [])
    sides = stack.sides()
    module = Module("python3", ModuleKind.USER, BUILD_ID, b"f" * 16, 0)
    loop = Frame(module, 0x500, (), 0, USER_SIDE, Unresolved.USER_ADDRESS)
    sides = (sides[0], sides[1]._replace(frames=(stack.native[0], loop)), sides[2])
    loops, replaced = KnownLoops(), []
    by_loops = Interleaver(loops)
    assert by_loops(sides) == sides
    loops.add(None, (range(0x1000),))
    loops.add(BUILD_ID, (range(0x100, 0x200), range(0x400, 0x500)))
    assert by_loops(sides) == sides
    loops.add(BUILD_ID, (range(0x100, 0x200), range(0x500, 0x501)))
    merged = outside_kernel(Interleaver(loops, replaced.append)(sides))
    assert [frame.function for frame in merged] == ["memcpy", "f1"]
    named = sides[1]._replace(frames=(stack.native[0], *replaced))
    assert outside_kernel(Interleaver()((sides[0], named, sides[2]))) == merged


def test_stacks_without_native_user_frames_are_unchanged():
    kernel, _, python_side = Calls([([], "_PyEval_EvalFrameDefault", ["f1"])], []).sides()
    assert Interleaver()((kernel, python_side)) == (kernel, python_side)
