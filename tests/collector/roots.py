"""Builds Debian root file systems once from this system's mirror, and runs commands in them."""

import fcntl
import hashlib
import os
import platform
import subprocess

import pytest

from tests.cache import cache_directory

ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


UBUNTU = "deb [trusted=yes] http://archive.ubuntu.com/ubuntu noble main universe"
"""Ubuntu's package source; marked trusted because Debian does not package Ubuntu's keys."""


def make_archive(variant, *packages, release=""):
    """Returns a cached tar file of a root directory for a release, by default this host's release.

    ``variant`` is mmdebstrap's: ``essential``, or ``minbase``, which includes apt.
    """
    codename = release or platform.freedesktop_os_release()["VERSION_CODENAME"]
    sources = [UBUNTU] if codename == "noble" else []
    digest = hashlib.sha256(f"{codename} {variant} {packages}".encode()).hexdigest()[:12]
    archive = cache_directory() / f"root-{codename}-{platform.machine()}-{digest}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with open(archive.parent / "root.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            part = archive.with_suffix(".part.tar")
            included = [f"--include={','.join(packages)}"] if packages else []
            words = ["--mode=root", f"--variant={variant}", *included, codename, part, *sources]
            done = subprocess.run(
                ["mmdebstrap", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=900,
            )
            if done.returncode:
                pytest.skip(f"mmdebstrap cannot create a root of {codename}: {done.stdout[-500:]}")
            part.rename(archive)
    return archive


def find_certificates():
    """Returns the CA file that pip is configured to trust, for example for a mirror, or None."""
    asked = subprocess.run(
        ["/usr/bin/python3", "-m", "pip", "config", "get", "global.cert"],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )
    return os.environ.get("PIP_CERT") or asked.stdout.strip() or None


class Root:
    """A root directory with /dev, /proc and /sys, by default in its own network namespace."""

    def __init__(self, path, read_only=False, own_network=True):
        self.path = path
        self._shares = ["-m", "-n"] if own_network else ["-m"]
        steps = ["ip link set lo up"] if own_network else []
        if read_only:
            steps += [f"mount --bind {path} {path}", f"mount -o remount,bind,ro {path}"]
        steps += [f"mount --rbind /{name} {path}/{name}" for name in ("dev", "proc", "sys")]
        script = " && ".join([*steps, "echo ready", "exec sleep infinity"])
        unshare = ["unshare", "--mount", *(["--net"] if own_network else [])]
        self._holder = subprocess.Popen(
            [*unshare, "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout.readline() == "ready\n"

    def beside(self, *words):
        """Returns the command line that runs a host command in this root's network namespace."""
        return ["nsenter", "-t", str(self._holder.pid), "-n", "--", *map(str, words)]

    def command(self, *words):
        enter = ["nsenter", "-t", str(self._holder.pid), *self._shares, "--", "chroot", self.path]
        return [*map(str, enter), *map(str, words)]

    def run(self, *words):
        """Runs a command in this root, without the test's environment, and returns its output."""
        done = subprocess.run(
            self.command(*words),
            env=ENVIRON,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{words}:\n{done.stdout}"
        return done.stdout

    def close(self):
        self._holder.kill()
        self._holder.communicate()
