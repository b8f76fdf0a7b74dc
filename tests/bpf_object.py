"""Reads the type information of the compiled sampler, and builds BTF for other structs."""

import struct

from otel_kprofiler.bpf import SAMPLER_OBJECT


def object_btf():
    data = SAMPLER_OBJECT.read_bytes()
    table, size, count, names = struct.unpack_from("<Q10xHHH", data, 40)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    text = headers[names][4]
    for header in headers:
        start = text + header[0]
        if data[start : data.index(b"\0", start)] == b".BTF":
            return data[header[4] : header[4] + header[5]]
    raise AssertionError("no .BTF in the object")


def btf(*structs):
    """Returns BTF for structs: (name or "", size, [(member, offset, type number)])."""
    text, types = bytearray(b"\0"), b""

    def add(name):
        if not name:
            return 0
        at = text.find(b"\0" + name.encode() + b"\0")
        if at >= 0:
            return at + 1
        text.extend(name.encode() + b"\0")
        return len(text) - len(name) - 1

    for name, size, members in structs:
        types += struct.pack("=III", add(name), 4 << 24 | len(members), size)
        for member, offset, number in members:
            types += struct.pack("=III", add(member), number, offset * 8)
    head = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(text))
    return head + types + bytes(text)
