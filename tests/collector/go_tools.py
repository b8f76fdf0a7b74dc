"""Builds and caches Go programs for tests: the Collector, published tools and local programs."""

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
"""The timeout for a test that may have to build a program first, in seconds."""


def build_tool(name, version, package, tags=""):
    """Returns the path of a tool, building it unless cached. Build tags are separated by commas."""

    def build(directory, program):
        Path(directory, "go.mod").write_text("module tool\n\ngo 1.26.0\n")
        yield ["go", "get", "-tool", f"{package}@{version}"]
        yield ["go", "build", "-tags", tags, "-o", program, package]

    return build_once(f"{name}-{version}", build)


def build_program(sources):
    texts = b"".join(path.read_bytes() for path in sorted(sources.iterdir()))
    digest = hashlib.sha256(texts).hexdigest()[:12]

    def build(_, program):
        yield ["go", "build", "-C", sources, "-o", program, "."]

    return build_once(f"{sources.name}-{digest}", build)


def build_once(name, build):
    """Runs the commands in ``build`` unless the program is cached, and returns its path."""
    program = cache_directory() / name
    if program.exists():
        return program
    if not shutil.which("go"):
        pytest.skip(f"needs the go command to build it, or {program}")
    program.parent.mkdir(parents=True, exist_ok=True)
    # Only one build at a time, even across test runs, since a build uses all CPUs for minutes.
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
