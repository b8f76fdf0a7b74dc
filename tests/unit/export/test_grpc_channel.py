"""gRPC calls over HTTP/2, tested with a server that sends chosen frames."""

import base64
import gzip
import random
import socket
import ssl
import threading
import time
import zlib

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesPartialSuccess,
    ExportProfilesServiceResponse,
)

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import ClientSettings, connections, name_lookup, open_client
from otel_kprofiler.export.grpc_channel import GrpcChannel
from otel_kprofiler.export.grpc_target import Target, parse_target
from otel_kprofiler.export.retry import Verdict
from tests.http2_server import HEADERS, Http2Server, answer_all
from tests.raw_forks import python_fork, run_in_child
from tests.servers import HttpServer, forward
from tests.waiting import call_in_thread

pytestmark = pytest.mark.system

METHOD = "/service/Export"
LARGE = random.Random(1).randbytes(300_000)
MIB = 1 << 20
CALLED = ("True", 0)


def open_channel(target, *, make_context=None, proxy_url="", metadata=None, compresses=False):
    return GrpcChannel(
        parse_target(target) if isinstance(target, str) else target,
        make_context=make_context,
        proxy_url=proxy_url,
        metadata=metadata or {},
        compresses=compresses,
        max_bytes=MIB,
    )


@pytest.fixture
def channel_to():
    channels = []

    def open_to(server, **options):
        channels.append(open_channel(f"127.0.0.1:{server.port}", **options))
        return channels[-1]

    yield open_to
    for channel in channels:
        channel.close()


def call(channel, message=b"request", timeout_s=30):
    return channel.call(METHOD, channel.frame(message), timeout_s)


def test_a_request_larger_than_the_flow_control_window_is_sent_in_parts(channel_to):
    received = []

    def serve(peer):
        stream, message = peer.read_request()
        received.append(message)
        peer.respond(stream)

    settings = {SettingCodes.INITIAL_WINDOW_SIZE: 1000}
    with Http2Server(serve, settings=settings) as server:
        assert call(channel_to(server), LARGE).verdict is Verdict.ACCEPTED
    assert received == [LARGE]


def test_calls_share_a_connection(channel_to):
    with Http2Server(answer_all) as server:
        channel = channel_to(server)
        assert {call(channel).verdict for _ in range(3)} == {Verdict.ACCEPTED}
        channel.close()
        assert server.connections == 1


def test_a_receiver_that_goes_away_may_still_respond(channel_to):
    """A request that the receiver has accepted must not be sent again."""

    def go_away(peer):
        stream, _ = peer.read_request()
        peer.send_goaway(2**31 - 1)
        peer.send_goaway(stream)
        peer.http2.ping(b"12345678")
        peer.respond(stream)
        while not peer.pongs:
            peer.receive()

    with Http2Server(go_away, answer_all) as server:
        channel = channel_to(server)
        assert call(channel).verdict is Verdict.ACCEPTED
        assert server.connections == 1
        assert call(channel).verdict is Verdict.ACCEPTED
        assert server.connections == 2
        channel.close()


def refuse(peer):
    peer.http2.reset_stream(peer.read_headers(), ErrorCodes.REFUSED_STREAM)
    peer.flush()


def go_away_unread(peer):
    peer.read_headers()
    peer.send_goaway(0)


@pytest.mark.parametrize("serve", [refuse, go_away_unread])
def test_a_request_that_was_not_processed_is_sent_again_once(channel_to, serve):
    with Http2Server(serve, answer_all) as server:
        channel = channel_to(server)
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()
        assert server.connections == 2
    with Http2Server(serve) as server:
        answer = call(channel_to(server))
        assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")


def test_a_connection_that_the_receiver_closed_while_idle_is_replaced(channel_to):
    closed = threading.Event()

    def serve_one(peer):
        stream, _ = peer.read_request()
        peer.respond(stream)
        peer.socket.shutdown(socket.SHUT_RDWR)
        closed.set()

    with Http2Server(serve_one) as server:
        channel = channel_to(server)
        for count in (1, 2):
            closed.clear()
            assert call(channel).verdict is Verdict.ACCEPTED
            assert closed.wait(30)
            assert server.connections == count


