"""Provides a Python installation that contains this package and that all users can run.

Other users, and root without capabilities, cannot enter a home directory, where the clone, its
virtual environment or its pyenv interpreter may be located. If a test runs code as one of these
users, the inaccessible directory is copied.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import site
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
TWO = ("bpf", "perfmon")
"""Capabilities sufficient for sampling."""
_IMPORTS = "import otel_kprofiler.cli.record, tests.truth.python.nobody"
_LEFT_OUT = shutil.ignore_patterns("test", "site-packages", "config-*")


class PublicPython(NamedTuple):
    """An interpreter, and its package directories: dependencies, then the checkout."""

    command: str
    paths: tuple[str, ...]

    @property
    def words(self) -> tuple[str, str]:
        """The command, with the option that keeps the working directory off the import path."""
        return self.command, "-P"

    @property
    def root(self) -> str:
        return self.paths[-1]


def as_nobody(*capabilities: str) -> list[str]:
    """Returns a command prefix for running a program as an unprivileged user with capabilities."""
    sets = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    return [*NOBODY, f"--inh-caps={sets}", f"--ambient-caps={sets}"]


_copies: list[str] = []


@contextlib.contextmanager
def open_directory(mode: int = 0o755) -> Iterator[Path]:
    """Creates a directory that all users may enter, unlike pytest's directories."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, mode)
        yield Path(name)


@functools.cache
def get_public_python() -> PublicPython:
    """Returns the running Python or, for root, a copy if other users cannot run it."""
    if os.geteuid() != 0 or can_run(sys.executable, "-c", _IMPORTS):
        return PublicPython(sys.executable, (*site.getsitepackages(), str(ROOT)))
    _copies.append(tempfile.mkdtemp(dir="/tmp"))
    return copy_environment(Path(_copies[-1]))


def remove_copies() -> None:
    get_public_python.cache_clear()
    while _copies:
        shutil.rmtree(_copies.pop())


def can_run(*command: object) -> bool:
    """Returns whether an unprivileged user can run a command.

    setpriv drops privileges only on executing a program, so it runs env, which runs the command.
    """
    return subprocess.run([*NOBODY, "env", *command], cwd="/", capture_output=True).returncode == 0


def publish_interpreter(command: Path, directory: Path) -> Path:
    """Returns an interpreter that any user can run: ``command``, or a copy in ``directory``.

    A copy finds its standard library relative to its path, and a shared ``libpython`` through
    DT_RUNPATH (System V ABI), which is rewritten in the copy.
    """
    if can_run(command, "-c", "import ssl"):
        return command
    program = command.resolve()
    home, name = program.parents[1], program.name  # such as python3.12
    copy = directory / "bin" / name
    (directory / "lib").mkdir(parents=True)
    copy.parent.mkdir()
    shutil.copytree(home / "lib" / name, directory / "lib" / name, symlinks=True, ignore=_LEFT_OUT)
    for library in (home / "lib").glob(f"lib{name}.so*"):
        shutil.copy(library, directory / "lib", follow_symlinks=False)
    before, after = (os.fsencode(f"{at}/lib") + b"\0" for at in (home, directory))
    code = program.read_bytes()
    if before in code:
        assert len(after) <= len(before), f"no room for {directory} in {program}"
        code = code.replace(before, after.ljust(len(before), b"\0"))
    copy.write_bytes(code)
    copy.chmod(0o755)
    _open_to_all(directory)
    assert can_run(copy, "-c", "import ssl"), f"a copy of {program} does not run"
    return copy


def copy_environment(directory: Path) -> PublicPython:
    """Creates a virtual environment with the package's dependencies and a copy of the checkout."""
    base = publish_interpreter(Path(sys._base_executable), directory / "python")
    subprocess.run([base, "-m", "venv", "--without-pip", directory / "venv"], check=True)
    command = directory / "venv/bin/python"
    ask = "import site; print(site.getsitepackages()[0])"
    packages = Path(subprocess.check_output([command, "-c", ask], text=True).strip())
    needed: dict[str, importlib.metadata.Distribution] = {}
    for name in ("otel-kprofiler", "cffi", "symbolic", "zstandard"):  # package and extras for tests
        _dependencies(name, needed)
    for distribution in needed.values():
        for file in distribution.files or ():
            if ".." not in file.parts and file.locate().exists():
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), packages / file)
    checkout = directory / "checkout"
    for name in ("otel_kprofiler", "tests"):
        shutil.copytree(ROOT / name, checkout / name)
    for path in packages.glob("*.pth"):  # from the editable install
        path.unlink()
    (packages / "checkout.pth").write_text(f"{checkout}\n")
    _open_to_all(directory)
    assert can_run(command, "-c", _IMPORTS), "a copy of the environment does not run"
    return PublicPython(str(command), (str(packages), str(checkout)))


def _dependencies(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Adds a distribution and, recursively, its requirements, except requirements for extras."""
    if name not in found:
        # a requirement for another platform
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.distribution(name)
            for required in found[name].requires or ():
                if "extra ==" not in required:
                    match = re.match(r"[\w.-]+", required)
                    assert match
                    _dependencies(match[0], found)


def _open_to_all(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode | 0o444 | (0o111 if path.is_dir() or mode & 0o100 else 0))
