"""The agent's log, systemd notifications and health endpoint do not block the agent."""

import contextlib
import itertools
import json
import logging
import os
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import pytest

from otel_kprofiler.agent.health import HealthServer
from otel_kprofiler.agent.logs import MAX_WAITING_BYTES, configure_logging, hold_logging
from otel_kprofiler.agent.systemd import Notifier
from otel_kprofiler.errors import HostError
from otel_kprofiler.repeats import RepeatFilter
from otel_kprofiler.serving import MAX_CONNECTIONS
from tests.waiting import wait_until

pytestmark = pytest.mark.system


@pytest.fixture
def root_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.getLogger().handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def pipe():
    read, write = os.pipe()

    def text():
        for handler in logging.root.handlers:
            handler.flush()
        return os.read(read, 1 << 20).decode()

    yield write, text
    os.close(read)
    os.close(write)


def test_the_agent_logs_json_if_its_output_is_not_a_terminal(root_logging, pipe):
    fd, read = pipe
    configure_logging(fd=fd)
    logging.getLogger("a").info("sent %d", 3)
    logging.getLogger("a").debug("not shown")
    (line,) = read().splitlines()
    assert json.loads(line)["message"] == "sent 3"
    assert json.loads(line)["level"] == "info"


def test_the_agent_logs_text_on_a_terminal(root_logging):
    controller, terminal = os.openpty()
    configure_logging(level="debug", fd=terminal)
    logging.getLogger("a").debug("shown")
    logging.root.handlers[0].flush()
    assert os.read(controller, 1000).decode().rstrip().endswith("DEBUG   shown")
    os.close(terminal)
    os.close(controller)


def test_records_logged_before_configuration_are_written_first(root_logging, pipe):
    fd, read = pipe
    hold_logging()
    logging.getLogger("a").warning("early")
    configure_logging(encoding="json", fd=fd)
    logging.getLogger("a").warning("late")
    assert [json.loads(line)["message"] for line in read().splitlines()] == ["early", "late"]