def test_a_ping_is_answered_by_the_next_call(channel_to):
    pinged, ponged = threading.Event(), threading.Event()

    def serve(peer):
        stream, _ = peer.read_request()
        peer.respond(stream)
        peer.http2.ping(b"12345678")
        peer.flush()
        pinged.set()
        stream, _ = peer.read_request()
        assert peer.pongs == 1
        ponged.set()
        peer.respond(stream)

    with Http2Server(serve) as server:
        channel = channel_to(server)
        assert call(channel).verdict is Verdict.ACCEPTED
        assert pinged.wait(30)
        assert call(channel).verdict is Verdict.ACCEPTED
        assert ponged.is_set()


def test_an_early_response_ends_the_request(channel_to):
    """The receiver rejects the request by its headers, and closes the connection."""

    def serve(peer):
        stream = peer.read_headers()
        status = [(":status", "200"), ("grpc-status", "12"), ("grpc-message", "no%20profiles")]
        peer.http2.send_headers(stream, status, end_stream=True)
        peer.flush()

    with Http2Server(serve, answer_all) as server:
        channel = channel_to(server)
        answer = call(channel, LARGE * 20)
        assert (answer.status, answer.message) == ("UNIMPLEMENTED", "no profiles")
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()


def trailers(**values):
    return [(name.replace("_", "-"), value) for name, value in values.items()]


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (trailers(grpc_status="14", grpc_message="caf%C3%A9 %"), "UNAVAILABLE", "café %"),
        (trailers(grpc_status="77", grpc_message="new"), "UNKNOWN", "new"),
        (trailers(grpc_status="x"), "UNKNOWN", ""),
        (trailers(other="0"), "INTERNAL", "no gRPC status"),
        (trailers(grpc_status="8", grpc_status_details_bin="A"), "RESOURCE_EXHAUSTED", ""),
    ],
)
def test_the_status_is_read_from_the_trailers(channel_to, status, code, message):
    def serve(peer):
        peer.respond(peer.read_request()[0], trailers=status)

    with Http2Server(serve) as server:
        answer = call(channel_to(server))
    assert answer.status == code
    assert message in answer.message


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "INTERNAL"), (401, "UNAUTHENTICATED"), (403, "PERMISSION_DENIED"),
     (404, "UNIMPLEMENTED"), (429, "UNAVAILABLE"), (500, "UNKNOWN"), (503, "UNAVAILABLE"),
     (799, "UNKNOWN")],
)  # fmt: skip
def test_a_response_from_a_proxy_has_the_code_of_its_http_status(channel_to, status, code):
    def serve(peer):
        stream, _ = peer.read_request()
        headers = [(":status", str(status)), ("content-type", "text/plain")]
        peer.http2.send_headers(stream, headers)
        peer.http2.send_data(stream, b"no route", end_stream=True)
        peer.flush()

    with Http2Server(serve) as server:
        answer = call(channel_to(server))
    assert answer.status == code
    assert str(status) in answer.message
    assert "no route" in answer.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ErrorCodes.CANCEL, "CANCELLED"),
        (ErrorCodes.ENHANCE_YOUR_CALM, "RESOURCE_EXHAUSTED"),
        (ErrorCodes.INTERNAL_ERROR, "INTERNAL"),
        (1234, "INTERNAL"),
    ],
)
def test_a_reset_has_a_code(channel_to, error, code):
    def serve(peer):
        peer.http2.reset_stream(peer.read_headers(), error)
        peer.flush()

    with Http2Server(serve) as server:
        assert call(channel_to(server)).status == code


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "no message"),
        (b"\0\0\0\0\5ab", "not one message"),
        (b"\1\0\0\0\1a", "unsupported content encoding 'identity'"),
        (b"\0\0\0\0\1a\0\0\0\0\1a", "not one message"),
        (b"\0" + bytes(MIB), "exceeds"),
    ],
)
def test_an_unreadable_success_counts_as_delivery(channel_to, body, problem):
    def serve(peer):
        stream, _ = peer.read_request()
        send_body(peer, stream, body)
        peer.http2.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        peer.flush()

    with Http2Server(serve) as server:
        answer = call(channel_to(server))
    assert answer.verdict is Verdict.ACCEPTED
    assert problem in answer.unreadable


