"""Go programs that tests run: tools from the Go module proxy, and small ones from these sources.

Each is built once, and kept in the cache.
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


def build_tool(name, version, package, tags=""):
    """Path of a tool of some version.

    Args:
        name: of the program in the cache, before the version.
        version: of its module, with ``v``.
        package: of its ``main``.
        tags: of the build, separated by commas.
    """

    def build(directory, program):
        Path(directory, "go.mod").write_text("module tool\n\ngo 1.26.0\n")
        yield ["go", "get", "-tool", f"{package}@{version}"]
        yield ["go", "build", "-tags", tags, "-o", program, package]

    return _cached(f"{name}-{version}", build)


def build_program(sources):
    """Path of the program of a directory."""
    texts = b"".join(path.read_bytes() for path in sorted(sources.iterdir()))
    digest = hashlib.sha256(texts).hexdigest()[:12]

    def build(_, program):
        yield ["go", "build", "-C", sources, "-o", program, "."]

    return _cached(f"{sources.name}-{digest}", build)


def _cached(name, build):
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
                )
                if done.returncode:
                    pytest.fail(f"building {name} failed:\n{done.stdout[-3000:]}")
            os.rename(built, program)
    return program
