"""The Debian package on a clean Debian root: installed, run, upgraded, removed and purged.

The root contains only Debian's Essential packages and the package's declared dependencies. The root
is built once by mmdebstrap from this system's mirror, and cached. The root has no systemd, so
setpriv runs the unit's command with the unit's user and capabilities. Commands in the root run in a
separate network namespace, where the default ports of the agent and the Collector are free.

``KPROFILER_DEB_TWICE=1`` builds the package twice and compares the bytes.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.collector.debian import build, build_twice, dependencies, read_field
from tests.collector.roots import Root, make_archive
from tests.collector.units import (
    ROOT,
    UnitProcess,
    as_the_unit_says,
    assert_systemd_accepts,
    capability_mask,
    count_timestamps,
    parse_unit,
)
from tests.needs import PACKAGES
from tests.processes import LoggedProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500), PACKAGES]

TOOLS = ("dpkg-deb", "mmdebstrap", "unshare", "nsenter", "chroot", "ip", "strip")
GATE = "--feature-gates=service.profilesSupport"
UNIT = "usr/lib/systemd/system/otel-kprofiler.service"
CONFIG = "etc/otel-kprofiler/agent.yaml"
STATE = "var/lib/otel-kprofiler"
CACHE = "var/cache/otel-kprofiler"
ACCOUNTS = ("passwd", "group", "shadow", "gshadow")
NOT_OURS = re.compile(
    r"(dev|proc|run|sys|tmp|var/lib/dpkg|var/log|root)/|etc/(passwd|g?shadow|group)-$"
)
"""Matches files that dpkg, adduser and the kernel create but do not remove."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"needs root and {', '.join(TOOLS)}")
    directory = tmp_path_factory.mktemp("packages")
    yield build_twice(directory)
    shutil.rmtree(directory)


class CleanRoot(Root):
    """A Debian root that can list its files and fails the test if dpkg prints a warning."""

    def dpkg(self, *words):
        """Runs dpkg, and asserts that it prints no warning or error. Returns the output."""
        *options, last = words
        if os.path.exists(last):
            shutil.copy(last, self.path / "tmp/package.deb")
            last = "/tmp/package.deb"
        output = self.run("dpkg", *options, last)
        assert not re.search("warning|error|fail", output, re.IGNORECASE), output
        return output

    def list_files(self):
        """Returns type, mode, owner, and content or link target of every file, by path."""
        results = {}
        for directory, names, files in os.walk(self.path):
            for name in [*names, *files]:
                path = Path(directory, name)
                relative = str(path.relative_to(self.path))
                if NOT_OURS.match(relative):
                    continue
                about = path.lstat()
                content = ""
                if stat.S_ISLNK(about.st_mode):
                    content = os.readlink(path)
                elif stat.S_ISREG(about.st_mode) and name not in ACCOUNTS:
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
                results[relative] = (oct(about.st_mode), about.st_uid, about.st_gid, content)
            names[:] = [name for name in names if name not in ("dev", "proc", "sys")]
        for name in ACCOUNTS:
            results[f"etc/{name}"] = sorted((self.path / "etc" / name).read_text().splitlines())
        return results


@pytest.fixture
def root(packages, tmp_path, sampling_host):
    archive = make_archive("essential", *dependencies(packages[0]))
    path = tmp_path / "root"
    path.mkdir()
    subprocess.run(["tar", "-C", path, "-xf", archive, "--exclude=./dev/*"], check=True)
    root = CleanRoot(path)
    yield root
    root.close()
    shutil.rmtree(path)


class Unit(UnitProcess):
    """The installed unit, started as systemd would start it, but not sandboxed."""

    def __init__(self, root):
        settings = parse_unit((root.path / UNIT).read_text())
        environ = {"PATH": "/usr/sbin:/usr/bin"}
        for kind, parent in (("StateDirectory", "/var/lib"), ("CacheDirectory", "/var/cache")):
            (name,) = settings[kind]
            directory = f"{parent}/{name}"
            owner = [settings["User"][0], settings["Group"][0]]
            root.run("install", "-d", "-o", owner[0], "-g", owner[1], directory)
            environ[re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).upper()] = directory
        (start,) = settings["ExecStart"]
        self._busy = subprocess.Popen(["sh", "-c", "while cat /proc/stat; do :; done > /dev/null"])
        command = root.command(*as_the_unit_says(settings), *start.split())
        super().__init__(command, root.path / "tmp/agent.log", env=environ, cwd="/")

    def __exit__(self, *_):
        self._busy.kill()
        self._busy.wait()
        self.kill()


@contextlib.contextmanager
def run_collector(root, program, directory):
    config = root.path / "usr/share/doc/otel-kprofiler/examples/collector/file.yaml"
    command = root.beside(program, "--config", config, GATE)
    environ = {"OTELCOL_DATA": str(directory)}
    with LoggedProcess(command, directory / "collector.log", environ=environ):
        yield directory / "profiles.jsonl"


SEGMENT_HEAD = 1000
"""A size in bytes: larger than a spool segment without batches, smaller than any batch."""


def spooled_bytes(root):
    segments = (root.path / STATE / "spool").rglob("*.spool")
    return {str(path): path.read_bytes() for path in segments}


