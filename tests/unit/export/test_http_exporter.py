"""OTLP over HTTP, tested with a real HTTP server that sends scripted responses."""

import contextlib
import email.utils
import gc
import gzip
import logging
import socket
import ssl
import threading
import time
import zlib

import pytest
from google.rpc.status_pb2 import Status

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import (
    ExportOutcome,
    ExportQueue,
    OtlpHttpExporter,
    RetryPolicy,
    Tls,
    http,
)
from otel_kprofiler.export.http import parse_endpoint
from otel_kprofiler.export.http_answer import parse_retry_after
from otel_kprofiler.model import Form, LossCause
from tests.raw_forks import python_fork, run_in_child
from tests.servers import free_port
from tests.unit.export.answers import partial_success as partial
from tests.unit.export.answers import start_export
from tests.waiting import call_in_thread, wait_until

pytestmark = pytest.mark.system

SUCCESS = ExportOutcome.SUCCESS
CALLED = ("True", 0)
PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json; charset=utf-8"}
PATH = "/v1development/profiles"
RETRYABLE = {429, 502, 503, 504}
FAILURES = [301, 302, 307, 308, 400, 401, 403, 404, 408, 413, 429, 500, 501, 502, 503, 504, 505]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def open_exporter(http_receiver, quick):
    exporters = []

    def make(endpoint=None, **arguments):
        exporters.append(
            OtlpHttpExporter(endpoint or http_receiver.endpoint, **{"retry": quick, **arguments})
        )
        return exporters[-1]

    yield make
    for exporter in exporters:
        exporter.shutdown(0)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_requests_follow_the_specification(http_receiver, open_exporter, batch, form, compression):
    exporter = open_exporter(form=form, compression=compression)
    assert exporter.form is form
    results = exporter.export(batch(b'{"a": 1}' * 50, form=form))
    assert results == (SUCCESS, {"on_cpu": (3, {})}, "", "")
    ((path, headers, body),) = http_receiver.requests
    assert path == "/v1development/profiles"
    assert headers["Content-Type"] == f"application/{'json' if form is Form.JSON else 'x-protobuf'}"
    assert headers["Content-Encoding"] == ("gzip" if compression == "gzip" else None)
    assert (gzip.decompress(body) if compression == "gzip" else body) == b'{"a": 1}' * 50
    assert headers["User-Agent"].startswith("otel-kprofiler/")
    assert " OTel-OTLP-Exporter-Python/" in headers["User-Agent"]


def note_ports(receiver):
    """Keeps the receiver's connections open. Returns a list that collects their client ports."""
    ports = []

    def answer(handler):
        ports.append(handler.client_address[1])
        handler.close_connection = False
        handler.reply(200)

    receiver.answer(answer)
    return ports


def test_several_batches_are_sent_over_one_connection(http_receiver, open_exporter, batch):
    exporter, ports = open_exporter(), note_ports(http_receiver)
    for _ in range(3):
        assert exporter.export(batch()).outcome is SUCCESS
    assert len(set(ports)) == 1


def test_a_forked_child_leaves_the_connection_to_its_parent(http_receiver, open_exporter, batch):
    exporter, ports = open_exporter(), note_ports(http_receiver)

    def export_and_shut_down():
        delivered = exporter.export(batch()).outcome is SUCCESS
        exporter.shutdown()
        return delivered

    assert exporter.export(batch()).outcome is SUCCESS
    assert run_in_child(python_fork, export_and_shut_down) == CALLED
    assert run_in_child(python_fork, lambda: exporter.shutdown() is None) == CALLED
    assert exporter.export(batch()).outcome is SUCCESS
    parents, childs, again = ports
    assert parents == again != childs


def test_a_child_that_is_forked_during_an_export_can_export(http_receiver, open_exporter, batch):
    arrived, forked = threading.Event(), threading.Event()

    def answer(handler):
        if not arrived.is_set():
            arrived.set()
            assert forked.wait(60)
        handler.reply(200)

    exporter = open_exporter()
    http_receiver.answer(answer)
    result = call_in_thread(exporter.export, batch())
    assert arrived.wait(30)
    assert run_in_child(python_fork, lambda: exporter.export(batch()).outcome is SUCCESS) == CALLED
    forked.set()
    assert result.result(60).outcome is SUCCESS


