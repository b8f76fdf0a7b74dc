"""Fetches interpreters that Debian does not package: python-build-standalone, from a Go module.

``python -m tests.fetch_pythons`` prints the interpreters' directories. The interpreters are
downloaded from the Go module proxy, for machines that cannot reach any other download site. The go
command verifies checksums.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cache import cache_directory

MODULE = "github.com/kluctl/go-embed-python"
VERSIONS = {"3.14": "v0.0.0-3.14.6-20260610-1"}
FURTHER = {"3.11": "v0.0.0-3.11.11-20241219-1"}
"""The versions that only ``make test-platforms`` fetches."""


def directory(minor: str) -> Path:
    return cache_directory() / "pythons" / (VERSIONS | FURTHER)[minor] / "bin"


def fetch(minor: str) -> None:
    """Downloads a version unless it is cached. Raises ``OSError`` or ``CalledProcessError``."""
    target = directory(minor).parent
    if target.exists():
        return
    asked = ["go", "mod", "download", "-json", f"{MODULE}@{(VERSIONS | FURTHER)[minor]}"]
    answer = subprocess.run(asked, cwd="/", check=True, stdout=subprocess.PIPE)
    data = Path(json.loads(answer.stdout)["Dir"], "python/internal/data/linux-amd64")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as part:
        for file in json.loads((data / "files.json").read_text())["files"]:
            unpack(file, data, Path(part, "root"))
        os.rename(Path(part, "root"), target)


def unpack(file: dict[str, str | int], data: Path, root: Path) -> None:
    """Unpacks an entry in the module's file list. Directories precede their contents."""
    path, mode = root / str(file["name"]), int(file["perm"])
    if mode >> 31 & 1:  # Go's os.ModeDir
        path.mkdir(parents=True)
    elif "symlink" in file:
        path.symlink_to(str(file["symlink"]))
    elif file.get("compressed"):
        with gzip.open(data / f"{file['name']}.gz") as packed, open(path, "wb") as out:
            shutil.copyfileobj(packed, out)
        path.chmod(stat.S_IMODE(mode))
    else:
        shutil.copyfile(data / str(file["name"]), path)
        path.chmod(stat.S_IMODE(mode))


if __name__ == "__main__":
    if not shutil.which("go"):
        sys.exit("fetching interpreters needs the go command")
    for each in VERSIONS:
        fetch(each)
        print(directory(each))
