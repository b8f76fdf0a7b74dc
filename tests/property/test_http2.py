"""A receiver that sends arbitrary frames ends an exchange, and does not crash the client."""

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.export.grpc_status import interpret_response
from otel_kprofiler.export.http2 import Http2Connection, Http2Error

MAX_BYTES = 100_000
BODY = b"x" * 100
HEADERS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"x"),
    (b":path", b"/x"),
]
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
# Indexed and literal fields (RFC 7541): a status of 200, and a gRPC status without indexing.
FIELDS = st.sampled_from([b"\x88", b"\0\x0bgrpc-status\x010", b"\0\x0bgrpc-status\x0214"])
BODIES = st.sampled_from([b"", bytes(5), b"\0\0\0\0\1a", b"\1\xff\xff\xff\xffab"])
PAYLOADS = st.one_of(st.binary(max_size=40), BODIES, st.lists(FIELDS, max_size=3).map(b"".join))
STREAMS = st.sampled_from([0, 1, 1, 1, 1, 3, 2, 2**31 - 1])


@st.composite
def frames(draw):
    payload = draw(PAYLOADS)
    length = draw(st.sampled_from([len(payload)] * 9 + [0, 16385, 2**24 - 1]))
    kind, flags = draw(st.integers(0, 10)), draw(st.sampled_from([0, 1, 4, 5, 8, 32, 255]))
    stream = draw(STREAMS)
    return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def pour(sock, data, cuts, has_settings):
    """Sends ``data`` in pieces after the request has arrived, then ends the stream."""
    start, received = 0, b""
    try:
        if has_settings:
            sock.sendall(SETTINGS)
            while BODY not in received:
                received += sock.recv(65536)
        for end in [*sorted(cuts), len(data)]:
            sock.sendall(data[start:end])
            start = max(start, end)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    except OSError:
        return


@given(
    st.one_of(st.lists(frames(), max_size=12).map(b"".join), st.binary(max_size=200)),
    st.lists(st.integers(0, 200), max_size=3),
    st.booleans(),
)
def test_arbitrary_frames_end_an_exchange(data, cuts, has_settings):
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=pour, args=(theirs, data, cuts, has_settings))
    thread.start()
    deadline = time.monotonic() + 60
    with theirs, ours:
        try:
            connection = Http2Connection(ours, deadline)
            response = connection.exchange(HEADERS, BODY, deadline, MAX_BYTES)
            interpret_response(response, MAX_BYTES)
            connection.is_usable(deadline)
        except TimeoutError:
            pytest.fail("the end of the stream did not end the exchange")
        except (Http2Error, OSError):
            pass
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert time.monotonic() < deadline
