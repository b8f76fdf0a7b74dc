"""Encodes and decodes parts of protobuf messages without their descriptors."""


def pack_varint(number):
    """Returns a number as a varint, which is the unsigned LEB128 used by DWARF and Go."""
    result = bytearray()
    while number >= 0x80:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*result, number])


def pack_field(number, data):
    """Encodes a bytes or message field; the field number must be below 16."""
    return bytes([number << 3 | 2]) + pack_varint(len(data)) + data


def varints(data):
    """Yields the numbers in a packed field."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0


def fields(data):
    """Yields (number, value) for each field of a message that has only varint and bytes fields."""
    data = iter(data)
    numbers = varints(data)
    for key in numbers:
        value = next(numbers)
        yield key >> 3, bytes(next(data) for _ in range(value)) if key & 7 == 2 else value
