"""Finds all CPython interpreters on this machine, for tests that read them."""

import contextlib
import functools
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from otel_kprofiler.bpf import ProcessSeen
from tests import fetch_pythons

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
_PLACES = ("/usr/bin", "/usr/local/bin", "~/.pyenv/versions/*/bin", "/opt/pythons/bin")
_ASK = "import sys; print('%d.%d.%d' % sys.version_info[:3], sys.implementation.name)"


class Python(NamedTuple):
    """An interpreter: its command, and its version such as 3.12.1."""

    command: Path
    version: str

    @property
    def minor(self):
        return self.version.rpartition(".")[0]

    def run(self, *arguments, **options):
        return subprocess.run(
            [self.command, *arguments], capture_output=True, text=True, env=environment(), **options
        )


def environment():
    """Returns an environment with this checkout added to ``PYTHONPATH``."""
    path = ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@functools.cache
def find_pythons():
    """Returns the supported interpreters, including those at the paths in ``KPROFILER_PYTHONS``."""
    fetched = map(str, map(fetch_pythons.directory, fetch_pythons.VERSIONS))
    places = [*os.environ.get("KPROFILER_PYTHONS", "").split(":"), *_PLACES, *fetched]
    results = {}
    for place in filter(None, places):
        for directory in Path("/").glob(str(Path(place).expanduser()).lstrip("/")):
            for version in VERSIONS:
                command = directory / f"python{version}"
                if command.exists():
                    asked = subprocess.run([command, "-c", _ASK], capture_output=True, text=True)
                    release, _, name = asked.stdout.strip().partition(" ")
                    if name == "cpython":
                        results.setdefault((release, command.resolve()), Python(command, release))
    return sorted(results.values(), key=lambda item: item.version)


def find_missing():
    minors = {python.minor for python in find_pythons()}
    return [version for version in VERSIONS if version not in minors]


def require_pythons(minor):
    """Returns the interpreters for a version such as 3.12, or skips the test if there are none."""
    import pytest

    pythons = [python for python in find_pythons() if python.minor == minor]
    return pythons or pytest.skip(f"no CPython {minor} here")


class Journal:
    """A registry of processes that logs each registration.

    Attributes:
        now: the layout and addresses of each currently registered process, by tgid.
        all: the process, layout, addresses and image of each registration, in order.
        seen: the sampled processes that :meth:`take_seen` has not yet returned.
    """

    def __init__(self, room=1000, registry=None):
        self.now = {}
        self.all = []
        self.seen = []
        self.passed_over = []
        self._room = room
        self._registry = registry  # None, or the registry of a real BPF program

    def register(self, tgid, layout, process, image=0):
        if len(self.now) >= self._room:
            return False
        if self._registry:
            assert self._registry.register(tgid, layout, process, image)
        self.now[tgid] = layout, process
        self.all.append((tgid, layout, process, image))
        return True

    def pass_over(self, program):
        if self._registry:
            self._registry.pass_over(program)
        self.passed_over.append(program)

    def release(self, tgid):
        if self._registry:
            self._registry.release(tgid)
        return self.now.pop(tgid, None) is not None

    def see(self, tgid, image=1):
        self.seen.append(ProcessSeen(tgid, image))
        os.eventfd_write(self._event, 1)

    def take_seen(self):
        if self._registry:
            return self._registry.take_seen()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        seen, self.seen = self.seen, []
        return seen

    def fileno(self):
        return self._registry.fileno() if self._registry else self._event

    @functools.cached_property
    def _event(self):
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
