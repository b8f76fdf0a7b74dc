"""Reads source lines and inlined functions with drgn, in a child process.

Unlike symbolic, drgn reads split DWARF (``.dwo``, ``.dwp``) and alternate debug files (``dwz``).
"""

import importlib.util
import json
import os
import select
import subprocess
import threading
import time
from contextlib import ExitStack
from typing import IO, Final, NamedTuple, cast

from otel_kprofiler.elf import FileSource
from otel_kprofiler.errors import DependencyError, describe_error
from otel_kprofiler.host import child_command, grant_memory, limit_memory
from otel_kprofiler.model import Line
from otel_kprofiler.symbols.user import drgn_worker
from otel_kprofiler.symbols.user.demangle import demangle
from otel_kprofiler.symbols.user.drgn_worker import Task
from otel_kprofiler.symbols.user.lines_error import LinesError, LinesProblem

_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_FAILURES: Final = 3


class WorkerLimits(NamedTuple):
    """Limits on a worker process. Times are in seconds.

    Attributes:
        memory_bytes: limit on the data segment; reduced to half of the cgroup's available memory if
            that is less.
        open_s: time limit for opening the file.
        answer_s: time limit for looking up one address.
        idle_s: idle time after which the worker exits. The next request restarts the worker.
    """

    memory_bytes: int = 4 << 30
    open_s: float = 60.0
    answer_s: float = 10.0
    idle_s: float = 30.0


DEFAULT_LIMITS: Final = WorkerLimits()


class DrgnLines:
    """Source lines and inlined functions in a file. Thread-safe, but lookups are serialized.

    A lookup usually takes 0.3 ms, but may take seconds, so sampling threads must not perform
    lookups. Replaces a worker that takes too long or exits. After three worker failures, lookups
    return nothing. Inlined functions are named as in the source, without namespaces or parameters.
    Reads split DWARF from the paths recorded in the file, on this host.

    Args:
        source: the file, or its debug file.
        alternate: the alternate debug file named in the file's ``.gnu_debugaltlink`` section.

    Raises:
        DependencyError: drgn is not installed.
        LinesError: the file has no readable DWARF.
    """

    def __init__(
        self,
        source: FileSource,
        path: str,
        *,
        alternate: FileSource | None = None,
        limits: WorkerLimits = DEFAULT_LIMITS,
    ) -> None:
        if importlib.util.find_spec("drgn") is None:
            raise DependencyError(
                "reading these source lines requires drgn, which is not installed",
                hint="pip install 'otel-kprofiler[drgn]'",
            )
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._failures = 0
        self._limits = limits
        self._fds = [os.dup(source.fd), os.dup(alternate.fd) if alternate else -1]
        fd, other = self._fds
        self._task = Task(limits.idle_s, fd, other, path)
        try:
            self._worker = _Worker(self._task, limits)
        except BaseException:
            self.close()
            raise

    def lookup(self, svma: int) -> tuple[Line, ...]:
        """Returns the functions at an address, innermost inlined first; empty if unknown."""
        with self._lock:
            while self._fds and self._failures < _MAX_FAILURES:
                try:
                    if self._worker is None or self._worker.has_ended():
                        self._end()
                        self._worker = _Worker(self._task, self._limits)
                    return self._worker.ask(svma)
                except LinesError:
                    self._failures += 1
                    self._end()
            return ()

    @property
    def nbytes(self) -> int:
        """Returns 0, because the line table is in the worker process."""
        return 0

    def close(self) -> None:
        """Stop the worker and close the file; idempotent."""
        with self._lock:
            self._end()
            for fd in self._fds:
                if fd >= 0:
                    os.close(fd)
            self._fds = []

    def __del__(self) -> None:
        if hasattr(self, "_task"):
            self.close()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _Worker:
    def __init__(self, task: Task, limits: WorkerLimits) -> None:
        self._limits = limits
        grant = grant_memory(limits.memory_bytes)
        try:
            self._child = subprocess.Popen(
                child_command(drgn_worker.__name__, json.dumps(task)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[fd for fd in (task.fd, task.alternate) if fd >= 0],
                bufsize=0,
                process_group=0,  # Ctrl-C at a terminal does not end it
            )
        except OSError as error:
            text = f"no process could be started: {describe_error(error)}"
            raise LinesError(text, LinesProblem.NO_PROCESS) from error
        self._held = ExitStack()
        self._held.enter_context(limit_memory(self._child.pid, grant))
        try:
            cause = self._read(limits.open_s)
        except BaseException:
            self.end()
            raise
        if cause:
            self.end()
            raise LinesError(f"the DWARF data cannot be read: {cause}")

    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def ask(self, svma: int) -> tuple[Line, ...]:
        """Returns the lines at an address. Raises ``LinesError`` if the worker fails."""
        try:
            cast("IO[bytes]", self._child.stdin).write(b"%x\n" % svma)
            return parse_answer(self._read(self._limits.answer_s))
        except (OSError, ValueError) as error:
            raise LinesError(
                f"the child process that reads source lines failed: {describe_error(error)}"
            ) from error

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        self._held.close()
        for pipe in (self._child.stdin, self._child.stdout):
            cast("IO[bytes]", pipe).close()

    def _read(self, seconds: float) -> str:
        pipe = cast("IO[bytes]", self._child.stdout)
        deadline = time.monotonic() + seconds
        content = b""
        ready = select.poll()  # select(2) does not support descriptors above 1023
        ready.register(pipe, select.POLLIN)
        while not content.endswith(b"\n"):
            # Poll even after the deadline: a response may have arrived while this thread waited for
            # a CPU.
            left = max(0.0, deadline - time.monotonic())
            if not ready.poll(left * 1000):
                text = f"the child process that reads source lines took over {seconds:g} s"
                raise LinesError(text, LinesProblem.TIME)
            part = os.read(pipe.fileno(), 1 << 16)
            if not part or len(content) > _MAX_ANSWER_BYTES:
                raise LinesError("the child process that reads source lines has exited")
            content += part
        return content[:-1].decode("utf-8", "replace")


def parse_answer(text: str) -> tuple[Line, ...]:
    """Parses a worker's response, which is untrusted. Raises ``ValueError`` if it is malformed."""
    try:
        return tuple(
            _make_line(str(function), str(file), int(line))
            for function, file, line in json.loads(text)
        )
    except (TypeError, RecursionError) as error:
        raise ValueError(error) from error


def _make_line(function: str, file: str, line: int) -> Line:
    readable = demangle(function)
    return Line(readable, function if readable != function else "", file, line)
