"""Generates HTTP/2 (RFC 9113) byte sequences that no client library sends."""

import struct

from otel_kprofiler.export import PROFILES

DATA, HEADERS, RESET, SETTINGS = 0, 1, 3, 4
END_HEADERS = 4


def frame(kind, flags, stream, body=b""):
    """Returns a frame. See RFC 9113, section 4.1."""
    return (
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
    )


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
_FIELDS = b"".join(
    bytes([0, len(name)]) + name + bytes([len(value)]) + value  # HPACK: a literal without indexing
    for name, value in {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": PROFILES.method.encode(),
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }.items()
)


def call(stream, part=b""):
    """Returns the headers of a call that exports profiles, and the first part of its message."""
    return frame(HEADERS, END_HEADERS, stream, _FIELDS) + (part and frame(DATA, 0, stream, part))


def reset_calls(first, count):
    """Returns calls that are reset immediately ("rapid reset", CVE-2023-44487)."""
    streams = range(first, first + 2 * count, 2)
    return b"".join(call(stream) + frame(RESET, 0, stream, b"\0\0\0\x08") for stream in streams)


def repeated_headers(count):
    """Returns calls that repeat a 3.9-kB header as one-byte indices (RFC 7541, section 6.1)."""
    size = 3900
    entry = b"\x40\x01a\x7f" + bytes([(size - 127) & 127 | 128, (size - 127) >> 7]) + b"b" * size
    return frame(HEADERS, END_HEADERS, 1, _FIELDS + entry + b"\xbe" * 10_000) + b"".join(
        frame(HEADERS, END_HEADERS, stream, _FIELDS + b"\xbe" * 16_000)
        for stream in range(3, 2 * count, 2)
    )
