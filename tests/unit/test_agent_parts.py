"""Log, systemd notifications and health endpoint of the agent."""

import io
import json
import logging
import socket
import urllib.error
import urllib.request

import pytest

from otel_kprofiler.agent.health import HealthServer
from otel_kprofiler.agent.logs import RepeatFilter, configure_logging, hold_logging
from otel_kprofiler.agent.systemd import Notifier
from otel_kprofiler.errors import HostError


@pytest.fixture
def root_logging():
    """Gives the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_log_is_json_where_nobody_looks_on(root_logging):
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("a").info("sent %d", 3)
    logging.getLogger("a").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["message"] == "sent 3"
    assert json.loads(line)["level"] == "info"


def test_the_log_is_text_on_a_terminal(root_logging):
    stream = Terminal()
    configure_logging(level="debug", stream=stream)
    logging.getLogger("a").debug("shown")
    assert stream.getvalue().rstrip().endswith("DEBUG   shown")


def test_what_is_logged_before_the_log_is_configured_comes_first(root_logging):
    stream = io.StringIO()
    hold_logging()
    logging.getLogger("a").warning("early")
    configure_logging(encoding="json", stream=stream)
    logging.getLogger("a").warning("late")
    found = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert found == ["early", "late"]


def test_repeated_warnings_are_counted_instead_of_written():
    now = [0.0]
    limit = RepeatFilter(60, lambda: now[0])

    def record(number, level=logging.WARNING):
        return logging.LogRecord("a", level, "", 0, "failed: %d", (number,), None)

    assert limit.filter(record(1))
    assert not limit.filter(record(2))
    assert not limit.filter(record(3))
    assert limit.filter(record(4, logging.INFO))
    now[0] = 61
    late = record(5)
    assert limit.filter(late)
    assert late.getMessage() == "failed: 5 (2 more like this were left out)"


@pytest.fixture
def systemd(tmp_path):
    """The socket that systemd listens on, and the environment it gives."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(1)
    yield listener, {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
    listener.close()


def test_systemd_hears_about_the_life_cycle(systemd):
    listener, environment = systemd
    notifier = Notifier(environment)
    notifier.ready("sampling 2 CPUs")
    assert listener.recv(200) == b"READY=1\nSTATUS=sampling 2 CPUs"
    notifier.reloading()
    assert listener.recv(200).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    notifier.stopping()
    assert listener.recv(200) == b"STOPPING=1"


def test_the_watchdog_is_fed_twice_per_interval(systemd):
    listener, environment = systemd
    notifier = Notifier(environment)
    for now in (10.0, 10.5, 11.0, 11.1):
        notifier.alive(now)
    listener.setblocking(False)
    assert [listener.recv(99), listener.recv(99)] == [b"WATCHDOG=1"] * 2
    with pytest.raises(BlockingIOError):
        listener.recv(99)


def test_the_watchdog_of_another_process_is_not_ours(systemd):
    _listener, environment = systemd
    notifier = Notifier({**environment, "WATCHDOG_PID": "1"}, pid=2)
    assert notifier.watchdog_interval_s is None


def test_without_systemd_nothing_is_sent():
    Notifier({}).ready("x")


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_health_says_what_is_wrong():
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


def test_a_port_in_use_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostError, match="cannot listen on"):
            HealthServer(endpoint, {})
