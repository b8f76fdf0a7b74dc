"""Reads type information from the compiled sampler, and builds BTF for other structs."""

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


def check_adjacent(types, name, fields, step=8, first=0):
    """Asserts that fields of a struct are contiguous and ``step`` bytes apart."""
    places = [types.offset(name, field) for field in fields]
    assert places == list(range(first, first + step * len(fields), step)), name


class Btf:
    """Builds BTF, type by type."""

    def __init__(self):
        self.text, self.types, self.count = bytearray(b"\0"), b"", 0

    def name(self, text):
        name = text.encode() + b"\0"
        at = self.text.find(b"\0" + name) + 1 if text else 0
        if text and not at:
            at = len(self.text)
            self.text += name
        return at

    def add(self, name, kind, last, count=0, tail=b""):
        """Adds a type, and returns its number."""
        self.types += struct.pack("=III", self.name(name), kind << 24 | count, last) + tail
        self.count += 1
        return self.count

    def struct(self, name, size, members):
        rows = [struct.pack("=III", self.name(n), number, at * 8) for n, at, number in members]
        return self.add(name, 4, size, len(rows), b"".join(rows))

    def tracepoint(self, name, *arguments):
        words = b"".join(struct.pack("=II", 0, number) for number in (0, *arguments))
        proto = self.add("", 13, 0, len(arguments) + 1, words)
        self.add(f"btf_trace_{name}", 8, self.add("", 2, proto))

    def pack(self):
        head = (0xEB9F, 1, 0, 24, 0, len(self.types), len(self.types), len(self.text))
        return struct.pack("=HBBIIIII", *head) + self.types + bytes(self.text)


def btf(*structs):
    """Returns BTF for structs: (name or "", size, [(member, offset, type number)])."""
    made = Btf()
    for fields in structs:
        made.struct(*fields)
    return made.pack()
