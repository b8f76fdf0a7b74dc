"""Go programs that tests run: the Collector, tools from the module proxy, and small local programs.

Each is built once and cached.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cache import cache_directory

BUILD_SECONDS = 1500
"""Limit of a test that may have to build a program first."""


def build_tool(name, version, package, tags=""):
    """Path of a tool at a version.

    Args:
        name: name of the program in the cache, without the version.
        version: version of its module, with ``v``.
        package: package of its ``main``.
        tags: build tags, separated by commas.
    """

    def build(directory, program):
        Path(directory, "go.mod").write_text("module tool\n\ngo 1.26.0\n")
        yield ["go", "get", "-tool", f"{package}@{version}"]
        yield ["go", "build", "-tags", tags, "-o", program, package]

    return build_once(f"{name}-{version}", build)


def build_program(sources):
    """Builds the program in a directory; returns its path."""
    texts = b"".join(path.read_bytes() for path in sorted(sources.iterdir()))
    digest = hashlib.sha256(texts).hexdigest()[:12]

    def build(_, program):
        yield ["go", "build", "-C", sources, "-o", program, "."]

    return build_once(f"{sources.name}-{digest}", build)


def build_once(name, build):
    """Path of a program in the cache; builds it if it is missing.

    Args:
        name: name of the program in the cache.
        build: yields the commands that build it, for an empty directory and the program in it.
    """
    program = cache_directory() / name
    if program.exists():
        return program
    if not shutil.which("go"):
        pytest.skip(f"needs the go command to build it, or {program}")
    program.parent.mkdir(parents=True, exist_ok=True)
    # One build at a time, also between test runs: each takes all CPUs for minutes.
    with open(program.parent / "otelcol.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        with tempfile.TemporaryDirectory(dir=program.parent) as directory:
            built = Path(directory, "built")
            for command in build(directory, built):
                done = subprocess.run(
                    command,
                    cwd=directory,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=BUILD_SECONDS - 60,
                )
                if done.returncode:
                    pytest.fail(f"building {name} failed:\n{done.stdout[-3000:]}")
            os.rename(built, program)
    return program
