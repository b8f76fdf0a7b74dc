"""The shipped unit, configurations and wheel work unchanged.

Without systemd, the unit's command runs in separate mount and network namespaces, where its paths
exist and its ports are free. setpriv applies the unit's user and capabilities. The unit's other
sandbox settings are checked only by systemd-analyze. User 65534 stands in for the dynamic user.

``KPROFILER_DEPLOY_SECONDS=300`` runs the agent for five minutes instead of five seconds.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.collector.units import (
    ROOT,
    UNIT,
    UnitProcess,
    as_the_unit_says,
    assert_systemd_accepts,
    capability_mask,
    count_timestamps,
    parse_unit,
)
from tests.processes import LoggedProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("KPROFILER_DEPLOY_SECONDS", "5"))
GATE = "--feature-gates=service.profilesSupport"
NOBODY = "65534"
TOOLS = ("unshare", "nsenter", "setpriv", "ip")
PROFILES = '"otelcol.signal": "profiles"'
"""A field in log lines from the Collector's debug exporter."""


class Namespaces:
    """Mount and network namespaces in which the unit's paths and the default ports are unused."""

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
    for words in (
        ["/usr/bin/python3", "-m", "venv", "/opt/otel-kprofiler"],
        ["/opt/otel-kprofiler/bin/python", "-m", "pip", "-q", "install", wheel],
    ):
        subprocess.run(namespaces.command(*words, online=True), check=True)
    return namespaces


@pytest.fixture
def run_collector(namespaces, collector_program, tmp_path):
    started = []

    def start(name):
        config = ROOT / "config/collector" / name
        command = namespaces.command(collector_program, "--config", config, GATE)
        environ = {"OTELCOL_DATA": str(tmp_path)}
        started.append(LoggedProcess(command, tmp_path / "collector.log", environ=environ))
        started[-1].wait_for_line("Everything is ready")
        return started[-1]

    yield start
    for process in started:
        process.kill()


def busy(seconds):
    loop = f"timeout {seconds} sh -c 'while cat /proc/stat; do :; done' > /dev/null"
    subprocess.run(loop, shell=True)


def run_unit(namespaces, directory, seconds, is_sampling):
    """Runs the unit's command as the unit's user, until ``seconds`` after the first profile.

    Returns the final counts, the log, and the fields of /proc/PID/status.
    """
    settings = parse_unit(UNIT.read_text())
    (start,) = settings["ExecStart"]
    command = namespaces.command(*as_the_unit_says(settings, NOBODY), *start.split())

    def is_busy_and_sampling():
        busy(0.5)
        return is_sampling()

    with UnitProcess(command, directory / "agent.log", cwd="/") as unit:
        unit.wait_until(is_busy_and_sampling)
        busy(seconds)
        status = unit.status()
        return unit.stop(), unit.log, status


@pytest.mark.long
def test_the_installed_wheel_delivers_all_samples_when_run_as_the_systemd_units_user(
    installed, run_collector, tmp_path
):
    collector = run_collector("file.yaml")
    file = tmp_path / "profiles.jsonl"
    account, log, status = run_unit(
        installed, tmp_path, SECONDS, lambda: file.exists() and file.stat().st_size > 0
    )
    collector.stop()
    assert status["Uid"].split()[1] == NOBODY
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapBnd"], 16) == capability_mask()  # dropped after startup
    assert int(status["CapEff"], 16) & ~int(status["CapBnd"], 16) == 0
    assert account["gaps"] == []
    exported = account["exporters"]["otlp_grpc"]["exported"]
    # Samples may be lost because other tests run self-profiling services or delay the agent.
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
def test_the_agents_profiles_appear_in_the_collectors_output(installed, run_collector, tmp_path):
    collector = run_collector("debug.yaml")
    account, _, _ = run_unit(installed, tmp_path, 4, lambda: PROFILES in collector.log)
    assert account["gaps"] == []
    assert '"otelcol.signal": "metrics"' in collector.log


@pytest.mark.long
def test_systemd_accepts_the_unit(installed):
    assert_systemd_accepts(UNIT, installed.command)
