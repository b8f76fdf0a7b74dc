"""Values survive a round trip through protobuf's wire format, and malformed data is rejected."""

import pytest
from google.protobuf.internal.decoder import _DecodeVarint
from hypothesis import example, given
from hypothesis import strategies as st

from otel_kprofiler.otlp.wire import MASK_64, read_fields, read_varint, varint


@given(st.integers(0, MASK_64), st.binary(max_size=3))
@example(127, b"")
@example(128, b"")
@example(MASK_64, b"\x80")
def test_a_varint_survives_a_round_trip(number, rest):
    written = varint(number)
    assert read_varint(written + rest, 0) == (number, len(written))


@pytest.mark.parametrize("high", [1, 2, 127])
def test_bits_above_the_64th_are_dropped_as_in_protobuf(high):
    message = b"\xff" * 9 + bytes([high])
    assert read_varint(message, 0) == _DecodeVarint(message, 0)


@pytest.mark.parametrize("message", [b"", b"\x80", b"\x80" * 9, b"\x80" * 10 + b"\1"])
def test_an_unterminated_varint_is_rejected(message):
    with pytest.raises(ValueError, match=r"truncated|longer than"):
        read_varint(message, 0)


@pytest.mark.parametrize(
    "message", [b"\x0a\x02a", b"\x0a", b"\x09\0\0\0", b"\x0b\x0c", b"\x0d\0", b"\x0e", b"\x0f"]
)
def test_truncated_fields_and_groups_are_rejected(message):
    with pytest.raises(ValueError, match="truncated"):
        list(read_fields(message))


def test_varint_and_length_delimited_fields_are_read():
    assert list(read_fields(b"\x08\x96\x01\x12\x02hi\x19\1\0\0\0\0\0\0\0\x25\2\0\0\0")) == [
        (1, 150), (2, b"hi"), (3, bytes([1, *[0] * 7])), (4, bytes([2, 0, 0, 0])),
    ]  # fmt: skip