def test_attempts_have_separate_timeouts(http_receiver, open_exporter, batch, monkeypatch):
    timers, timer = [], threading.Timer

    def make(_, abort):
        timers.append(timer(60, abort))
        return timers[-1]

    def expire(handler):
        timers[0].function()  # as if the first timer's thread had waited for a CPU
        handler.reply(200)

    monkeypatch.setattr(threading, "Timer", make)
    http_receiver.answer((200, {}, b""), expire)
    exporter = open_exporter(retry=RetryPolicy(enabled=False))
    assert exporter.export(batch()).outcome is SUCCESS
    assert timers[0].finished.is_set(), "cancelled"
    assert exporter.export(batch()).outcome is SUCCESS


def test_headers_override_netrc(http_receiver, open_exporter, batch, tmp_path, monkeypatch):
    """By default, ``requests`` replaces Authorization with credentials from ~/.netrc."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    open_exporter(headers={"Authorization": "Bearer x"}).export(batch())
    open_exporter(http_receiver.endpoint.replace("//", "//us%40er:pw@")).export(batch())
    sent = [headers["Authorization"] for _, headers, _ in http_receiver.requests]
    assert sent == ["Bearer x", "Basic dXNAZXI6cHc="]


@pytest.mark.parametrize("status", FAILURES)
def test_only_retryable_statuses_are_retried(http_receiver, open_exporter, batch, status):
    http_receiver.answer((status, {"Location": "/elsewhere"}, b""), (200, {}, b""))
    result = open_exporter().export(batch())
    if status in RETRYABLE:
        assert result == (SUCCESS, {"on_cpu": (3, {})}, "", "")
        first, second = (body for _, _, body in http_receiver.requests)
        assert first == second, "profiles keep their ids, which show that they were sent twice"
    else:
        cause = LossCause.TOO_LARGE if status == 413 else LossCause.REJECTED
        assert result.lost == {cause: 3}
        assert str(status) in result.error_type + result.message
        assert len(http_receiver.requests) == 1


@pytest.mark.parametrize(("status", "date"), [(429, False), (503, True)])
def test_the_retry_after_header_is_honored(http_receiver, open_exporter, batch, status, date):
    started = time.monotonic()
    after = email.utils.formatdate(time.time() + 2, usegmt=True) if date else "1"
    http_receiver.answer((status, {"Retry-After": after}, b""), (200, {}, b""))
    assert open_exporter().export(batch()).outcome is SUCCESS
    assert time.monotonic() - started >= 0.9


@pytest.mark.parametrize(
    ("value", "delay"),
    [
        ("0", 0),
        (" 120 ", 120),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50),
        ("Thu, 01 Jan 1970 00:00:05 GMT", 0),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("²", None),
        ("soon", None),
    ],
)
def test_the_retry_after_header_is_parsed(value, delay):
    assert parse_retry_after(value, 10) == delay


def answer_chunked(handler):
    body = gzip.compress(partial(1, "old"))
    handler.send_response(200)
    handler.send_header("Content-Type", PROTOBUF["Content-Type"])
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for part in (body[:5], body[5:]):
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    handler.wfile.write(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "arrived"),
    [
        ((200, PROTOBUF, b"\x0a\x00"), 110),
        ((200, JSON, b'{"partialSuccess":{}}'), 110),
        ((200, JSON, b'{"partialSuccess":null}'), 110),
        ((200, JSON, b"{}"), 110),
        ((200, {}, b""), 110),
        ((200, PROTOBUF, partial(1, "old")), 10),
        ((200, {}, partial(1, "old")), 10),
        ((202, PROTOBUF, partial(1, "old")), 10),
        ((200, {"Content-Type": "application/protobuf"}, partial(1, "old")), 10),
        ((200, {"Content-Type": "text/plain; charset=utf-8"}, partial(1, "old")), 10),
        ((200, {"Content-Type": "text/plain"}, b'{"partialSuccess":{"rejectedProfiles":1}}'), 10),
        ((200, {}, b'{"partialSuccess":{"rejectedProfiles":1}}'), 10),
        ((200, {**PROTOBUF, "Content-Encoding": "gzip"}, gzip.compress(partial(1, "old"))), 10),
        ((200, {**PROTOBUF, "Content-Encoding": "deflate"}, zlib.compress(partial(1, ""))), 10),
        ((200, {**JSON, "Content-Encoding": "gzip"}, gzip.compress(b"{}")), 110),
        ((200, JSON, b'{"partialSuccess":{"rejectedProfiles":"1","errorMessage":"old"}}'), 10),
        ((200, JSON, b'{"partialSuccess":{"rejectedProfiles":2}}'), 0),
        (answer_chunked, 10),
    ],
)
def test_partial_success_is_read_in_any_form(http_receiver, open_exporter, batch, answer, arrived):
    http_receiver.answer(answer)
    result = open_exporter().export(batch(samples=(10, 100)))
    assert (result.outcome, result.exported) == (SUCCESS, arrived)
    assert result.lost == ({LossCause.REJECTED: 110 - arrived} if arrived < 110 else {})
    assert len(http_receiver.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (PROTOBUF, b"\xff\xff"),
        ({**PROTOBUF, "Content-Encoding": "gzip"}, b"\xff\xff"),
        ({**PROTOBUF, "Content-Encoding": "gzip"}, gzip.compress(b"\x0a\x00")[:-4]),
        ({**PROTOBUF, "Content-Encoding": "gzip"}, gzip.compress(bytes((4 << 20) + 1))),
        ({**PROTOBUF, "Content-Encoding": "br"}, b"\x0a\x00"),
        (JSON, b"[]"),
        (JSON, b"{"),
        (JSON, b'{"partialSuccess":[1]}'),
        (JSON, b'{"partialSuccess":{"rejectedProfiles":"x"}}'),
        (JSON, b'{"partialSuccess":{"rejectedProfiles":1e999}}'),
        (JSON, b"[" * 100_000),
        ({}, b"OK"),
        ({"Content-Type": "text/plain"}, b"OK"),
        ({"Content-Type": "text/html"}, b"<html>Welcome</html>"),
        (PROTOBUF, b"\x00" * ((4 << 20) + 1)),
        ({**PROTOBUF, "Content-Length": "100", "Connection": "close"}, b"half"),
    ],
)
def test_a_success_status_counts_as_delivery_regardless_of_the_body(
    http_receiver, open_exporter, batch, answer, caplog
):
    """Only the HTTP status matters. An unreadable partial success is logged once per exporter."""
    headers, body = answer
    http_receiver.answer(
        (200, {"Connection": "close", **headers}, body), (200, {}, b""), (200, headers, body)
    )
    exporter = open_exporter()
    for _ in range(3):
        result = exporter.export(batch())
        assert (result.outcome, result.exported, result.lost) == (SUCCESS, 3, {})
    assert len(http_receiver.requests) == 3
    (record,) = caplog.records
    assert "its response is unreadable" in record.message


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (PROTOBUF, Status(code=3, message="bad profile").SerializeToString()),
        (
            {"Content-Type": "application/protobuf"},
            Status(message="bad profile").SerializeToString(),
        ),
        (
            {**JSON, "Content-Encoding": "gzip"},
            gzip.compress(b'{"code":3,"message":"bad profile"}'),
        ),
        (JSON, b'{"code":3,"message":"bad profile"}'),
        ({"Content-Type": "text/plain"}, b"bad profile"),
    ],
)
def test_the_receivers_explanation_is_reported(http_receiver, open_exporter, batch, headers, body):
    http_receiver.answer((400, headers, body))
    assert open_exporter().export(batch()).message == "bad profile"


def test_the_body_of_a_redirect_is_not_read_beyond_the_limit(http_receiver, open_exporter, batch):
    sent = []

    def endless(handler):
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.end_headers()
        with contextlib.suppress(OSError):
            while len(sent) < 1000:
                handler.wfile.write(bytes(1 << 20))
                sent.append(1)

    http_receiver.answer(endless)
    assert open_exporter(retry=RetryPolicy(enabled=False)).export(batch()).outcome is not SUCCESS
    assert len(sent) < 100


def test_a_dropped_connection_is_retried(http_receiver, open_exporter, batch):
    def cut_off(handler):
        handler.reply(503, b"half", Content_Length="100")

    http_receiver.answer(lambda _: None, cut_off, (200, {}, b""))
    assert open_exporter().export(batch()).outcome is SUCCESS
    assert len(http_receiver.requests) == 3
    assert len({body for _, _, body in http_receiver.requests}) == 1


def trickle_head(handler):
    for _ in range(100):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" if not _ else b"X: y\r\n")
        time.sleep(0.25)


def trickle_body(handler, status=503):
    handler.send_response(status)
    handler.send_header("Connection", "close")
    handler.end_headers()
    for _ in range(500):
        handler.wfile.write(b"\n")
        time.sleep(0.05)


def wait_for_the_end(handler):
    """Sends nothing until the client disconnects."""
    handler.rfile.read()


@pytest.mark.parametrize("trickle", [trickle_head, trickle_body, wait_for_the_end])
def test_the_timeout_bounds_a_trickling_response(http_receiver, open_exporter, batch, trickle):
    http_receiver.answer(trickle)
    exporter = open_exporter(timeout_s=0.3, retry=RetryPolicy(enabled=False))
    started = time.monotonic()
    result = exporter.export(batch())
    assert time.monotonic() - started < 20
    assert (result.lost, result.error_type) == ({LossCause.RETRIES_EXHAUSTED: 3}, "timeout")


def test_a_request_is_not_resent_if_reading_its_response_times_out(
    http_receiver, open_exporter, batch, caplog, monkeypatch
):
    reading, timer, read = threading.Event(), threading.Timer, http._read_body

    def expire(abort):
        assert reading.wait(60)  # an earlier timeout would cause a retry
        abort()

    monkeypatch.setattr(http, "_read_body", lambda response: reading.set() or read(response))
    monkeypatch.setattr(threading, "Timer", lambda _, abort: timer(0, expire, [abort]))
    http_receiver.answer(lambda handler: trickle_body(handler, 200))
    assert open_exporter().export(batch()).exported == 3
    assert len(http_receiver.requests) == 1
    assert "no complete response" in caplog.text


def test_the_timeout_of_a_single_read_is_reported_as_a_timeout(
    http_receiver, open_exporter, batch, caplog, monkeypatch
):
    def begin_and_wait(handler):
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        wait_for_the_end(handler)

    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda _, abort: timer(60, abort))
    http_receiver.answer(begin_and_wait)
    assert open_exporter(timeout_s=0.3).export(batch()).exported == 3
    assert "no complete response in 0.3 s" in caplog.text


@contextlib.contextmanager
def trickling(first):
    """Runs a server that sends single bytes for a minute, and yields its port."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):  # the client has disconnected or the test has ended
                while True:
                    peer, _ = server.accept()
                    with peer:
                        peer.recv(65536)
                        peer.sendall(first)
                        for _ in range(1200):
                            if stop.wait(0.05):
                                return
                            peer.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


