"""The command `view` shows profiles from files and from senders."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict

import pytest

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.analysis import Filter
from otel_kprofiler.cli.moments import Moment
from otel_kprofiler.cli.view import has_browser
from otel_kprofiler.cli.view_sources import describe_endpoint, open_saved
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import PYTHON_SIDE, Frame, Line, Stack, WindowSample
from tests import page
from tests.further import further
from tests.unit.viewing import http2
from tests.waiting import wait_until
from tests.windows import make_frame, make_window, write_otlp

pytestmark = pytest.mark.system

SECOND = 10**9
START = 1_600_000_000 * SECOND
VIEW = [sys.executable, "-m", "otel_kprofiler", "view"]


@contextlib.contextmanager
def view(*words):
    """Runs the command, and yields its process and the address of its page."""
    command = subprocess.Popen([*VIEW, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with command:
        try:
            line = command.stdout.readline().decode()
            match = re.search(r"http://\S+", line)
            assert match, (line, command.stderr.read())
            yield command, match[0]
        finally:
            command.kill()


def get(address, path=""):
    with urllib.request.urlopen(address + path, timeout=20) as answer:
        return answer.read()


READ = make_frame("vfs_read")


def write(path, times, start, frame=READ):
    groups = (
        (
            {"process.pid": pid, "process.executable.name": name, "host.name": "web-1"},
            [WindowSample(Stack.from_frames([frame]), pid, name, 0, None, its_times)],
        )
        for pid, (name, its_times) in enumerate(times.items(), 7)
    )
    return write_otlp(path, make_window(start, start + 3 * SECOND, *groups, period_ns=10**7))


@pytest.fixture
def profile(tmp_path):
    times = {"nginx": [START + at * SECOND for at in range(3)], "dd": [START + SECOND]}
    return write(tmp_path / "profile.otlp", times, START)


def test_view_and_the_html_report_show_the_same_profile(profile, tmp_path):
    with view("--no-browser", profile) as (command, address):
        shown = get(address).decode()
        data = page.unpacked(json.loads(get(address, "profile.json")))
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 0
        assert command.stderr.read() == b""
    assert '{"source":"profile.json","files":"source.json"}' in shown
    out = tmp_path / "x.html"
    report = [sys.executable, "-m", "otel_kprofiler", "report", profile, "-o", str(out)]
    subprocess.run(report, check=True, timeout=60)
    assert data | {"title": ""} == page.data(out.read_text()) | {"title": ""}
    assert data["title"] == "profile.otlp · web-1"


def test_view_accepts_the_same_filters_as_report(profile):
    with view("--process", "nginx", "--from", "1s", profile) as (_, address):
        data = page.unpacked(json.loads(get(address, "profile.json")))
    assert sum(data["samples"]["count"]) == 2
    assert "dd" not in data["strings"]


def source(address, path):
    query = urllib.parse.urlencode({"file": path})
    try:
        return json.loads(get(address, f"source.json?{query}"))["text"]
    except urllib.error.HTTPError as error:
        return json.loads(error.read())["error"]


@pytest.fixture
def app(tmp_path):
    path = tmp_path / "app.py"
    path.write_text("import this\n")
    frame = Frame(None, 0, (Line("main", "", str(path), 1, 1),), 0, PYTHON_SIDE)
    now = time.time_ns()
    return path, write(tmp_path / "app.otlp", {"python3": [now]}, now - SECOND, frame)


def test_source_files_of_frames_are_shown(app):
    path, profile = app
    with view("--no-browser", profile) as (_, address):
        assert source(address, path) == "import this\n"
        refused = "no frame in this profile refers to this source file"
        assert source(address, __file__) == refused
        assert source(address, "") == refused


def test_source_files_for_received_frames_are_shown(app):
    path, profile = app
    with listen("--no-browser") as (command, address):
        assert source(address, path) == "no frame in this profile refers to this source file"
        send(command, profile)
        assert source(address, path) == "import this\n"
        assert source(address, __file__) == "no frame in this profile refers to this source file"


def listen(*words):
    return view("--listen", "127.0.0.1:0", "--listen-http", "127.0.0.1:0", *words)


def read_addresses(command):
    """Returns the receiver addresses that the command has printed."""
    said = [command.stderr.readline().decode() for _ in range(2)]
    grpc, http = (re.fullmatch(r"receiving .* at (127\S+)\n", line)[1] for line in said)
    return f"grpc://{grpc}", f"http://{http}"


def send(command, profile):
    for address in read_addresses(command):
        sending = [*VIEW[:-1], "send", profile, address]
        subprocess.run(sending, check=True, capture_output=True, timeout=60)


@pytest.fixture
def recent(tmp_path):
    now = time.time_ns()
    return write(tmp_path / "now.otlp", {"nginx": [now - SECOND], "dd": [now]}, now - SECOND)


def test_received_samples_are_shown_and_counted(recent, tmp_path):
    with listen("--no-browser") as (command, address):
        send(command, recent)
        data = page.unpacked(json.loads(get(address, "profile.json?last=60")))
        assert sum(data["samples"]["count"]) == 2
        assert data["title"] == "view · web-1"
        part = page.unpacked(json.loads(get(address, "profile.json?resource=host.name%3Dother")))
        assert part["samples"]["count"] == []
        command.send_signal(signal.SIGTERM)
        assert command.wait(20) == 128 + 15
        assert command.stderr.read().decode() == (
            "received 4 requests: 2 samples kept, 0 too old, 2 repeated; 0 requests rejected\n"
        )


@pytest.mark.long
def test_memory_used_by_hostile_requests_is_released(recent):
    """Requests that repeat a 4-kB header by its one-byte index (RFC 7541) fragment memory."""
    with listen() as (command, address):
        port = int(read_addresses(command)[0].rpartition(":")[2])
        before = read_resident_bytes(command.pid)
        for _ in range(12):
            with contextlib.ExitStack() as stack:
                clients = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                    for _ in range(4)
                ]
                for client in clients:
                    client.sendall(http2.PREFACE + http2.repeated_headers(200))
                    client.shutdown(socket.SHUT_WR)
                for client in clients:
                    while client.recv(1 << 16):
                        pass
        wait_until(lambda: read_resident_bytes(command.pid) <= before + (150 << 20))
        assert get(address, "profile.json")


def test_filters_select_which_received_samples_to_keep(recent):
    with listen("--process", "nginx") as (command, address):
        send(command, recent)
        data = page.unpacked(json.loads(get(address, "profile.json")))
    assert sum(data["samples"]["count"]) == 1
    assert "dd" not in data["strings"]


@pytest.mark.long
def test_a_named_store_shows_samples_from_earlier_runs(recent, tmp_path):
    store = str(tmp_path / "x.db")
    for is_first in (True, False):
        with listen("--store", store) as (command, address):
            if is_first:
                send(command, recent)
            data = page.unpacked(json.loads(get(address, "profile.json")))
            command.send_signal(signal.SIGINT)
            assert command.wait(20) == 0
        assert sum(data["samples"]["count"]) == 2


def test_a_temporary_store_is_removed_when_view_exits(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with listen() as (command, _):
        assert len(os.listdir(tmp_path)) == 1
        command.send_signal(signal.SIGTERM)
        command.wait(20)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "pass SOURCEs, --live or --listen"),
        (["x.otlp", "--listen", "127.0.0.1:0"], "pass SOURCEs, --live or --listen"),
        (["--listen", "4317"], "not an address such as"),
        (["--listen", ":4317"], "not an address such as"),
        (["--listen", "127.0.0.1:70000"], "not an address such as"),
        (["--listen", "127.0.0.1:0", "--from", "5s"], "require a SOURCE"),
        (["--listen", "127.0.0.1:0", "--live"], "pass SOURCEs, --live"),
        (["--listen", "127.0.0.1:0", "--rate", "9"], "--rate has no effect with --listen"),
        (["x.otlp", "--no-python"], "--python has no effect with SOURCEs"),
        (["x.otlp", "--keep", "1h"], "--keep has no effect with SOURCEs"),
    ],
)
def test_contradictory_options_are_usage_errors(words, problem):
    done = subprocess.run([*VIEW, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert problem in done.stderr


def test_listening_on_a_non_loopback_address_prints_a_warning():
    assert list(describe_endpoint("gRPC", "127.0.0.1", 7)) == [
        "receiving OTLP profiles over gRPC at 127.0.0.1:7"
    ]
    for host in ("0.0.0.0", "[::]", "192.0.2.1", "web.example"):
        _, warning = describe_endpoint("gRPC", host, 7)
        assert warning == f"other hosts that can reach {host}:7 can also send profiles"


@pytest.mark.parametrize(
    ("number", "status"), [("SIGINT", 0), ("SIGTERM", 128 + 15), *further(("SIGHUP", 128 + 1))]
)
def test_view_exits_on_signals_with_the_usual_status(profile, number, status):
    with view(profile) as (command, _):
        command.send_signal(getattr(signal, number))
        assert command.wait(20) == status
        assert command.stderr.read() == b""


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"processes": ("nobody",)}, "no sample matches --process nobody"),
        ({"start": Moment(60.0)}, "no sample is in the time range of --from and --to"),
    ],
)
def test_filters_that_match_no_sample_are_errors(profile, filters, message):
    every = {**asdict(Filter()), "start": None, "end": None, "sides": (), **filters}
    with pytest.raises(KProfilerError, match=message):
        open_saved([profile], every, idle=False)


def test_view_reports_the_same_errors_as_report(tmp_path):
    (tmp_path / "directory").mkdir()
    for path in ("missing.otlp", "directory"):
        command = "view", path
        said = [
            subprocess.run(
                [*VIEW[:-1], name, path], cwd=tmp_path, capture_output=True, text=True, timeout=60
            )
            for name in ("view", "report")
        ]
        assert said[0].returncode == said[1].returncode != 0, command
        assert said[0].stderr.replace("view", "report") == said[1].stderr


@pytest.mark.parametrize(
    ("environ", "user", "expected"),
    [
        ({"DISPLAY": ":0"}, 1000, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, 1000, True),
        ({"DISPLAY": ":0"}, 0, False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "x"}, 1000, False),
        ({}, 1000, False),
    ],
)
def test_a_browser_opens_only_for_a_user_with_a_display(monkeypatch, environ, user, expected):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert has_browser(environ) is expected
