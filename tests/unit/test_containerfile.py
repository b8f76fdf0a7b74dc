"""The image's build step strips libraries, but not the package's, which are for two machines."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packages import SOURCES

pytestmark = pytest.mark.system

CONTAINERFILE = SOURCES.parent / "config" / "kubernetes" / "Containerfile"


def test_stripping_leaves_the_packages_libraries_unchanged(tmp_path):
    if not shutil.which("strip"):
        pytest.skip("needs strip, which the package binutils contains")
    command = re.search(r"find \S+ (.*-exec strip.*)", CONTAINERFILE.read_text())
    libraries = {path: path.read_bytes() for path in SOURCES.rglob("*.so")}
    assert {path.name.rpartition("_")[2] for path in libraries} >= {"aarch64.abi3.so"}
    for path in libraries:
        copy = tmp_path / "lib" / path.relative_to(SOURCES.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    other = tmp_path / "lib" / "other.so"
    shutil.copy(next(Path("/usr/lib").rglob("libpthread.so*")).resolve(), other)
    subprocess.run(f"find {tmp_path} {command[1]}", shell=True, check=True)
    for path, content in libraries.items():
        assert (tmp_path / "lib" / path.relative_to(SOURCES.parent)).read_bytes() == content
