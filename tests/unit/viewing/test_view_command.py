"""The command `view` on files of profiles."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from otel_kprofiler.cli.view import has_browser
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import encode_window
from tests import page

SECOND = 10**9
START = 1_600_000_000 * SECOND
VIEW = [sys.executable, "-m", "otel_kprofiler", "view"]
VMLINUX = Module("vmlinux", ModuleKind.VMLINUX, None, FileId("cd" * 16), 0)


@contextlib.contextmanager
def view(*words):
    """A running command, and the address of its page."""
    command = subprocess.Popen([*VIEW, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with command:
        try:
            line = command.stdout.readline().decode()
            found = re.search(r"http://\S+", line)
            assert found, (line, command.stderr.read())
            yield command, found[0]
        finally:
            command.kill()


def get(address, path=""):
    with urllib.request.urlopen(address + path, timeout=20) as answer:
        return answer.read()


@pytest.fixture
def profile(tmp_path):
    """Three samples of nginx and one of dd, a second apart."""
    frame = Frame(VMLINUX, 1, (Line("vfs_read"),), 0, KERNEL_SIDE)
    groups = [
        ResourceSamples(
            Resource({"process.pid": pid, "process.executable.name": name, "host.name": "web-1"}),
            [WindowSample(Stack.from_frames([frame]), pid, name, 0, None, times)],
        )
        for pid, name, times in (
            (7, "nginx", [START, START + SECOND, START + 2 * SECOND]),
            (8, "dd", [START + SECOND]),
        )
    ]
    path = tmp_path / "profile.otlp"
    window = Window(START, START + 3 * SECOND, [Profile(ON_CPU, 10**7, groups)])
    path.write_bytes(encode_window(window).batches[0].payload)
    return str(path)


def test_a_file_is_shown_as_its_html_shows_it(profile, tmp_path):
    with view("--no-browser", profile) as (command, address):
        shown = get(address).decode()
        data = page.unpacked(json.loads(get(address, "profile.json")))
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 0
        assert command.stderr.read() == b""
    assert '{"source":"profile.json"}' in shown
    out = tmp_path / "x.html"
    report = [sys.executable, "-m", "otel_kprofiler", "report", profile, "-o", str(out)]
    subprocess.run(report, check=True, timeout=60)
    assert data | {"title": ""} == page.data(out.read_text()) | {"title": ""}
    assert data["title"] == "profile.otlp · web-1"


def test_filters_are_those_of_report(profile):
    with view("--process", "nginx", "--from", "1s", profile) as (_, address):
        data = page.unpacked(json.loads(get(address, "profile.json")))
    assert sum(data["samples"]["count"]) == 2
    assert "dd" not in data["strings"]


@pytest.mark.parametrize(
    ("number", "status"), [("SIGINT", 0), ("SIGTERM", 128 + 15), ("SIGHUP", 128 + 1)]
)
def test_signals_end_it(profile, number, status):
    with view(profile) as (command, _):
        command.send_signal(getattr(signal, number))
        assert command.wait(20) == status
        assert command.stderr.read() == b""


def test_errors_are_those_of_report(tmp_path):
    for words in (["missing.otlp"], [str(tmp_path)], []):
        command = "view", *words
        said = [
            subprocess.run([*VIEW[:-1], name, *words], capture_output=True, text=True, timeout=60)
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
def test_a_browser_opens_only_in_front_of_the_user(monkeypatch, environ, user, expected):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert has_browser(environ) is expected
