"""Tests the Debian package with systemd as PID 1 in systemd-nspawn: ``make test-packages``.

Covers what test_debian_package.py cannot test without systemd: maintainer scripts that start and
stop the agent, the unit's full sandbox, notifications and reload.
"""

import os
import shutil
import subprocess

import pytest

from tests.collector.debian import build_twice, dependencies
from tests.collector.roots import make_archive
from tests.collector.units import capability_mask, unit_capabilities
from tests.needs import PACKAGES

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500), PACKAGES]

TOOLS = ("dpkg-deb", "mmdebstrap", "strip", "systemd-nspawn")
NAME = "otel-kprofiler"
PID = f"$(systemctl show -P MainPID {NAME})"
CONFIG = f"/etc/{NAME}/agent.yaml"
BATCH = f"find /var/lib/{NAME}/spool -name '*.spool' -size +1k"
RELOADED = f"for try in $(seq 300); do systemctl is-active {NAME} | grep -x active && break"
STEPS = {
    "install": f"dpkg -i /root/1.deb >> /root/log 2>&1; systemctl is-active {NAME}",
    "not enabled": f"systemctl is-enabled {NAME}",
    "first start": f"systemctl enable --now {NAME} 2>> /root/log; systemctl is-active {NAME}",
    "enabled": f"systemctl is-enabled {NAME}",
    "status": f"systemctl show -P StatusText {NAME}",
    "user": f"stat -c %U /proc/{PID}",
    "capabilities": f"sed -n 's/^CapBnd:.//p' /proc/{PID}/status",
    "first": f"echo {PID}",
    "waits": f"for try in $(seq 300); do {BATCH} | grep . && break; sleep 0.5; done | wc -l",
    "reload": f"systemctl reload {NAME} && {RELOADED}; sleep 0.5; done",
    "lines": f"sed -i 's/  kprofiler:$/  kprofiler: {{user_symbols: lines}}/' {CONFIG}",
    "upgrade": f"dpkg -i /root/2.deb >> /root/log 2>&1; systemctl is-active {NAME}",
    "second": f"echo {PID}",
    "still waits": f"{BATCH} | wc -l",
    "cache": f"stat -c %U /var/cache/{NAME}",
    "stop": f"systemctl disable --now {NAME} 2>> /root/log; systemctl show -P Result {NAME}",
    "errors": f'journalctl -o cat -u {NAME} | grep -c \'"level": "error"\'',
    "disabled": f"dpkg -i /root/2.deb >> /root/log 2>&1; systemctl is-active {NAME}",
    "start": f"systemctl enable --now {NAME} 2>> /root/log; systemctl is-active {NAME}",
    "purge": f"dpkg -P {NAME} >> /root/log 2>&1; systemctl show -P LoadState {NAME}",
    "left": f"ls -d /var/*/{NAME} /etc/{NAME} 2> /dev/null; getent passwd {NAME}",
}


@pytest.fixture
def machine(tmp_path, sampling_host):
    """Creates a root directory with a system that boots, runs the steps and powers off."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"needs root and {', '.join(TOOLS)}")
    packages = build_twice(tmp_path)
    needed = ("systemd", "systemd-sysv", "dbus", *dependencies(packages[0]))
    path = tmp_path / f"kprofiler-{os.getpid()}"
    path.mkdir()
    archive = make_archive("essential", *needed)
    subprocess.run(["tar", "-C", path, "-xf", archive, "--exclude=./dev/*"], check=True)
    for number, package in enumerate(packages, 1):
        shutil.move(package, path / f"root/{number}.deb")
    script = [f'echo "{name}=$({command})" >> /root/results' for name, command in STEPS.items()]
    (path / "root/steps").write_text("\n".join([*script, "systemctl poweroff"]))
    units = path / "etc/systemd/system"
    (units / "steps.service").write_text(
        "[Unit]\nAfter=multi-user.target\n[Service]\nType=oneshot\nExecStart=/bin/sh /root/steps\n"
    )
    wanted = units / "multi-user.target.wants"
    wanted.mkdir(exist_ok=True)
    (wanted / "steps.service").symlink_to("../steps.service")
    yield path
    shutil.rmtree(path)


def test_the_package_runs_under_systemd(machine):
    booted = subprocess.run(
        [
            *("systemd-nspawn", "--quiet", "--directory", machine, "--boot", "--register=no"),
            *("--keep-unit", "--private-network", "--console=pipe"),
            f"--capability={','.join(unit_capabilities())}",
            "--system-call-filter=bpf perf_event_open",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    results = machine / "root/results"
    assert results.exists(), booted.stdout
    collected = dict(line.split("=", 1) for line in results.read_text().splitlines() if "=" in line)
    log = (machine / "root/log").read_text()
    assert collected.pop("first") != collected.pop("second"), log
    assert int(collected.pop("still waits")) >= int(collected.pop("waits")) > 0
    assert collected == {
        "install": "inactive",
        "not enabled": "disabled",
        "first start": "active",
        "enabled": "enabled",
        "status": "sampling",
        "user": NAME,
        "capabilities": f"{capability_mask():016x}",
        "reload": "active",
        "lines": "",
        "upgrade": "active",
        "cache": NAME,
        "stop": "success",
        "errors": "0",
        "disabled": "inactive",
        "start": "active",
        "purge": "not-found",
        "left": "",
    }, log
