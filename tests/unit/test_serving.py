"""All servers withstand long headers, slow clients and DNS rebinding."""

import contextlib
import socket
import struct
import threading
import time

import pytest

from otel_kprofiler.agent import health
from otel_kprofiler.agent.health import HealthServer
from otel_kprofiler.serving import MAX_CONNECTIONS, MAX_HEADER_BYTES
from otel_kprofiler.viewing import HttpReceiver, Intake, PageServer
from otel_kprofiler.viewing.store import Added
from tests.waiting import wait_until

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Makes servers wait longer for a free thread, because CPUs may be busy."""
    monkeypatch.setattr("otel_kprofiler.serving._FREE_WAIT_S", 60)


@pytest.fixture(params=["health", "page", "receiver"])
def port(request):
    if request.param == "health":
        server = HealthServer("127.0.0.1:0", {"/": list})
    elif request.param == "page":
        server = PageServer("127.0.0.1:0", "<p>", lambda _: [])
    else:
        server = HttpReceiver("127.0.0.1:0", Intake(None))
    with contextlib.closing(server):
        yield find_port(server)


def find_port(server):
    address = getattr(server, "address", "")
    return int(address.rstrip("/").rpartition(":")[2]) if address else server.port


def status(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(request)
        return int(client.makefile("rb").readline().split()[1])


def open_slowly(stack, port, count):
    """Returns clients that send only the start of a request; ``stack`` closes them."""
    clients = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port), timeout=20)
        clients.append(stack.enter_context(client))
        client.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
    return clients


PUT = b"PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("lines", [1, 80], ids=["one line", "many lines"])
def test_the_total_size_of_headers_is_limited(port, lines):
    """Python itself limits only the length of a line (64 KiB) and the number of lines (100)."""
    line = b"X-A: " + b"a" * (MAX_HEADER_BYTES // lines) + b"\r\n"
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    assert status(port, head + line * lines) == 431
    small = b"X-A: " + b"a" * (MAX_HEADER_BYTES // 2 // lines) + b"\r\n"
    assert status(port, head + small * lines + b"\r\n") in {200, 405}


@pytest.mark.parametrize("kind", ["page", "receiver"])
def test_requests_in_progress_complete_despite_slow_clients(kind):
    begun, go_on, statuses = threading.Event(), threading.Event(), []

    def work(answer):
        begun.set()
        assert go_on.wait(60)
        return answer

    if kind == "page":
        server = PageServer("127.0.0.1:0", "<p>", lambda _: work([b"{}"]))
        request = b"GET /profile.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    else:
        server = HttpReceiver("127.0.0.1:0", Intake(lambda _: work(Added(0, 0, 0))))
        head = "POST /v1development/profiles HTTP/1.1\r\nContent-Type: application/x-protobuf\r\n"
        request = head.encode() + b"Content-Length: 0\r\n\r\n"
    with contextlib.closing(server), contextlib.ExitStack() as slow:
        port = find_port(server)
        waiting = threading.Thread(target=lambda: statuses.append(status(port, request)))
        waiting.start()
        assert begun.wait(60)
        open_slowly(slow, port, 3 * MAX_CONNECTIONS)
        assert status(port, PUT) == 405
        go_on.set()
        waiting.join(60)
    assert statuses == [200]


def test_slow_clients_do_not_interrupt_slow_responses_to_other_clients():
    body = b" " * (32 << 20)  # more data than the kernel buffers per connection
    with (
        contextlib.closing(PageServer("127.0.0.1:0", "<p>", lambda _: [body])) as server,
        contextlib.ExitStack() as slow,
    ):
        port = find_port(server)
        reader = slow.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        reader.sendall(b"GET /profile.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = reader.makefile("rb")
        assert answer.readline().split()[1] == b"200"
        open_slowly(slow, port, 3 * MAX_CONNECTIONS)
        assert status(port, PUT) == 405
        assert answer.read().endswith(body)


@contextlib.contextmanager
def reading_slowly(port, count):
    """Yields clients that have requested a large response and read only its status."""
    with contextlib.ExitStack() as clients:
        made = []
        for _ in range(count):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            client.sendall(b"GET /profile.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = client.makefile("rb")
            assert answer.readline().split()[1] == b"200"
            made.append(answer)
        yield made


def test_clients_that_stop_reading_are_disconnected_to_serve_other_clients():
    body = b" " * (32 << 20)
    with (
        contextlib.closing(PageServer("127.0.0.1:0", "<p>", lambda _: [body])) as server,
        reading_slowly(find_port(server), 1) as [reader],
        reading_slowly(find_port(server), MAX_CONNECTIONS - 1) as stalled,
    ):
        read, last_read = bytearray(), server._server._answering
        first = next(iter(last_read))
        for _ in range(MAX_CONNECTIONS // 2):
            time.sleep(0.2)  # so that the reader is not the client that has been idle longest
            read += reader.read(1 << 20)
            wait_until(lambda: min(last_read, key=last_read.__getitem__) is not first)
            assert status(find_port(server), PUT) == 405
        assert (read + reader.read()).endswith(body)
        assert any(len(answer.read()) < len(body) for answer in stalled)


def test_a_long_running_health_check_is_answered_despite_slow_clients(monkeypatch):
    monkeypatch.setattr(health, "CONNECTION_TIMEOUT_S", 120)  # the machine may be busy
    begun, go_on, statuses = threading.Event(), threading.Event(), []

    def probe():
        begun.set()
        assert go_on.wait(60)
        return []

    request = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        contextlib.closing(HealthServer("127.0.0.1:0", {"/readyz": probe, "/": list})) as server,
        contextlib.ExitStack() as slow,
    ):
        waiting = threading.Thread(target=lambda: statuses.append(status(server.port, request)))
        waiting.start()
        assert begun.wait(60)
        open_slowly(slow, server.port, 2 * MAX_CONNECTIONS)
        assert status(server.port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
        go_on.set()
        waiting.join(60)
    assert statuses == [200]


def ask_health(request, endpoint="127.0.0.1:0"):
    with contextlib.closing(HealthServer(endpoint, {"/livez": list})) as server:
        return status(server.port, request.encode())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:80", "10.1.2.3"])
def test_health_checks_whose_host_header_is_an_address_or_localhost_are_answered(host):
    assert ask_health(f"GET /livez HTTP/1.1\r\nHost: {host}\r\n\r\n") == 200


def test_health_checks_without_a_host_header_are_answered():
    assert ask_health("GET /livez HTTP/1.0\r\n\r\n") == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[::1", ""])
def test_other_sites_cannot_read_the_health_endpoint_on_loopback(host):
    """An attacker's domain name may resolve to this host (DNS rebinding)."""
    assert ask_health(f"GET /status HTTP/1.1\r\nHost: {host}\r\n\r\n") == 403


def test_health_checks_that_use_a_host_name_are_answered_on_non_loopback_addresses():
    head = "GET /livez HTTP/1.1\r\nHost: agent.monitoring.svc\r\n\r\n"
    assert ask_health(head, "0.0.0.0:0") == 200


def test_many_lost_connections_cause_few_log_lines(port, caplog):
    reset = struct.pack("ii", 1, 0)
    for _ in range(50):
        with contextlib.ExitStack() as slow:
            (client,) = open_slowly(slow, port, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    wait_until(lambda: caplog.records)
    assert status(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") in {200, 405}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 2, lines  # one for lost connections, one for refused connections
