"""The ``view --live`` page shows what is running on this host."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from samplers import spawned

from tests import page
from tests.commands import COMMAND
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sampling_host")]

VIEW = [*COMMAND, "view", "--no-browser", "--live"]


@pytest.fixture
def busy(tmp_path):
    program = tmp_path / "busy.py"
    program.write_text("def burn_cpu_time():\n    while True:\n        pass\nburn_cpu_time()\n")
    with spawned(sys.executable, program) as process:
        yield process


@contextlib.contextmanager
def view(*words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with spawned(*VIEW, *words, **pipes) as command:
        yield command, re.search(r"http://\S+", command.stdout.readline())[0]


def wait_for(address, is_there):
    def find():
        with urllib.request.urlopen(f"{address}profile.json", timeout=20) as answer:
            data = page.unpacked(json.load(answer))
        return data if is_there(data) else None

    return wait_until(find)


@pytest.mark.long
def test_view_shows_the_running_host(busy):
    with view() as (command, address):
        data = wait_for(
            address, lambda data: any("burn_cpu_time" in text for text in data["strings"])
        )
        assert busy.pid in data["processes"]["pid"]
        assert data["live"] is True
        assert data["title"] == f"view · {os.uname().nodename}"
        before = sum(data["samples"]["count"])
        wait_for(address, lambda data: sum(data["samples"]["count"]) > before)
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 0
        said = re.fullmatch(r"received ([\d,]+) samples, lost 0\n", command.stderr.read())
        assert int(said[1].replace(",", "")) > before


def test_filters_select_the_sampled_processes_and_stacks(busy):
    with view("--process", str(busy.pid), "--stacks", "user", "-F", "199") as (_, address):
        data = wait_for(address, lambda data: data["samples"]["count"])
    assert data["processes"]["pid"] == [busy.pid]
    assert data["kinds"][0]["period_ns"] == 10**9 // 199
