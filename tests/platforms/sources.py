"""The interpreters to test: those installed here and those available from package registries."""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import fetch_pythons
from tests.cache import cache_directory
from tests.interpreters import Python, find_pythons

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # for the ``harness`` package
from harness.archive import open_release
from harness.errors import MatrixError

from tests.platforms.builds import FREE_THREADED, MUSL, Build, get

_NOWHERE = (
    "not in the registries that the tests reach: Debian's packages and sources, PyPI, npm, "
    "Go's module proxy"
)
_MAIN_ONLY = (
    "only frames of the main interpreter: these versions do not record which thread runs a "
    "subinterpreter; threads without such frames are counted as `no_thread`"
)
_NO_APK = (
    "not run, because the registries that the tests reach have no Alpine packages. All "
    "dependencies have wheels for musl; the eBPF programs need Alpine's package `libbpf`"
)
_ASK = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


PYTHON = "/usr/bin/python3"
"""The interpreter used to build an application. PyInstaller requires a shared libpython."""


class Source(NamedTuple):
    """An interpreter that might not be installed on this machine.

    Attributes:
        package: the name of the Debian package; empty for an interpreter from a Go module.
        release: the Debian release that contains the package.
        command: the name of the program; for a Go module, the minor version.
        build: how to build the interpreter, if no registry provides it.
    """

    origin: str
    package: str
    release: str
    command: str
    build: Build | None = None


SOURCES = (
    Source("python-build-standalone, as uv installs it", "", "", "3.11"),
    Source("python-build-standalone, as uv installs it", "", "", "3.14"),
    Source("Debian sid", "python3.13", "sid", "python3.13"),
    Source("Debian sid", "python3.14", "sid", "python3.14"),
    Source("Debian sid", "python3.15", "sid", "python3.15"),
    Source("free-threaded, from source", "", "", "", FREE_THREADED),
    Source("from source", "", "", "", MUSL),
    Source("Debian 12, debug build", "python3.11-dbg", "bookworm", "python3.11d"),
    Source("Debian sid, debug build", "python3.14-dbg", "sid", "python3.14d"),
)
NOT_HERE = (
    ("glibc", "CPython 3.12 and 3.13, python-build-standalone", _NOWHERE),
    ("glibc", "CPython 3.11 and 3.12, subinterpreters", _MAIN_ONLY),
    ("glibc", "CPython 3.14t, free-threaded", _NOWHERE),
    ("glibc", "CPython of conda", _NOWHERE),
    ("musl", "CPython of Alpine", _NOWHERE),
    ("musl", "the agent itself, on Alpine", _NO_APK),
)
"""Untested and unsupported platforms: C library, name, and reason."""
_PYINSTALLER = "pyinstaller==6.22.3"
_TRUTH = Path(__file__).parents[1] / "truth" / "python"


def find_all() -> Iterator[tuple[Python, str]]:
    """Yields every interpreter that is installed here or can be fetched, with its origin."""
    for python in find_pythons():
        at = str(python.command)
        origin = "pyenv" if ".pyenv" in at else "Debian" if at.startswith("/usr/bin") else ""
        if origin:  # all other interpreters are in ``SOURCES``
            yield python, origin
    for source in SOURCES:
        try:
            command = _fetch(source)
        except (OSError, subprocess.CalledProcessError, MatrixError) as error:
            print(f"{source.package or source.command or source.origin}: {error}", flush=True)
            continue
        version = subprocess.run([command, "-c", _ASK], check=True, capture_output=True, text=True)
        yield Python(command, version.stdout.strip()), source.origin


def freeze(folder: Path) -> Path:
    """Builds a one-file application from the truth target's program with PyInstaller.

    Raises:
        OSError, CalledProcessError: PyInstaller cannot be installed or run with this Python.
    """
    environment = folder / "environment"
    subprocess.run([PYTHON, "-m", "venv", str(environment)], check=True)
    programs = environment / "bin"
    subprocess.run([programs / "pip", "install", "-q", _PYINSTALLER], check=True)
    command = [programs / "pyinstaller", "--onefile", "--strip", "--log-level=ERROR", "--name=app"]
    command += [f"--paths={_TRUTH}", _TRUTH / "program.py"]
    subprocess.run(command, check=True, cwd=folder)
    return folder / "dist/app"


def _fetch(source: Source) -> Path:
    if source.build:
        return get(source.build)
    if not source.package:
        if not shutil.which("go"):
            raise MatrixError("needs the go command")
        fetch_pythons.fetch(source.command)
        return fetch_pythons.directory(source.command) / f"python{source.command}"
    root = cache_directory() / "pythons" / f"{source.release}-{source.package}"
    if not root.exists():
        part = root.with_name(f"part-{root.name}")
        shutil.rmtree(part, ignore_errors=True)
        archive = open_release(source.release, cache_directory() / f"apt-{source.release}")
        archive.unpack([source.package], part)
        part.rename(root)
        _relocate(root, root / "usr/bin" / source.command)
    return root / "usr/bin" / source.command


def _relocate(root: Path, command: Path) -> None:
    """Patches a program to load its own release's C library; the host's library may be older."""
    if not shutil.which("patchelf"):
        raise MatrixError("needs patchelf", "run: apt-get install patchelf")
    libraries = root / "usr/lib/x86_64-linux-gnu"
    options = ["--set-interpreter", str(root / "usr/lib64/ld-linux-x86-64.so.2")]
    options += ["--force-rpath", "--set-rpath", str(libraries)]
    subprocess.run(["patchelf", *options, str(command)], check=True)
