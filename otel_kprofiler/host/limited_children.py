"""Runs child processes that read a file, with limits on memory, CPU time and wall time."""

import enum
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.errors import describe_error, describe_status
from otel_kprofiler.host.child_cpu import CpuGrant, MeteredChild, has_exceeded_cpu, limit_cpu
from otel_kprofiler.host.child_memory import MemoryGrant, grant_memory, limit_memory
from otel_kprofiler.host.patient_children import DeviceHangs, PatientChildren
from otel_kprofiler.host.served_child import ServedChild

DONE: Final = b"\x04"
"""Last byte (EOT) that a successful child writes to standard error. Scripts that cannot import this
module contain a copy of the value."""
_SHOWN: Final = 200
_MOST_IDLE: Final = 2
"""Maximum number of idle children, which use 6 MB each. A child serves files of one owner only, and
a container's root can create files of many owners."""
_OUT_OF_MEMORY: Final = (-signal.SIGABRT, -signal.SIGKILL)
"""Return codes after a failed allocation (SIGABRT) and after a kill by the OOM killer (SIGKILL)."""
_NO_STATUS: Final = (
    "ended early; its status is unknown, since this process ignores SIGCHLD or reaps all children"
)


class ChildProblem(enum.Enum):
    """The reason why a child produced no result."""

    UNANSWERED = "unanswered"  # the file system does not respond
    STOPPED = "stopped"
    NO_PROCESS = "no_process"
    MEMORY = "memory"
    CPU_TIME = "cpu_time"
    TIME = "time"
    FAILED = "failed"


_RETRIED: Final = (ChildProblem.FAILED, ChildProblem.MEMORY, ChildProblem.NO_PROCESS)
"""Problems that may be caused by files that the child read earlier."""


class ChildFailed(Exception):  # noqa: N818 - an outcome
    """Raised if a child process produced no result.

    Args:
        text: what happened, as a predicate without a subject.
        may_pass: whether a retry with the unchanged file may succeed.
    """

    def __init__(
        self,
        problem: ChildProblem,
        text: str,
        grant: MemoryGrant | None = None,
        *,
        may_pass: bool = True,
    ) -> None:
        super().__init__(text)
        self.problem = problem
        self.grant = grant
        self.may_pass = may_pass


class ChildLimits(NamedTuple):
    """Resource limits of a child process.

    Attributes:
        memory_bytes: requested limit on the child's data; see :func:`grant_memory`.
        wall_s: wall time after which the child is killed.
        least_bytes: memory limit below which the child is not started.
    """

    memory_bytes: int
    cpu: CpuGrant
    wall_s: float
    least_bytes: int = 0