def send_body(peer, stream, body, headers=HEADERS):
    """Sends a response as fast as flow control allows, but does not end it."""
    peer.http2.send_headers(stream, headers)
    sent = 0
    while sent < len(body):
        size = min(peer.http2.local_flow_control_window(stream), 16384, len(body) - sent)
        if size:
            peer.http2.send_data(stream, body[sent : sent + size])
            sent += size
            peer.flush()
        else:
            peer.receive()


PARTIAL = ExportProfilesServiceResponse(
    partial_success=ExportProfilesPartialSuccess(rejected_profiles=3, error_message="too old")
).SerializeToString()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_response_is_read(channel_to, encoding):
    """grpc-go encodes a response like the request, whatever encodings the client accepts."""
    bits = {"gzip": 31, "deflate": 15}[encoding]

    def serve(peer):
        compressor = zlib.compressobj(wbits=bits)
        content = compressor.compress(PARTIAL) + compressor.flush()
        peer.respond(peer.read_request()[0], content, encoding=encoding)

    with Http2Server(serve) as server:
        answer = call(channel_to(server, compresses=True))
    assert (answer.rejected_profiles, answer.message, answer.unreadable) == (3, "too old", "")


@pytest.mark.parametrize(
    ("content", "encoding", "problem"),
    [
        (gzip.compress(bytes(2 * MIB)), "gzip", f"exceeds {MIB} bytes"),
        (gzip.compress(PARTIAL)[:-4], "gzip", "truncated"),
        (PARTIAL, "gzip", "not valid gzip"),
        (PARTIAL, "snappy", "unsupported content encoding 'snappy'"),
    ],
)
def test_a_response_that_cannot_be_decompressed_counts_as_delivery(
    channel_to, content, encoding, problem
):
    def serve(peer):
        peer.respond(peer.read_request()[0], content, encoding=encoding)

    with Http2Server(serve) as server:
        answer = call(channel_to(server))
    assert answer.verdict is Verdict.ACCEPTED
    assert problem in answer.unreadable


def test_a_message_may_end_with_a_space(channel_to):
    """gRPC percent-encodes no spaces, although HTTP/2 forbids them at the ends of values."""

    def serve(peer):
        refused = trailers(grpc_status="3", grpc_message="cannot parse: ")
        peer.respond(peer.read_request()[0], trailers=refused)
        peer.respond(peer.read_request()[0], trailers=trailers(grpc_status="0", note=" stored "))

    with Http2Server(serve) as server:
        channel = channel_to(server)
        answer = call(channel)
        assert (answer.verdict, answer.status) == (Verdict.REFUSED, "INVALID_ARGUMENT")
        assert answer.message == "cannot parse: "
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()
        assert server.connections == 1


def test_a_request_that_a_proxy_considers_too_large_can_be_divided(channel_to):
    def serve(peer):
        stream, _ = peer.read_request()
        send_body(peer, stream, b"<html>", [(":status", "413"), ("content-type", "text/html")])
        peer.http2.end_stream(stream)
        peer.flush()

    with Http2Server(serve) as server:
        assert call(channel_to(server)).verdict is Verdict.TOO_LARGE


def test_a_failure_with_a_large_body_is_a_failure(channel_to):
    def serve(peer):
        headers = [(":status", "502"), ("content-type", "text/html")]
        send_body(peer, peer.read_request()[0], bytes(2 * MIB), headers)

    with Http2Server(serve) as server:
        channel = channel_to(server)
        answer = call(channel)
        channel.close()
    assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")


def test_a_connection_that_the_receiver_closes_at_once_is_replaced(channel_to):
    """The GOAWAY frame arrives with the settings, and the receiver does not disconnect."""

    def go_away(peer):
        peer.send_goaway(0)
        while True:
            peer.receive()

    with Http2Server(go_away) as server:
        channel = channel_to(server)
        answer = call(channel)
        assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")
        assert "closing the connection" in answer.message
        channel.close()