# If a socket is shut down just before its TLS handshake, ssl does not close the socket explicitly.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("who", ["proxy", "receiver"])
def test_the_timeout_bounds_a_trickling_connection(open_exporter, batch, who):
    """A proxy's response to CONNECT, or a TLS handshake, may arrive one byte at a time."""
    answers = {
        "proxy": b"HTTP/1.1 200 OK\r\nX: ",
        "receiver": b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc",
    }
    with trickling(answers[who]) as port:
        proxy = f"http://127.0.0.1:{port}" if who == "proxy" else ""
        endpoint = f"https://127.0.0.1:{1 if who == 'proxy' else port}"
        once = RetryPolicy(enabled=False)
        exporter = open_exporter(endpoint, proxy_url=proxy, timeout_s=1, retry=once)
        for _ in range(2):
            started = time.monotonic()
            result = exporter.export(batch())
            assert time.monotonic() - started < 30
            assert (result.lost, result.error_type) == ({LossCause.RETRIES_EXHAUSTED: 3}, "timeout")
    gc.collect()


@pytest.fixture
def slow_names(monkeypatch):
    """Makes lookups of names wait until the event is set."""
    look_up, responds = socket.getaddrinfo, threading.Event()

    def wait(host, *arguments, flags=0, **options):
        if not flags & socket.AI_NUMERICHOST:
            assert responds.wait(60)
            host = "127.0.0.1"
        return look_up(host, *arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    yield responds
    responds.set()


def test_the_timeout_bounds_a_name_lookup(http_receiver, open_exporter, batch, slow_names, caplog):
    port = http_receiver.port
    exporter = open_exporter(
        f"http://collector.invalid:{port}", timeout_s=0.1, retry=RetryPolicy(enabled=False)
    )
    assert exporter.export(batch()).outcome is not SUCCESS
    assert "cannot resolve collector.invalid: no response" in caplog.text
    slow_names.set()
    exporter._timeout_s = 60
    assert exporter.export(batch()).outcome is SUCCESS


def test_shutdown_ends_a_name_lookup(open_exporter, batch, slow_names):
    exporter = open_exporter("http://collector.invalid:1", timeout_s=600)
    result = call_in_thread(exporter.export, batch())
    wait_until(lambda: "kprofiler-dns" in [thread.name for thread in threading.enumerate()])
    exporter.shutdown(0)
    assert result.result(60).lost == {LossCause.SHUTDOWN: 3}


def test_all_addresses_of_a_receiver_share_the_timeout(
    http_receiver, open_exporter, batch, monkeypatch
):
    """The other addresses do not respond, because their backlogs are full."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))]
        full = sockets[0].getsockname()
        for _ in range(3):
            sockets.append(stack.enter_context(socket.socket()))
            sockets[-1].setblocking(False)
            sockets[-1].connect_ex(full)
        addresses = [full, full, ("127.0.0.1", http_receiver.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        exporter = open_exporter("http://collector.invalid:1", timeout_s=1)
        started = time.monotonic()
        result = exporter.export(batch())
    assert result.outcome is SUCCESS
    assert time.monotonic() - started < 60


def test_secrets_echoed_by_a_receiver_are_redacted(http_receiver, open_exporter, batch, caplog):
    """The response contains credentials, and a bad header that would make urllib3 log the query."""
    caplog.set_level(logging.DEBUG)

    def echo(handler):
        text = f"no: {handler.path} {handler.headers['Authorization']} {handler.headers['X-Key']}"
        handler.send_response(400)
        handler.send_header("Content-Type", "text/plain")
        handler.wfile.write(b"".join(handler._headers_buffer) + b"broken header\r\n")
        handler._headers_buffer = []
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text.encode())

    http_receiver.answer(echo)
    place = http_receiver.endpoint.removeprefix("http://")
    exporter = open_exporter(
        f"http://me:pass%2Fword@{place}/x?key=t0ken-1",
        exact=True,
        headers={"x-key": "header-secret"},
    )
    shown = exporter.export(batch()).message + caplog.text
    assert "no: /x" in shown
    for secret in ("pass/word", "pass%2Fword", "t0ken-1", "header-secret", "bWU6cGFzcy93b3Jk"):
        assert secret not in shown
    assert not [record for record in caplog.records if record.name.startswith("urllib3")]


@pytest.mark.parametrize("proxy", ["http://me:hunter22@[::bad", "http://me:hunter22@host:port"])
def test_a_malformed_proxy_url_is_reported_without_password(open_exporter, batch, caplog, proxy):
    queue = ExportQueue(open_exporter(proxy_url=proxy, retry=RetryPolicy(enabled=False)))
    queue.put(batch())
    queue.shutdown()
    assert queue.counts().exported == 0
    assert "hunter22" not in caplog.text
    assert caplog.text


@pytest.mark.parametrize(
    "answer", [(503, {}, b""), (429, {"Retry-After": "99"}, b""), trickle_body]
)
def test_shutdown_interrupts_backoffs_and_attempts(http_receiver, open_exporter, batch, answer):
    http_receiver.answer(answer)
    exporter = open_exporter(retry=RetryPolicy(initial_interval_s=60, max_elapsed_time_s=0))
    result = start_export(exporter, batch(), http_receiver)
    time.sleep(0.1)
    started = time.monotonic()
    exporter.shutdown(100)
    assert result.result().lost == {LossCause.SHUTDOWN: 3}
    assert time.monotonic() - started < 20
    assert exporter.export(batch()).lost == {LossCause.SHUTDOWN: 3}


@pytest.mark.usefixtures("fast_clock")
def test_refused_connections_are_retried_until_the_time_limit(open_exporter, batch, caplog):
    port = free_port()
    policy = RetryPolicy(initial_interval_s=0.05, max_elapsed_time_s=40)
    exporter = open_exporter(f"http://127.0.0.1:{port}/x?key=secret", exact=True, retry=policy)
    for _ in range(2):
        result = exporter.export(batch())
        assert result.lost == {LossCause.RETRIES_EXHAUSTED: 3}
    # One message for the retry and one for the final failure, both without the query string.
    results = [message.rpartition(";")[2] for message in caplog.messages]
    assert results == [" retrying (logged once)", " giving up (logged once)"]
    assert "Connection refused" in caplog.text
    assert "secret" not in caplog.text + result.message


def test_the_environment_sets_proxies_by_default(http_receiver, open_exporter, batch, monkeypatch):
    """The request line contains the absolute URL for a proxy, but only the path for a server."""
    proxy, far = http_receiver.endpoint, "http://collector.invalid:4318"
    once = RetryPolicy(enabled=False)
    assert open_exporter(far, proxy_url=proxy, retry=once).export(batch()).outcome is SUCCESS
    monkeypatch.setenv("http_proxy", proxy)
    assert open_exporter(far, retry=once).export(batch()).outcome is SUCCESS
    assert {path for path, _, _ in http_receiver.requests} == {f"{far}/v1development/profiles"}
    assert open_exporter(far, proxy_url="", retry=once).export(batch()).exported == 0


def test_cookies_are_not_stored(http_receiver, open_exporter, batch):
    http_receiver.answer((200, {"Set-Cookie": "a=b"}, b""))
    exporter = open_exporter()
    exporter.export(batch())
    exporter.export(batch())
    assert "Cookie" not in http_receiver.requests[1][1]


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize(
    ("mutual", "files", "delivered"),
    [
        (False, {"ca_file": "ca.pem"}, True),
        (False, {"ca_file": "stranger.pem"}, False),
        (False, {"insecure_skip_verify": True}, True),
        (True, {"ca_file": "ca.pem"}, False),
        (True, {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key"}, True),
    ],
)
def test_tls_verifies_the_receiver_and_authenticates_the_client(
    *, certificates, open_http_receiver, open_exporter, batch, mutual, files, delivered, monkeypatch
):
    monkeypatch.chdir(certificates)
    # The environment must not override explicit arguments.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates / "stranger.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("server.pem", "server.key")
    if mutual:
        context.load_verify_locations("ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    with open_http_receiver(context) as receiver:
        once = RetryPolicy(enabled=False)
        exporter = open_exporter(receiver.endpoint, tls=Tls(**files), retry=once)
        assert (exporter.export(batch()).outcome is SUCCESS) is delivered


@pytest.mark.parametrize(("trusted", "delivered"), [("ca.pem", True), ("stranger.pem", False)])
def test_the_system_decides_which_authorities_are_trusted(
    *, certificates, open_http_receiver, open_exporter, batch, trusted, delivered, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / trusted))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    # The bundle of the certifi package, which requests would use.
    monkeypatch.setattr("requests.adapters.DEFAULT_CA_BUNDLE_PATH", str(certificates / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with open_http_receiver(context) as receiver:
        exporter = open_exporter(receiver.endpoint, retry=RetryPolicy(enabled=False))
        assert (exporter.export(batch()).outcome is SUCCESS) is delivered


@pytest.mark.parametrize(
    ("endpoint", "path", "url"),
    [
        ("http://host:4318", PATH, f"http://host:4318{PATH}"),
        ("http://host:4318/", "/v1/metrics", "http://host:4318/v1/metrics"),
        ("https://host/otlp/", PATH, f"https://host/otlp{PATH}"),
        ("https://user:pw@host/x?key=1", "", "https://host/x?key=1"),
    ],
)
def test_endpoint_urls_are_parsed(endpoint, path, url):
    assert parse_endpoint(endpoint, path=path)[0] == url


@pytest.mark.parametrize(
    ("endpoint", "arguments"),
    [
        ("localhost:4318", {}),
        ("ftp://user:secret@host", {}),
        ("http://user:secret@host:port", {}),
        ("http://user:secret@[host", {}),
        ("user:secret@host:4318", {}),
        ("//host/?token=secret", {}),
        ("http://", {}),
        ("http://host:port", {}),
        ("http://host", {"compression": "br"}),
        ("http://host", {"headers": {"a": "secret\r\nb: c"}}),
        ("http://host", {"tls": Tls(key_file="/etc/hostname")}),
    ],
)
def test_invalid_settings_are_rejected_with_a_hint_and_without_secrets(endpoint, arguments):
    with pytest.raises(ExportError) as caught:
        OtlpHttpExporter(endpoint, **arguments)
    assert caught.value.hint
    assert "secret" not in caught.value.message
