"""Builds Debian packages from this checkout, and reads their fields."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.collector.units import ROOT


def build(directory):
    done = subprocess.run(
        [ROOT / "config/debian/build.sh", directory],
        env={**os.environ, "COMPRESSION": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        pytest.fail(f"building the package failed:\n{done.stdout[-3000:]}")
    return Path(done.stdout.splitlines()[-1])


def build_twice(directory):
    first = build(directory)
    tree = directory / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", first, tree], check=True)
    control = tree / "DEBIAN/control"
    version = read_field(first, "Version")
    later = version.replace("-1", "-2")
    control.write_text(control.read_text().replace(version, later))
    second = directory / first.name.replace(version, later)
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, second],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    shutil.rmtree(tree)
    return first, second


def read_field(package, name):
    return subprocess.check_output(["dpkg-deb", "-f", package, name], text=True).strip()


def dependencies(package):
    return read_field(package, "Depends").replace(" ", "").split(",")