def test_a_receiver_that_only_sends_pings_does_not_extend_the_time_limit(channel_to):
    stop = threading.Event()

    def serve(peer):
        peer.respond(peer.read_request()[0])
        while not stop.is_set():
            peer.http2.ping(b"12345678")
            peer.flush()

    with Http2Server(serve) as server:
        channel = channel_to(server)
        assert call(channel).verdict is Verdict.ACCEPTED
        began = time.monotonic()
        answer = call(channel, timeout_s=0.5)
        assert answer.status in {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
        assert time.monotonic() - began < 30
        stop.set()
        channel.close()


def call_in_child(channel, server):
    """Calls another server in a forked child, which then closes the channel."""

    def call_and_close():
        channel._target = parse_target(f"127.0.0.1:{server.port}")
        accepted = call(channel).verdict is Verdict.ACCEPTED
        channel.close()
        return accepted

    return run_in_child(python_fork, call_and_close)


def test_a_forked_child_leaves_the_connection_to_its_parent(channel_to):
    with Http2Server(answer_all) as server, Http2Server(answer_all) as other:
        channel = channel_to(server)
        assert call(channel).verdict is Verdict.ACCEPTED
        assert call_in_child(channel, other) == CALLED
        assert other.connections == 1
        assert run_in_child(python_fork, lambda: channel.close() is None) == CALLED
        assert call(channel).verdict is Verdict.ACCEPTED
        assert server.connections == 1
        channel.close()


def test_a_child_that_is_forked_during_a_call_can_call(channel_to):
    called, forked = threading.Event(), threading.Event()

    def serve(peer):
        stream, _ = peer.read_request()
        called.set()
        assert forked.wait(60)
        peer.respond(stream)

    with Http2Server(serve) as server, Http2Server(answer_all) as other:
        channel = channel_to(server)
        result = call_in_thread(lambda: call(channel))
        assert called.wait(30)
        assert call_in_child(channel, other) == CALLED
        forked.set()
        assert result.result(60).verdict is Verdict.ACCEPTED
        channel.close()


def test_a_response_that_trickles_in_does_not_extend_the_time_limit(channel_to):
    def serve(peer):
        stream, _ = peer.read_request()
        peer.http2.send_headers(stream, HEADERS)
        while True:
            peer.http2.ping(b"12345678")
            peer.flush()
            time.sleep(0.02)

    with Http2Server(serve) as server:
        answer = call(channel_to(server), timeout_s=0.5)
        assert (answer.verdict, answer.status) == (Verdict.RETRY, "DEADLINE_EXCEEDED")
        assert "0.5 s" in answer.message


def test_a_receiver_without_http2_is_named():
    with HttpServer(lambda request: request.reply(404)) as server:
        channel = open_channel(f"127.0.0.1:{server.port}")
        answer = call(channel)
        channel.close()
    assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")
    assert "HTTP/2" in answer.message


def test_a_receiver_that_offers_no_http2_over_tls_is_named(certificates):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")

    def make_context():
        return ssl.create_default_context(cafile=certificates / "ca.pem")

    with HttpServer(lambda request: request.reply(), context) as server:
        channel = open_channel(f"localhost:{server.port}", make_context=make_context)
        answer = call(channel)
        channel.close()
    assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")
    assert "does not offer HTTP/2" in answer.message


class Silent:
    """Accepts connections and sends nothing."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()


def make_plain_context():
    return ssl.create_default_context()


@pytest.mark.parametrize("options", [{}, {"make_context": make_plain_context}, {"proxy": True}])
def test_closing_aborts_a_call_that_waits_for_the_connection(options):
    with Silent() as server:
        if options.pop("proxy", False):
            options["proxy_url"] = f"http://127.0.0.1:{server.port}"
        channel = open_channel(f"127.0.0.1:{server.port}", **options)
        result = call_in_thread(lambda: call(channel, timeout_s=600))
        with server.listener.accept()[0]:
            assert not result.done()
            channel.close()
            assert result.result(60).status == "CANCELLED"
    assert call(channel).status == "CANCELLED"


@pytest.fixture
def full_backlog():
    """Yields the port of a listener that accepts no further connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        yield port
        for sock in waiting:
            sock.close()


def test_closing_aborts_a_connection_attempt(full_backlog, monkeypatch):
    """No further address is tried."""
    connecting = threading.Event()
    wait = connections._wait_until_connected
    monkeypatch.setattr(
        connections, "_wait_until_connected", lambda *a: connecting.set() or wait(*a)
    )
    hosts = (("127.0.0.1", full_backlog),) * 3
    channel = open_channel(Target("collector", hosts))
    result = call_in_thread(lambda: call(channel, timeout_s=600))
    assert connecting.wait(60)
    channel.close()
    assert result.result(60).status == "CANCELLED"


def test_an_unreachable_address_uses_only_its_part_of_the_time_limit(full_backlog):
    with Http2Server(answer_all) as server:
        hosts = (("127.0.0.1", full_backlog), ("127.0.0.1", server.port))
        channel = open_channel(Target("collector", hosts))
        assert call(channel, timeout_s=2).verdict is Verdict.ACCEPTED
        channel.close()


def test_a_receiver_that_allows_no_request_is_retried(channel_to):
    def serve(peer):
        while True:
            peer.receive()

    with Http2Server(serve, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 0}) as server:
        channel = channel_to(server)
        answer = call(channel)
        assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")
        channel.close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_hanging_name_server_does_not_extend_a_call(monkeypatch, is_closed):
    resolving, end = threading.Event(), threading.Event()

    def hang(*_, flags, **__):
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        resolving.set()
        end.wait(600)
        return []

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", hang)
    channel = open_channel("collector.example:4317")
    result = call_in_thread(lambda: call(channel, timeout_s=600 if is_closed else 0.2))
    assert resolving.wait(60)
    if is_closed:
        channel.close()
    answer = result.result(60)
    end.set()
    assert answer.status == ("CANCELLED" if is_closed else "DEADLINE_EXCEEDED")
    channel.close()