class LimitedChildren:
    """Runs children until :meth:`stop` is called. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[MeteredChild] = set()
        self._idle: list[ServedChild] = []
        self._stopped = False
        self._patient = PatientChildren()

    def run(
        self, command: Sequence[str], fd: int, limits: ChildLimits, output: int = subprocess.PIPE
    ) -> bytes:
        """Run a command with a file as its input, wait for it, and return its standard output.

        The command reports the cause of a failure on standard error, and exits with
        ``os.EX_TEMPFAIL`` if the cause is temporary. If the kernel does not keep the exit status,
        ``DONE`` on standard error means success. If ``output`` is a descriptor, standard output is
        redirected to it. Raises ``ChildFailed``.
        """

        def start() -> MeteredChild:
            return MeteredChild(command, stdin=fd, stdout=output, stderr=subprocess.PIPE, cwd="/")

        return self._wait(start, fd, limits)

    def serve(
        self, command: Sequence[str], words: Sequence[str], fd: int, limits: ChildLimits
    ) -> bytes:
        """Pass a file to a :class:`ServedChild` and return the child's reply.

        A child reads one file at a time, and only files that have the same owner. If a child that
        has already read other files fails, or runs out of memory, a new child reads the file.
        Raises ``ChildFailed``.
        """
        owner = os.fstat(fd).st_uid
        child: ServedChild | None = None
        may_reuse = True

        def start() -> ServedChild:
            nonlocal child
            idle = self._take_idle(command, owner) if may_reuse else None
            child = idle or ServedChild(command, owner)
            child.prepare(words, fd)
            return child

        try:
            return self._wait(start, fd, limits)
        except ChildFailed as error:
            if child is None or not child.earlier_cpu_s or error.problem not in _RETRIED:
                raise
        may_reuse = False
        return self._wait(start, fd, limits)

    def _wait(self, start: Callable[[], MeteredChild], fd: int, limits: ChildLimits) -> bytes:
        device = os.fstat(fd).st_dev
        try:
            self._patient.check(device)
            child, grant = self._start(start, limits)
            try:
                limit_cpu(child.pid, limits.cpu, child.earlier_cpu_s)
                with limit_memory(child.pid, grant, is_final=not child.serves_files):
                    child.begin()
                    made, errors = self._patient.wait(child, device, limits.wall_s)
            finally:
                self._put(child)
        except DeviceHangs as error:
            raise ChildFailed(ChildProblem.UNANSWERED, str(error)) from error
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(ChildProblem.TIME, f"took over {limits.wall_s:g} s") from error
        if not child.returncode and (child.has_status or errors.endswith(DONE)):
            return made
        if has_exceeded_cpu(child.returncode):
            raise ChildFailed(ChildProblem.CPU_TIME, limits.cpu.describe(), may_pass=False)
        cause = errors.removesuffix(DONE)[-_SHOWN:].decode("utf-8", "replace").strip()
        is_memory = child.returncode in _OUT_OF_MEMORY or "MemoryError" in cause
        problem = ChildProblem.MEMORY if is_memory else ChildProblem.FAILED
        text = cause or (describe_status(child.returncode) if child.returncode else _NO_STATUS)
        is_short = is_memory and grant.cgroup is not None
        may_pass = is_short or child.returncode in (0, os.EX_TEMPFAIL, -signal.SIGKILL)
        raise ChildFailed(problem, text, grant, may_pass=may_pass)

    def _start(
        self, start: Callable[[], MeteredChild], limits: ChildLimits
    ) -> tuple[MeteredChild, MemoryGrant]:
        with self._lock:
            if self._stopped:
                raise ChildFailed(ChildProblem.STOPPED, "the profiler is stopping")
            grant = grant_memory(limits.memory_bytes)
            if grant.count_bytes < limits.least_bytes:
                raise ChildFailed(ChildProblem.MEMORY, "there is too little memory", grant)
            try:
                child = start()
            except OSError as error:
                text = f"no process could be started: {describe_error(error)}"
                raise ChildFailed(ChildProblem.NO_PROCESS, text) from error
            self._running.add(child)
            return child, grant

    def _take_idle(self, command: Sequence[str], owner: int) -> ServedChild | None:
        for child in [c for c in self._idle if (c.command, c.owner) == (command, owner)]:
            self._idle.remove(child)
            if child.poll() is None:
                return child
            child.end()
        return None

    def _put(self, child: MeteredChild) -> None:
        """Marks a child as no longer running, and keeps it if it can read more files."""
        with self._lock:
            self._running.discard(child)
            if isinstance(child, ServedChild) and child.is_idle:
                if self._stopped:
                    child.end()
                else:
                    self._idle.append(child)
                    if len(self._idle) > _MOST_IDLE:
                        self._idle.pop(0).end()

    def end_idle(self, after_s: float = 0.0) -> float | None:
        """End children that have been idle for ``after_s`` seconds.

        Returns the seconds until the next idle child is due to be ended; None if no child is idle.
        """
        with self._lock:
            now_s = time.monotonic()
            due = [child for child in self._idle if now_s >= child.idle_since_s + after_s]
            for child in due:
                self._idle.remove(child)
                child.end()
            next_s = min((child.idle_since_s for child in self._idle), default=None)
            return None if next_s is None else next_s + after_s - now_s

    def stop(self) -> None:
        """Kill running children, and reject new ones."""
        with self._lock:
            self._stopped = True
            for child in self._running:
                child.kill()
        self.end_idle()
