"""Corrupts real files at offsets that affect parsing."""

from hypothesis import strategies as st

NUMBERS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@st.composite
def damage(draw, data, places):
    """Draws a file with numbers overwritten at some of the offsets, which may be truncated."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.sampled_from(places))
        size = draw(st.sampled_from([1, 2, 4, 8]))
        number = draw(st.sampled_from(NUMBERS) | st.integers(0, len(data)) | st.integers(0, 255))
        data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
    if draw(st.integers(0, 9)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)
