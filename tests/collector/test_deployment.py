"""The shipped unit, configurations and wheel work unchanged.

Without systemd, the unit's command runs in separate mount and network namespaces, where its paths
exist and its ports are free. setpriv applies the unit's user and capabilities. Only systemd-analyze
checks the rest of the sandbox. User 65534 stands in for the dynamic user.

``KPROFILER_DEPLOY_SECONDS=300`` runs the agent for five minutes instead of five seconds.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.agent_account import parse_account
from tests.collector.units import (
    ROOT,
    UNIT,
    as_the_unit_says,
    capability_mask,
    count_timestamps,
    parse_unit,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("KPROFILER_DEPLOY_SECONDS", "5"))
GATE = "--feature-gates=service.profilesSupport"
NOBODY = "65534"
TOOLS = ("unshare", "nsenter", "setpriv", "ip")
PROFILES = '"otelcol.signal": "profiles"'
"""A field in the log lines of the Collector's debug exporter."""


class Namespaces:
    """Mount and network namespaces in which the unit's paths and the default ports are free."""

    def __init__(self, directory):
        etc = directory / "etc"
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
        (etc / "otel-kprofiler").mkdir()
        shutil.copy(ROOT / "config/agent.yaml", etc / "otel-kprofiler/agent.yaml")
        (directory / "opt/otel-kprofiler").mkdir(parents=True)
        (directory / "work").mkdir()
        script = (
            "ip link set lo up && mount -t overlay -o lowerdir=/opt,"
            f"upperdir={directory}/opt,workdir={directory}/work overlay /opt"
            f" && mount --bind {etc} /etc && echo ready && exec sleep infinity"
        )
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout.readline() == "ready\n"

    def command(self, *words, online=False):
        spaces = ["-m"] if online else ["-m", "-n"]
        return ["nsenter", "-t", str(self._holder.pid), *spaces, "--", *map(str, words)]

    def close(self):
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory, sampling_host):
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"needs root and {', '.join(TOOLS)} to make namespaces")
    namespaces = Namespaces(tmp_path_factory.mktemp("namespaces"))
    yield namespaces
    namespaces.close()


@pytest.fixture(scope="module")
def installed(namespaces, tmp_path_factory):
    wheels = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, ROOT], check=True)
    (wheel,) = wheels.glob("*.whl")
    python = "/opt/otel-kprofiler/bin/python"
    for words in (
        ["/usr/bin/python3", "-m", "venv", "/opt/otel-kprofiler"],
        [python, "-m", "pip", "-q", "install", wheel],
    ):
        subprocess.run(namespaces.command(*words, online=True), check=True)
    return namespaces


@pytest.fixture
def run_collector(namespaces, collector_program, tmp_path):
    started = []

    def start(name):
        log = tmp_path / "collector.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                namespaces.command(
                    collector_program, "--config", ROOT / "config/collector" / name, GATE
                ),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OTELCOL_DATA": str(tmp_path)},
            )
        started.append(process)
        deadline = time.monotonic() + 120
        while "Everything is ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        return process, log

    yield start
    for process in started:
        process.kill()
        process.wait()


def busy(seconds):
    loop = f"timeout {seconds} sh -c 'while cat /proc/stat; do :; done' > /dev/null"
    subprocess.run(loop, shell=True)


def run_unit(namespaces, seconds, is_sampling):
    """Runs the unit's command as its user, for ``seconds`` after its first profile.

    Returns the final counts, the log, and the fields of /proc/PID/status.
    """
    settings = parse_unit(UNIT.read_text())
    (start,) = settings["ExecStart"]
    agent = subprocess.Popen(
        namespaces.command(*as_the_unit_says(settings, NOBODY), *start.split()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        deadline = time.monotonic() + 60
        while not is_sampling():
            assert agent.poll() is None, agent.stderr.read()
            assert time.monotonic() < deadline
            busy(0.5)
        busy(seconds)
        with open(f"/proc/{agent.pid}/status") as file:
            status = {line.partition(":")[0]: line.partition(":")[2].strip() for line in file}
        agent.send_signal(signal.SIGTERM)
        out, log = agent.communicate(timeout=60)
    finally:
        agent.kill()
    assert agent.returncode == 0, log
    return parse_account(out), log, status


@pytest.mark.long
def test_the_installed_wheel_delivers_all_samples_as_the_units_user(
    installed, run_collector, tmp_path
):
    collector, _ = run_collector("file.yaml")
    file = tmp_path / "profiles.jsonl"

    def has_content():
        return file.exists() and file.stat().st_size > 0

    account, log, status = run_unit(installed, SECONDS, has_content)
    collector.send_signal(signal.SIGTERM)
    collector.wait(120)
    assert status["Uid"].split()[1] == NOBODY
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapBnd"], 16) == capability_mask()  # dropped after startup
    assert int(status["CapEff"], 16) & ~int(status["CapBnd"], 16) == 0
    assert account["gaps"] == []
    exported = account["exporters"]["otlp_grpc"]["exported"]
    # Other tests run services that profile themselves, and may delay the agent.
    assert account["lost"].keys() <= {"self_profiled", "ring_full"}
    assert exported + sum(account["lost"].values()) == account["taken"] > SECONDS * 5
    assert count_timestamps(file) == exported
    profiles = file.read_text()
    assert '"vmlinux"' in profiles
    assert "do_syscall_64" in profiles, "names of kernel functions"
    assert "kprofiler.sample.taken" in (tmp_path / "metrics.jsonl").read_text()
    assert '"level": "error"' not in log
    sys.stdout.write(f"{SECONDS:.0f} s: {account}\n")
    assert "otel_kprofiler.export" not in log


@pytest.mark.long
def test_the_agents_profiles_appear_in_the_collectors_output(installed, run_collector):
    _, collector_log = run_collector("debug.yaml")
    account, _, _ = run_unit(installed, 4, lambda: PROFILES in collector_log.read_text())
    assert account["gaps"] == []
    shown = collector_log.read_text()
    assert PROFILES in shown
    assert '"otelcol.signal": "metrics"' in shown


@pytest.mark.long
def test_systemd_accepts_the_unit(installed):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    done = subprocess.run(
        installed.command("systemd-analyze", "verify", UNIT), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=30", UNIT],
        capture_output=True, text=True,
    )  # fmt: skip
    assert rated.returncode == 0, rated.stdout[-500:]
