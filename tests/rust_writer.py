"""A Rust program, built with cargo, that publishes its spans through ``libdd-otel-thread-ctx``."""

import os
import shutil
import subprocess

import pytest

from tests.cache import cache_directory
from tests.thread_contexts import SOURCES

CRATE = SOURCES / "rust"


def build(directory):
    """Builds the crate's programs and library in a directory. Caches the crates."""
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo")
    target = cache_directory() / "rust-writer"
    environ = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    words = ["--locked", "--manifest-path", CRATE / "Cargo.toml"]
    fetched = _run(["cargo", "fetch", "--offline", *words], environ)
    if fetched.returncode:
        fetched = _run(["cargo", "fetch", *words], environ)
    if fetched.returncode:
        pytest.skip(f"cannot fetch crates: {fetched.stderr.strip().splitlines()[-1]}")
    built = _run(["cargo", "build", "--release", "--offline", *words], environ)
    assert built.returncode == 0, built.stderr
    for name in ("program", "opener", "libspans.so"):
        shutil.copy(target / "release" / name, directory / name)


def _run(words, environ):
    return subprocess.run(words, env=environ, capture_output=True, text=True)
