"""Delays the exec of a command until sampling has started."""

import contextlib
import errno
import os
import select
import shutil
import signal
import time
from collections.abc import Sequence
from typing import Final, Self

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import Access, find_descendants, open_pidfd, read_processes, signal_pidfd
from otel_kprofiler.sampling.command_files import find_command_files

_GATE: Final = 3
# posix_spawn returns after the shell's exec, so the next exec is the command's. The sampler's event
# starts counting at this exec.
_HOLD: Final = f'read -r _ <&{_GATE} || exit 125; exec "$@" {_GATE}<&-'
_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126
"""Exit statuses that shells return for commands that cannot be run."""


class CommandError(KProfilerError):
    """Raised if the command cannot be run; contains the message and exit status that shells use."""

    def __init__(self, message: str, exit_status: int, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


class HeldCommand:
    """Starts a command that waits for :meth:`release`; use as a context manager.

    The program is looked up in ``PATH``. ``stdout`` is a descriptor for the command's standard
    output; None to inherit the standard output of this process. Raises ``CommandError`` if the
    program cannot be executed.

    Attributes:
        pid: the command's process id, for :attr:`SamplerConfig.child_pid`.
        is_ended: whether :meth:`terminate` was called while the command was running.
    """

    def __init__(self, arguments: Sequence[str], *, stdout: int | None = None) -> None:
        program = _find_program(arguments[0])
        self._program = program
        self.is_ended = False
        self._status: int | None = None
        self._ending: list[int] = []
        gate, self._gate = os.pipe()
        actions: list[tuple[int, int, int]] = [(os.POSIX_SPAWN_DUP2, gate, _GATE)]
        if stdout is not None:
            actions.append((os.POSIX_SPAWN_DUP2, stdout, 1))
        try:
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", _HOLD, "sh", program, *arguments[1:]],
                os.environ,
                file_actions=actions,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored in Python processes
            )
        except BaseException:
            os.close(self._gate)
            raise
        finally:
            os.close(gate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._gate < 0 and self.poll() is None:
            self.terminate(signal.SIGKILL)
        self.close()

    def release(self) -> None:
        """Run the command."""
        os.write(self._gate, b"\n")
        self._close_gate()

    def find_files(self) -> tuple[str, ...]:
        """Returns the files that the command will map; see :func:`find_command_files`."""
        return find_command_files(self._program)

    def poll(self) -> int | None:
        """Returns the exit status, or the negated signal number; None while the command runs."""
        return self._wait(os.WNOHANG)

    def terminate(self, number: signal.Signals | None) -> None:
        """Send a signal to the command and all its descendants, unless the command has exited.

        ``number`` is None if the terminal has already sent the signal.
        """
        if self.poll() is not None:
            return
        self.is_ended = True
        pids = [self.pid, *find_descendants(read_processes(Access()), [self.pid])]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._ending.append(open_pidfd(pid))
        if number is not None:
            self._send(number)

    def kill_after(self, grace_s: float) -> bool:
        """Kill processes still running after ``grace_s``; return whether any were killed."""
        until = time.monotonic() + grace_s
        running = self._ending
        while running and (left_s := until - time.monotonic()) > 0:
            running = self._wait_for_exit(running, left_s)
        running = self._wait_for_exit(running, 0)
        self._send(signal.SIGKILL)
        return bool(running)

    def close(self) -> None:
        """Wait for the command to exit. If the command has not been released, it never runs."""
        self._close_gate()  # the shell reads EOF and exits
        self._wait(0)
        while self._ending:
            os.close(self._ending.pop())

    @staticmethod
    def _wait_for_exit(fds: list[int], timeout_s: float) -> list[int]:
        """Wait until one of the processes exits, and return those that are still running."""
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        return [fd for fd in fds if fd not in ended]

    def _send(self, number: signal.Signals) -> None:
        for fd in self._ending:
            with contextlib.suppress(ProcessLookupError):
                signal_pidfd(fd, number)

    def _wait(self, flags: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1


def _find_program(name: str) -> str:
    """Returns the path of a program, looking it up like a shell."""
    if "/" not in name:
        program = shutil.which(name)
        if program is None:
            raise CommandError(
                f"{name}: command not found",
                _NOT_FOUND,
                "check its name and PATH, or pass its full path",
            )
        return program
    if not os.path.exists(name):
        raise CommandError(f"{name}: {os.strerror(errno.ENOENT)}", _NOT_FOUND, "check its path")
    if os.path.isdir(name):
        reason = os.strerror(errno.EISDIR)
        raise CommandError(f"{name}: {reason}", _NOT_EXECUTABLE, "pass the path of a program")
    if not os.access(name, os.X_OK):
        reason = os.strerror(errno.EACCES)
        raise CommandError(f"{name}: {reason}", _NOT_EXECUTABLE, f"chmod +x {name}")
    return name