def test_the_package_installs_runs_upgrades_and_purges(packages, root, collector_program, tmp_path):
    first, second = packages
    before = root.list_files()

    assert "systemctl enable --now otel-kprofiler" in root.dpkg("--install", first)
    assert root.run("dpkg", "--verify", "otel-kprofiler") == ""
    version = read_field(first, "Version").rpartition("-")[0]
    assert version in (versions := root.run("otel-kprofiler", "--version"))
    assert "compiled modules" in versions
    root.run("otel-kprofiler", "validate", "-c", f"/{CONFIG}")
    completion = "/usr/share/bash-completion/completions/otel-kprofiler"
    assert "otel-kprofiler" in root.run(
        "bash", "-c", f". {completion} && complete -p otel-kprofiler"
    )
    root.run("/usr/lib/otel-kprofiler/bin/python3", "-c", "import grpc, symbolic, zstandard")
    wanted = root.path / "etc/systemd/system/multi-user.target.wants/otel-kprofiler.service"
    assert not wanted.is_symlink(), "nobody has named a receiver"
    (user,) = [
        line.split(":")
        for line in (root.path / "etc/passwd").read_text().splitlines()
        if line.startswith("otel-kprofiler:")
    ]
    assert 100 <= int(user[2]) < 1000
    assert user[5:] == ["/nonexistent", "/usr/sbin/nologin"]

    # Without a receiver, samples wait in the spool.
    with Unit(root) as unit:
        unit.wait_until(lambda: len(b"".join(spooled_bytes(root).values())) > SEGMENT_HEAD)
        status = unit.status()
        assert status["Uid"].split() == [user[2]] * 4
        assert status["NoNewPrivs"] == "1"
        assert int(status["CapBnd"], 16) == capability_mask()  # dropped after startup
        assert int(status["CapEff"], 16) & ~int(status["CapBnd"], 16) == 0
        waiting = unit.stop()
    assert waiting["taken"] > 0
    assert waiting["exporters"]["otlp_grpc"]["exported"] == 0

    # An upgrade keeps the administrator's changes and the spool.
    config = root.path / CONFIG
    config.write_text(
        config.read_text().replace("kprofiler:\n", "kprofiler: {user_symbols: lines}\n")
    )
    kept = config.read_text()
    spooled = spooled_bytes(root)
    wanted.parent.mkdir(exist_ok=True)  # as ``systemctl enable`` does
    wanted.symlink_to("/usr/lib/systemd/system/otel-kprofiler.service")
    assert "enable --now" not in root.dpkg("--install", second)
    assert wanted.is_symlink(), "an upgrade keeps it enabled"
    assert root.run("dpkg-query", "-Wf", "${Version}", "otel-kprofiler") == read_field(
        second, "Version"
    )
    assert config.read_text() == kept
    assert spooled_bytes(root) == spooled
    with run_collector(root, collector_program, tmp_path) as output, Unit(root) as unit:
        unit.wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2)
        account = unit.stop()
    assert count_timestamps(output) == waiting["taken"] + account["taken"]
    assert account["gaps"] == []
    assert '"vmlinux"' in output.read_text()
    assert '"level": "error"' not in unit.log

    # As Debian Policy requires, removal keeps configuration and state, and purging deletes them.
    root.dpkg("--remove", "otel-kprofiler")
    left = {name for name, about in root.list_files().items() if before.get(name) != about}
    left -= {f"etc/{name}" for name in ACCOUNTS}
    own = (STATE, CACHE, "etc/otel-kprofiler", "etc/systemd", "var/lib/systemd")
    assert [name for name in sorted(left) if not name.startswith(own)] == []
    assert CONFIG in left
    root.dpkg("--purge", "otel-kprofiler")
    after = root.list_files()
    assert {name: about for name, about in after.items() if before.get(name) != about} == {}
    assert before.keys() - after.keys() == set()


def test_systemd_accepts_the_installed_unit(packages, tmp_path):
    tree = tmp_path / "tree"
    subprocess.run(["dpkg-deb", "--extract", packages[0], tree], check=True)
    unit = tmp_path / "otel-kprofiler.service"
    text = (tree / UNIT).read_text()
    assert "/opt/" not in text
    # systemd-analyze checks that the unit's command exists on this system.
    unit.write_text(text.replace("/usr/bin/", f"{tree}/usr/bin/"))
    assert_systemd_accepts(unit)


def test_the_package_contains_no_trace_of_the_build_machine(packages, tmp_path):
    tree = tmp_path / "tree"
    subprocess.run(["dpkg-deb", "--extract", packages[0], tree], check=True)
    result = subprocess.run(
        ["grep", "-rlF", "-e", f"{ROOT}/", "-e", "/tmp/tmp.", tree], capture_output=True, text=True
    )
    assert result.stdout == ""
    owners = subprocess.check_output(["dpkg-deb", "--contents", packages[0]], text=True)
    assert {line.split()[1] for line in owners.splitlines()} == {"root/root"}
    files = [line for line in owners.splitlines() if not line.startswith("l")]
    assert not [line for line in files if line[3] == "s" or line[8] == "w"]
    shutil.rmtree(tree)


def test_the_package_build_is_reproducible(packages, tmp_path):
    assert build(tmp_path).read_bytes() == packages[0].read_bytes()
