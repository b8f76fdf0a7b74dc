"""Command-line tools from the Go module proxy, built once per version and kept in the cache."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cache import cache_directory


def build_tool(name, module):
    """Path of a tool, built now if the cache has it not.

    Args:
        name: of the program in the cache, before the version.
        module: its package with ``@vVERSION``, as ``go install`` takes it.
    """
    program = cache_directory() / f"{name}-{module.rpartition('@')[2]}"
    if program.exists():
        return program
    if not shutil.which("go"):
        pytest.skip(f"needs the go command to build {name}, or {program}")
    program.parent.mkdir(parents=True, exist_ok=True)
    # One build at a time, also between test runs: each takes all CPUs for minutes.
    with open(program.parent / "otelcol.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        with tempfile.TemporaryDirectory(dir=program.parent) as directory:
            done = subprocess.run(
                ["go", "install", module],
                env={**os.environ, "GOBIN": directory},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                pytest.fail(f"building {name} failed:\n{done.stdout[-3000:]}")
            (built,) = Path(directory).iterdir()
            os.rename(built, program)
    return program
