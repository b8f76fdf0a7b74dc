"""Decodes protobuf messages without their descriptors."""


def varints(data):
    """Yields the numbers of a packed field."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0


def fields(data):
    """Yields the top-level fields of a message of varints and bytes, as (number, value)."""
    data = iter(data)
    numbers = varints(data)
    for key in numbers:
        value = next(numbers)
        yield key >> 3, bytes(next(data) for _ in range(value)) if key & 7 == 2 else value
