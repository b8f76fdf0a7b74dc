"""The user stack of a sample survives conversion to bytes and back."""

import pytest

from otel_kprofiler.model import (
    FileKey,
    FrameSource,
    StackEnd,
    StackMapping,
    find_user_addresses,
    pack_user_stack,
    parse_user_stack,
    user_stack_bytes,
)

LIBC = StackMapping(FileKey(1 << 40, 0xFE00001, 7), 0x7F0000000000)
VDSO = StackMapping(FileKey(0, 0xFFFFFFFF, 0), 0x7FFF00000000)
FRAMES = [
    (0x7FFF00000010, 1, FrameSource.REGISTERS),
    (0x7F0000000020, 0, FrameSource.TABLE),
    (0x1234, None, FrameSource.FRAME_POINTER),
    (0xFFFFFFFFFFFFFF, 0, FrameSource.SIGNAL),
]
RAW = pack_user_stack(StackEnd.NO_RULE, FRAMES, (LIBC, VDSO))


def test_a_stack_survives_a_round_trip():
    stack = parse_user_stack(RAW)
    assert stack.end is StackEnd.NO_RULE
    assert stack.mappings == (LIBC, VDSO)
    assert list(zip(stack.addresses, stack.places, stack.sources, strict=True)) == FRAMES


def test_callers_but_not_trampolines_are_looked_up_at_return_address_minus_one():
    assert list(find_user_addresses(RAW)) == [
        0x7FFF00000010, 0x7F000000001F, 0x1234, 0xFFFFFFFFFFFFFF,
    ]  # fmt: skip


def test_an_empty_buffer_parses_as_a_stack_without_frames():
    assert parse_user_stack(b"").addresses == ()
    assert not find_user_addresses(b"")


def test_the_size_of_a_stack_is_computed_from_its_header():
    assert user_stack_bytes(b"junk" + RAW + b"more", 4) == len(RAW)
    assert not user_stack_bytes(b"\1\2\3", 0)


def test_a_missing_mapping_is_parsed_as_none():
    raw = pack_user_stack(StackEnd.COMPLETE, [(1, 3, FrameSource.TABLE)], (LIBC,))
    assert parse_user_stack(raw).places == (None,)


@pytest.mark.parametrize("malformed", [RAW[:-1], RAW + b"\0", RAW[:5], bytes(len(RAW))])
def test_a_malformed_stack_is_rejected(malformed):
    for parse in (parse_user_stack, find_user_addresses):
        with pytest.raises(ValueError, match="malformed"):
            parse(malformed)