def test_a_name_server_that_responds_after_the_time_limit_is_of_use(monkeypatch):
    lookups, end = [], threading.Event()
    real = socket.getaddrinfo

    def look_up(host, port, *, flags, **options):
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        lookups.append(host)
        end.wait(600)
        return real("127.0.0.1", port, flags=socket.AI_NUMERICHOST, **options)

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", look_up)
    with Http2Server(answer_all) as server:
        channel = open_channel(f"collector.example:{server.port}")
        for _ in range(3):
            assert call(channel, timeout_s=0.1).status == "DEADLINE_EXCEEDED"
        end.set()
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()
    assert lookups == ["collector.example"]


def test_an_unknown_name_is_reported():
    answer = call(open_channel("collector.invalid:4317"))
    assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")
    assert answer.message.startswith("cannot resolve collector.invalid: ")


def test_all_addresses_of_a_name_are_tried(channel_to):
    with Http2Server(answer_all) as server:
        hosts = (("127.0.0.1", 1), ("127.0.0.1", server.port))
        channel = open_channel(Target("collector", hosts))
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()
    channel = open_channel(Target("collector", (("127.0.0.1", 1),)))
    assert "cannot connect to 127.0.0.1:1: Connection refused" in call(channel).message


@pytest.mark.parametrize("is_abstract", [True, False])
def test_unix_sockets_are_reached(tmp_path, is_abstract):
    name = f"kprofiler-{random.random()}"
    address = f"\0{name}" if is_abstract else str(tmp_path / "socket")
    target = f"unix-abstract:{name}" if is_abstract else f"unix://{tmp_path}/socket"
    with Http2Server(answer_all, address=address):
        channel = open_channel(target)
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()


class Proxy:
    """An HTTP proxy that opens tunnels to a fixed port, or refuses with ``status``."""

    def __init__(self, port, status="200 Connection established"):
        self.target, self.status, self.requests = port, status, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with client:
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(4096)
            self.requests.append(request.decode())
            for byte in f"HTTP/1.1 {self.status}\r\nVia: x\r\n\r\n".encode():
                client.sendall(bytes([byte]))
            if not self.status.startswith("200"):
                return
            with socket.create_connection(("127.0.0.1", self.target)) as server:
                thread = threading.Thread(target=forward, args=(server, client))
                thread.start()
                forward(client, server)
                thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def no_proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_proxy")
