"""Unwind entries are derived by tracing the machine code of functions."""

import struct

import pytest

from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding.code_flow import Flow
from otel_kprofiler.unwinding.code_frames import cut_trampolines, make_frames
from otel_kprofiler.unwinding.code_state import ENTRY, OUTERMOST, State
from otel_kprofiler.unwinding.x86_code import Effect, decode

START = 0x1000


def follow(code, *starts, entry=0, endless=()):
    data = bytes.fromhex(code)
    flow = Flow([(START, data)], [(START, START + len(data))], entry, frozenset(endless))
    flow.add_functions(START + start for start in starts)
    return flow


def states(flow):
    return {at - START: state for at, state in flow.states.items()}


@pytest.mark.parametrize(
    ("code", "effect", "value"),
    [
        ("4883ec18", Effect.SHIFT, -0x18),  # sub $0x18,%rsp
        ("4881c400010000", Effect.SHIFT, 0x100),  # add $0x100,%rsp
        ("488d642408", Effect.SHIFT, 8),  # lea 8(%rsp),%rsp
        ("4154", Effect.SHIFT, -8),  # push %r12
        ("ff7508", Effect.SHIFT, -8),  # push 8(%rbp)
        ("55", Effect.PUSH_FP, 0),
        ("4155", Effect.SHIFT, -8),  # push %r13, encoded like push %rbp with a prefix
        ("5d", Effect.POP_FP, 0),
        ("4889e5", Effect.SET_FP, 0),
        ("488d6c2410", Effect.SET_FP, 0x10),  # lea 16(%rsp),%rbp
        ("488d65d8", Effect.FROM_FP, -0x28),  # lea -40(%rbp),%rsp
        ("4889ec", Effect.FROM_FP, 0),
        ("c9", Effect.LEAVE, 0),
        ("48896c2408", Effect.STORE_FP, 8),
        ("488b6c2408", Effect.LOAD_FP, 8),
        ("31ed", Effect.CLEAR_FP, 0),
        ("4883e4f0", Effect.LOSE_SP, 0),  # and $-16,%rsp
        ("4829c4", Effect.LOSE_SP, 0),  # sub %rax,%rsp
        ("48 0f44e0", Effect.LOSE_SP, 0),  # cmove %rax,%rsp
        ("4883fc18", Effect.NONE, 0),  # cmp $0x18,%rsp
        ("660fefe4", Effect.NONE, 0),  # pxor %xmm4,%xmm4
        ("c5f877", Effect.NONE, 0),  # vzeroupper
        ("62f1fd48efe4", Effect.NONE, 0),  # vpxorq %zmm4,%zmm4,%zmm4
        ("e8f0ffffff", Effect.CALL, -16),
        ("ff1510000000", Effect.CALL_INDIRECT, 16),
        ("ffe0", Effect.JUMP_INDIRECT, 0),
        ("0f8410000000", Effect.BRANCH, 16),
        ("f3c3", Effect.RETURN, 0),
        ("0f0b", Effect.END, 0),
        ("488d0510000000", Effect.REFERENCE, 16),
        ("48b80000000000000000", Effect.ABSOLUTE, 0),  # movabs
    ],
)
def test_instructions_are_decoded(code, effect, value):
    data = bytes.fromhex(code)
    assert decode(data + bytes(30), 0) == (len(data), effect, value)


def test_the_stack_state_is_tracked_through_prologue_and_epilogue():
    assert states(follow("55 53 4883ec08 90 4883c408 5b 5d c3", 0)) == {
        0: ENTRY,
        1: State(16, 16, None),
        2: State(24, 16, None),
        6: State(32, 16, None),
        7: State(32, 16, None),
        11: State(24, 16, None),
        12: State(16, 16, None),
        13: ENTRY,
    }


def test_a_realigned_stack_is_unwound_through_the_frame_pointer():
    flow = follow("55 4889e5 4883e4c0 90 c9 c3", 0)
    assert states(flow)[8] == State(None, 16, 16)
    assert states(flow)[10] == ENTRY


def test_an_instruction_reached_with_different_stack_depths_has_no_unwind_state():
    flow = follow("84c0 7401 50 90 c3", 0)  # only one of the two paths pushes
    assert not states(flow)


def test_code_after_a_call_that_does_not_return_has_no_unwind_state():
    # 0: push; je 9; call 11, which does not return. 9: pop; ret. 11: ud2
    flow = follow("50 7406 e803000000 90 58 c3 0f0b", 0)
    assert states(flow)[9] == State(16, 0, None)
    assert 8 not in states(flow)


def test_code_after_a_call_to_an_imported_noreturn_function_is_not_analyzed():
    # 0: jmp *slot. 6: push; je 15; call 0. 15: pop; ret
    flow = follow("ff2500010000 50 7406 e8f2ffffff 90 58 c3", 6, endless=[START + 6 + 0x100])
    assert 14 not in states(flow)
    assert states(flow)[15] == State(16, 0, None)


def test_padding_after_a_call_ends_the_function():
    # 0: sub $8,%rsp; call an address outside the code; nop. 12: push rbx; pop rbx; ret
    flow = follow("4883ec08 e800000010 0f1f00 53 5b c3", 0)
    assert states(flow) == {0: ENTRY, 4: State(16, 0, None)}
    flow.add_rest()
    results = [states(flow)[at] for at in (4, 12, 13)]
    assert results == [State(16, 0, None), ENTRY, State(16, 0, None)]


def test_a_tail_call_that_leaves_data_on_the_stack_yields_no_unwind_state():
    # 0: push rbx; jmp 4, which is another function. 4: ret
    assert states(follow("53 eb01 90 c3", 0, 4)) == {4: ENTRY}


def test_switch_cases_are_analyzed_backwards_from_their_return_instruction():
    # 0: push rbx; jmp *rax. 3: mov; pop; ret (reached only through the jump table)
    flow = follow("53 ffe0 89c3 5b c3", 0)
    assert 3 not in states(flow)
    flow.add_rest()
    assert states(flow)[3] == State(16, 0, None)
    assert states(flow)[5] == State(16, 0, None)


def test_a_candidate_address_inside_a_known_function_is_ignored():
    flow = follow("4883ec08 90 4883c408 c3")
    flow.add_candidates([START + 4, START])
    assert states(flow)[4] == State(16, 0, None)


def test_the_entry_point_is_the_outermost_function():
    assert states(follow("31ed e801000000 f4 c3", 0))[2] == OUTERMOST
    assert states(follow("90 f4", 0, entry=START))[1] == OUTERMOST


def test_signal_trampolines_are_excluded_from_code_ranges():
    trampoline = bytes.fromhex("48c7c00f0000000f05")
    code = bytes(8) + trampoline + bytes(4)
    assert list(cut_trampolines(code, 100)) == [(100, 107), (117, 121)]


def test_generated_unwind_entries_cover_every_byte_of_a_gap_between_unwind_tables():
    code = bytes.fromhex("53 ffe0 0000 0f0b")
    maker = make_frames(
        code, {"text": [Segment(0, len(code), START)]}, [0], [(START, START + 7)], 0
    )
    ((start, entry),) = maker.pairs
    assert (start, struct.unpack_from("<I", maker.frames, entry + 12)[0]) == (START, 7)


def test_corrupt_code_is_analyzed_quickly_and_without_an_error():
    code = bytes(range(256)) * 64
    parts = {"text": [Segment(0, len(code), START)]}
    assert make_frames(code, parts, [START + 3], [(START, START + len(code))], 0).pairs
