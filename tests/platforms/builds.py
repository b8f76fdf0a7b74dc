"""Builds free-threaded and musl interpreters, which no registry provides, from Debian's sources."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.cache import cache_directory

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # for the ``harness`` package
from harness.archive import Archive, call, open_release
from harness.errors import MatrixError

_RELEASE = "trixie"
_HEADERS = ("linux", "asm-generic", "x86_64-linux-gnu/asm")
"""Kernel header directories in /usr/include, which musl-gcc does not search."""
_COMPILER = """#!/bin/sh
case "$*" in *-print-multiarch*) exit 0;; esac  # the name for glibc, which configure would reject
exec musl-gcc -idirafter "$(dirname "$0")/include" "$@"
"""


class Build(NamedTuple):
    """An interpreter to build. ``options`` are passed to ``configure``."""

    name: str
    command: str
    options: tuple[str, ...] = ()
    is_musl: bool = False


FREE_THREADED = Build("free-threaded-3.13", "python3.13t", ("--disable-gil",))
MUSL = Build("musl-3.13", "python3.13", is_musl=True)
_SOURCE = "python3.13"


def get(build: Build) -> Path:
    """Returns the path of an interpreter, building it unless cached; raises MatrixError."""
    root = cache_directory() / "pythons" / build.name
    if not root.exists():
        if build.is_musl and not shutil.which("musl-gcc"):
            raise MatrixError("needs musl-gcc", "run: apt-get install musl-tools")
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            _build(build, Path(folder), root)
    return root / "bin" / build.command


def _build(build: Build, folder: Path, root: Path) -> None:
    archive = open_release(_RELEASE, cache_directory() / f"apt-{_RELEASE}-src", with_sources=True)
    tree = _unpack(archive, _SOURCE, folder)
    variables = dict(os.environ)
    if build.is_musl:
        variables |= {"CC": str(_make_compiler(folder)), "PKG_CONFIG": "false"}
    options = [f"--prefix={root}", "--without-ensurepip", "--disable-test-modules", *build.options]
    call([str(tree / "configure"), "-q", *options], cwd=tree, env=variables)
    call(["make", "-s", f"-j{os.cpu_count()}"], cwd=tree, env=variables)
    staged = folder / "staged"
    install = ["altbininstall", "libinstall", "sharedinstall"]
    call(["make", "-s", f"DESTDIR={staged}", *install], cwd=tree, env=variables)
    (staged / root.relative_to("/")).rename(root)


def _unpack(archive: Archive, package: str, folder: Path) -> Path:
    place = folder / package
    place.mkdir()
    archive.download_source(package, place)
    (tarball,) = place.glob("*.orig.tar.?z")
    call(["tar", "-x", "-f", tarball.name], cwd=place)
    (tree,) = (each for each in place.iterdir() if each.is_dir())
    return tree


def _make_compiler(folder: Path) -> Path:
    """Writes a musl-gcc wrapper that finds kernel headers, and returns the wrapper's path."""
    place = folder / "musl"
    (place / "include").mkdir(parents=True)
    for name in _HEADERS:
        (place / "include" / Path(name).name).symlink_to(Path("/usr/include", name))
    compiler = place / "cc"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    return compiler
