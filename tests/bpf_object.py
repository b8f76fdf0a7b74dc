"""Reads the contents of the compiled sampler."""

import struct

from otel_kprofiler.bpf import SAMPLER_OBJECT


def object_btf():
    """The BTF section of the compiled program."""
    data = SAMPLER_OBJECT.read_bytes()
    table, size, count, names = struct.unpack_from("<Q10xHHH", data, 40)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    text = headers[names][4]
    for header in headers:
        start = text + header[0]
        if data[start : data.index(b"\0", start)] == b".BTF":
            return data[header[4] : header[4] + header[5]]
    raise AssertionError("no .BTF in the object")