def test_requests_go_through_a_proxy(monkeypatch):
    with Http2Server(answer_all) as server, Proxy(server.port) as proxy:
        url = f"http://me:p%40ss@127.0.0.1:{proxy.port}"
        channel = open_channel("collector.invalid:4317", proxy_url=url)
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()
        assert proxy.requests[0].startswith("CONNECT collector.invalid:4317 HTTP/1.1\r\n")
        channel = open_channel("dns:///collector.invalid", proxy_url=url)
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()
        assert proxy.requests.pop().startswith("CONNECT collector.invalid:443 HTTP/1.1\r\n")
        assert base64.b64encode(b"me:p@ss").decode() in proxy.requests[0]
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        channel = open_channel(f"127.0.0.1:{server.port}", proxy_url=url)
        assert call(channel).verdict is Verdict.ACCEPTED
        channel.close()
        assert len(proxy.requests) == 1


@pytest.mark.usefixtures("no_proxy")
def test_a_refusal_of_the_proxy_is_reported():
    with Proxy(1, "407 Proxy Authentication Required") as proxy:
        channel = open_channel("collector.invalid:4317", proxy_url=f"http://127.0.0.1:{proxy.port}")
        answer = call(channel)
    assert (answer.verdict, answer.status) == (Verdict.RETRY, "UNAVAILABLE")
    assert "407 Proxy Authentication Required" in answer.message


@pytest.mark.parametrize("name", ["TE", "connection", "grpc-timeout"])
def test_headers_that_grpc_reserves_are_rejected(name):
    with pytest.raises(ExportError, match="reserved") as caught:
        open_client(ClientSettings(endpoint="localhost:1", headers={name: "x"}))
    assert caught.value.hint


def test_metadata_is_sent_with_each_request():
    seen = []

    def serve(peer):
        for _ in range(2):
            stream, _ = peer.read_request()
            seen.append(peer.headers)
            peer.respond(stream)

    with Http2Server(serve) as server:
        channel = open_channel(
            f"127.0.0.1:{server.port}",
            metadata={"authorization": "Bearer x", "trace-bin": "\x01 a"},
        )
        for _ in range(2):
            assert call(channel, timeout_s=30).verdict is Verdict.ACCEPTED
        channel.close()
    assert len(seen) == 2
    for headers in seen:
        assert headers["authorization"] == "Bearer x"
        assert headers["trace-bin"] == "ASBh"
        assert (headers["te"], headers[":path"]) == ("trailers", METHOD)
        assert headers["grpc-timeout"] == "30000m"


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("collector:4317", Target("collector:4317", (("collector", 4317),))),
        ("collector", Target("collector", (("collector", 443),))),
        ("[::1]:4317", Target("[::1]:4317", (("::1", 4317),))),
        ("dns:collector:4317", Target("collector:4317", (("collector", 4317),))),
        ("dns:///collector:4317", Target("collector:4317", (("collector", 4317),))),
        ("passthrough:///a:1", Target("a:1", (("a", 1),))),
        ("ipv4:10.0.0.1:1,10.0.0.2:2",
         Target("10.0.0.1:1,10.0.0.2:2", (("10.0.0.1", 1), ("10.0.0.2", 2)))),
        ("ipv6:[::1]:1", Target("[::1]:1", (("::1", 1),))),
        ("unix:///run/otel.sock", Target("localhost", path="/run/otel.sock")),
        ("unix:otel.sock", Target("localhost", path="otel.sock")),
        ("unix-abstract:otel", Target("localhost", path="\0otel")),
    ],
)  # fmt: skip
def test_targets_are_parsed(text, target):
    assert parse_target(text) == target


def test_a_certificate_contains_no_final_dot():
    target = parse_target("collector.example.:4317")
    assert target.hosts == (("collector.example.", 4317),)
    assert target.server_name == "collector.example"


@pytest.mark.parametrize(
    "text", ["xds:///x", "dns://8.8.8.8/x:1", "dns:///", "dns:///a:b", "vsock:1:2"]
)
def test_unsupported_targets_are_rejected(text):
    with pytest.raises(ExportError) as caught:
        parse_target(text)
    assert caught.value.hint
