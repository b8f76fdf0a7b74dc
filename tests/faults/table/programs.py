"""Other users' programs that run alongside an agent and end with the scenario."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from tests.public import NOBODY

HERE = Path(__file__).parent
PYTHON = "/usr/bin/python3"
_BUILDING = threading.Lock()  # concurrent scenarios use the same program


@functools.cache
def _build_directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="kprofiler-faults-", dir="/tmp"))
    path.chmod(0o755)
    return path


def build(source: str, *options: str) -> Path:
    """Compiles C source, or a C file in this directory, and returns the path of the program."""
    with _BUILDING:
        return _build(source, *options)


@functools.cache
def _build(source: str, *options: str) -> Path:
    if source.endswith(".c"):
        source = (HERE / source).read_text()
    name = hashlib.sha256(repr((source, options)).encode()).hexdigest()[:12]
    target = _build_directory() / name
    target.with_suffix(".c").write_text(source)
    subprocess.run(
        ["cc", "-O1", "-pthread", "-o", target, target.with_suffix(".c"), *options], check=True
    )
    return target


class Programs:
    def __init__(self, directory: Path):
        self.public = directory / "public"
        self.public.mkdir()
        self.public.chmod(0o777)
        self._programs, self._at_close = [], []

    def on_close(self, undo) -> None:
        """Registers a function to call after the agent has exited."""
        self._at_close.append(undo)

    def start(self, *words, root=False, **options) -> subprocess.Popen:
        """Starts a program in the public directory, as user nobody, or as root if requested."""
        before = () if root else NOBODY
        settings = {
            "cwd": self.public, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL, "start_new_session": True, **options,
        }  # fmt: skip
        self._programs.append(subprocess.Popen([*before, *map(str, words)], **settings))
        return self._programs[-1]

    def python(self, code: str, *words, **options) -> subprocess.Popen:
        return self.start(PYTHON, "-c", code, *words, **options)

    def c(self, source: str, *words, **options) -> subprocess.Popen:
        return self.start(build(source), *words, **options)

    def end_programs(self) -> None:
        for program in self._programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        self._programs.clear()
