"""The commands in docs/tutorial.md, run in order, find the source lines that the page names."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from samplers import spawned

from tests.examples import DOCS
from tests.needs import LIBBPF
from tests.waiting import wait_until

ROOT = DOCS.parent
PROGRAM = ROOT / "examples" / "slow_orders.py"
PAGE = (DOCS / "tutorial.md").read_text()
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
            for line in block.splitlines()]  # fmt: skip
RUNS, WAITS = "look_up (slow_orders.py:18)", "append (slow_orders.py:26)"
LIMIT_S = 120


@contextlib.contextmanager
def service(*options):
    with spawned(sys.executable, PROGRAM, *options, stdout=subprocess.PIPE) as process:
        assert b"ms an order" in process.stdout.readline()
        yield process.pid


def run(command, folder, pid=0):
    """Runs the page's command on a test process for a shorter time, and returns the output."""
    command = (
        command.removeprefix("sudo ")
        .replace("17201", str(pid))
        .replace("-d 10s", "-d 2s")
        .replace("-n 3", "-n 0")  # with few samples, the order varies
        .replace("-n 4", "-n 40")
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-ec", command], cwd=folder, env=os.environ | {"PATH": path},
                          capture_output=True, text=True, timeout=LIMIT_S, check=False)  # fmt: skip
    none = "no sample matches" in done.stderr  # the fixed service uses hardly any CPU time
    assert done.returncode == 0 or none, f"{command}: {done.stderr}"
    return done.stdout


def repeat(action, is_reached):
    results = []

    def act():
        results.append(action())
        return is_reached(results[-1])

    wait_until(act, LIMIT_S, lambda: results[-1])
    return results[-1]


def test_the_tutorial_names_the_services_source_lines():
    lines = PROGRAM.read_text().splitlines()
    assert "copy.deepcopy(PRICES)" in lines[17]
    assert "os.fsync(journal)" in lines[25]
    assert "Line 18" in PAGE
    assert "Line 26" in PAGE
    assert RUNS in PAGE
    assert WAITS in PAGE


@pytest.mark.long
@pytest.mark.live
@pytest.mark.timeout(6 * LIMIT_S)
@pytest.mark.skipif(os.geteuid() != 0, reason="the page records as root")
@LIBBPF
def test_the_tutorials_commands_lead_from_the_symptom_to_the_source_lines(tmp_path):
    system = subprocess.check_output(["stat", "-f", "-c", "%T", "/var/tmp"], text=True).strip()
    if system == "tmpfs":
        pytest.skip("/var/tmp is a tmpfs, where fsync(2) does not wait for a disk")
    top, record, runs, calls, waits, compare = COMMANDS

    def record_and_report(pid, record=record, file="slow.otlp"):
        (tmp_path / file).unlink(missing_ok=True)
        run(record, tmp_path, pid)
        return [
            run(command.replace("slow.otlp", file), tmp_path) for command in (runs, calls, waits)
        ]

    with service() as pid:
        repeat(lambda: run(top, tmp_path), lambda text: f"({pid})" in text)
        repeat(lambda: record_and_report(pid),
               lambda texts: RUNS in texts[0] and "fsync" in texts[1] and WAITS in texts[2],
        )  # fmt: skip
    with service("--mended") as pid:
        mended = record.replace("slow.otlp", "mended.otlp")
        texts = repeat(lambda: record_and_report(pid, mended, "mended.otlp"),
                       lambda texts: "on_cpu: " in texts[0] and "all waits: " in texts[1],
        )  # fmt: skip
    assert "deepcopy" not in texts[0]  # one sample may remain on line 18, which reads a price
    assert "fsync" not in texts[1]
    assert WAITS not in texts[2]
    assert "deepcopy" in run(compare, tmp_path)
