"""Runs a systemd unit without systemd."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from otel_kprofiler.host.capabilities import CAPABILITIES
from tests.agents import Agent
from tests.processes import LoggedProcess

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "config/systemd/otel-kprofiler.service"


def unit_capabilities():
    return parse_unit(UNIT.read_text())["AmbientCapabilities"][0].split()


def capability_mask():
    """Returns the unit's capability mask, in the format of /proc/PID/status."""
    return sum(1 << CAPABILITIES[name] for name in unit_capabilities())


def parse_unit(text):
    """Parses a unit file, and returns a list of values for each setting."""
    settings = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def as_the_unit_says(settings, dynamic=None):
    """Returns a setpriv command with the unit's capabilities and user (``dynamic`` if given)."""
    if dynamic is None:
        (user,), (group,) = settings["User"], settings["Group"]
    else:
        assert settings["DynamicUser"] == ["yes"]
        user = group = dynamic
    assert settings["AmbientCapabilities"] == settings["CapabilityBoundingSet"]
    names = settings["AmbientCapabilities"][0].split()
    sets = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in names)])
    return [
        *("setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"),
        *(f"--bounding-set={sets}", f"--inh-caps={sets}", f"--ambient-caps={sets}"),
    ]


class UnitProcess(LoggedProcess):
    """An agent process that is started with the command of a systemd unit."""

    def __init__(self, command, log, **options):
        super().__init__(command, log, stdout=subprocess.PIPE, **options)

    __exit__ = Agent.__exit__
    stop = Agent.stop

    def status(self):
        """Returns the fields in /proc/PID/status."""
        with open(f"/proc/{self.pid}/status") as file:
            return {line.partition(":")[0]: line.partition(":")[2].strip() for line in file}


def assert_systemd_accepts(unit, command=lambda *words: words):
    """Verifies a unit and rates its security with ``systemd-analyze``, run by ``command``."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    done = subprocess.run(
        command("systemd-analyze", "verify", unit), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    rate = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", unit]
    rated = subprocess.run(rate, capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout[-500:]


def count_timestamps(path):
    """Returns the number of samples in a Collector's file."""
    return sum(
        len(sample["timestampsUnixNano"])
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceProfiles"]
        for scope in resource["scopeProfiles"]
        for profile in scope["profiles"]
        for sample in profile["samples"]
    )