def test_a_line_longer_than_the_buffer_is_written(root_logging, pipe, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.agent.logs.FLUSH_TIMEOUT_S", 0.01)
    fd, read = pipe
    configure_logging(encoding="json", fd=fd)
    long = "x" * 2 * MAX_WAITING_BYTES
    logging.getLogger("a").info(long)
    logging.getLogger("a").info("after")
    text = ""
    while "\n" not in text:
        text += read()
    assert json.loads(text.splitlines()[0])["message"] == long


def test_an_unread_log_drops_and_counts_lines_without_blocking(root_logging, pipe, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.agent.logs.FLUSH_TIMEOUT_S", 0.2)
    fd, read = pipe
    configure_logging(encoding="json", fd=fd)
    numbers = itertools.count()
    unread = 20_000
    for number in itertools.islice(numbers, unread):
        logging.getLogger("a").info("%d", number)
    text, accounted, gaps = "", 0, 0
    # There may be several gaps; the line after each gap states how many messages were dropped.
    while accounted <= unread:
        logging.getLogger("a").info("%d", next(numbers))
        *lines, text = (text + read()).split("\n")
        for message in (json.loads(line)["message"] for line in lines):
            if "dropped" in message:
                accounted += int(message.split()[0])
                gaps += 1
            else:
                assert int(message) == accounted
                accounted += 1
    assert gaps


def test_repeated_warnings_are_suppressed_and_counted():
    now = [0.0]
    limit = RepeatFilter(60, lambda: now[0])

    def record(number, level=logging.WARNING):
        return logging.LogRecord("a", level, "", 0, "failed: %d", (number,), None)

    assert limit.filter(record(1))
    assert not limit.filter(record(2))
    assert not limit.filter(record(3))
    assert limit.filter(record(4, logging.INFO))
    other = record(1)
    other.subject = "another exporter"
    assert limit.filter(other)
    now[0] = 61
    late = record(5)
    assert limit.filter(late)
    assert late.getMessage() == "failed: 5 (2 similar messages suppressed)"


@pytest.fixture
def systemd(tmp_path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(1)
    yield listener, {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
    listener.close()


def test_systemd_is_notified_of_start_reload_and_stop(systemd):
    listener, environment = systemd
    notifier = Notifier(environment)
    notifier.ready("sampling 2 CPUs")
    assert listener.recv(200) == b"READY=1\nSTATUS=sampling 2 CPUs"
    notifier.reloading()
    assert listener.recv(200).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    notifier.stopping()
    assert listener.recv(200) == b"STOPPING=1"


def test_the_watchdog_is_notified_twice_per_interval(systemd):
    listener, environment = systemd
    notifier = Notifier(environment)
    for now in (10.0, 10.5, 11.0, 11.1):
        notifier.alive(now)
    listener.setblocking(False)
    assert [listener.recv(99), listener.recv(99)] == [b"WATCHDOG=1"] * 2
    with pytest.raises(BlockingIOError):
        listener.recv(99)


def test_a_watchdog_setting_for_another_process_is_ignored(systemd):
    _listener, environment = systemd
    notifier = Notifier({**environment, "WATCHDOG_PID": str(os.getpid() + 1)})
    assert notifier.watchdog_interval_s is None


def test_notifying_a_full_socket_does_not_block_and_is_retried(systemd):
    listener, environment = systemd
    notifier = Notifier(environment)
    notifier.ready("sampling")
    for _ in range(1000):
        notifier.ready("busy")
    notifier.stopping()
    heard = []
    notifier.alive(1.0)
    while b"STOPPING=1" not in heard:
        heard.append(listener.recv(99))
        notifier.alive(float(len(heard) + 2))
    assert heard[0] == b"READY=1\nSTATUS=sampling"
    assert len(heard) < 1000


def test_no_notification_is_sent_without_systemd():
    Notifier({}).ready("x")


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_health_probes_report_problems():
    problems = []
    server = HealthServer("127.0.0.1:0", {"/livez": lambda: problems, "/readyz": list})
    try:
        assert get(server.port, "/livez") == (200, {"ok": True, "problems": []})
        problems.append("the drain has not run for 30 s")
        status, body = get(server.port, "/livez")
        assert status == 503
        assert json.loads(body)["problems"] == problems
        assert get(server.port, "/readyz")[0] == 200
        assert get(server.port, "/other")[0] == 404
    finally:
        server.close()


def test_a_health_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostError, match="cannot listen on"):
            HealthServer(endpoint, {})


def test_the_agent_waits_until_its_port_is_free(monkeypatch, caplog):
    monkeypatch.setattr("otel_kprofiler.agent.health.RETRY_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        server = HealthServer(endpoint, {"/livez": list}, waits=True)
        with contextlib.closing(HealthServer(endpoint, {}, waits=True)):
            time.sleep(0.1)  # both servers are waiting for the port
        assert server.port == 0
    with contextlib.closing(server):
        wait_until(lambda: server.port)
        assert get(server.port, "/livez")[0] == 200
    (lines,) = {record.getMessage() for record in caplog.records if record.levelname == "ERROR"}
    assert "cannot listen on" in lines
    assert "retrying every" in lines


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_the_agent_starts_before_the_address_of_its_endpoint_exists(host, caplog):
    with pytest.raises(HostError, match="cannot listen on"):
        HealthServer(f"{host}:0", {})
    with contextlib.closing(HealthServer(f"{host}:0", {}, waits=True)) as server:
        assert server.port == 0
    assert "retrying every" in caplog.text


@pytest.fixture
def health(monkeypatch):
    monkeypatch.setattr("otel_kprofiler.agent.health.CONNECTION_TIMEOUT_S", 1.0)
    server = HealthServer("127.0.0.1:0", {"/livez": list})
    yield server
    server.close()
    wait_until(lambda: not count_health_threads())  # else they would log during the next test


def count_health_threads():
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_clients_that_hold_connections_do_not_lock_out_other_clients(health, caplog, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.serving._FREE_WAIT_S", 60)
    with contextlib.ExitStack() as stack:
        for _ in range(5 * MAX_CONNECTIONS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", health.port)))
            client.sendall(b"GET /livez HTTP/1.0\r\nX-Slow: ")
        assert get(health.port, "/livez")[0] == 200
        assert len(health._server._open) <= MAX_CONNECTIONS
        wait_until(lambda: count_health_threads() <= MAX_CONNECTIONS)
    assert "refused" not in caplog.text


def test_simultaneous_connections_are_all_accepted(health):
    """The kernel drops connections that it cannot queue while the server is busy with a client."""
    with health._server._changed, contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            client = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
            client.connect(("127.0.0.1", health.port))


def test_a_client_that_sends_byte_by_byte_is_disconnected(health):
    deadline = time.monotonic() + 60
    with socket.create_connection(("127.0.0.1", health.port)) as client:
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                client.sendall(b"x")
                time.sleep(0.2)
        assert time.monotonic() < deadline


def test_a_reset_connection_causes_one_log_line(health, caplog, capfd):
    with socket.create_connection(("127.0.0.1", health.port)) as client:
        client.sendall(b"GET /livez HTTP/1.0\r\nX-Slow: ")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "127.0.0.1" in record.getMessage()
    assert capfd.readouterr().err == ""
