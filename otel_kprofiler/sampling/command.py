"""Holds a command before its exec, so that sampling starts with its first instruction."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from typing import Final, Self

from otel_kprofiler.errors import KProfilerError

_GATE: Final = 3
# The shell has been executed when posix_spawn returns. So the next exec, at which the sampler's
# event starts to count, is that of the command.
_HOLD: Final = f'read -r _ <&{_GATE} || exit 125; exec "$@" {_GATE}<&-'


class HeldCommand:
    """Starts a command that waits for :meth:`release`; a context manager.

    Args:
        arguments: program and arguments; the program is searched in ``PATH``.

    Attributes:
        pid: for :attr:`SamplerConfig.child_pid`.

    Raises:
        KProfilerError: there is no such program.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        program = shutil.which(arguments[0])
        if program is None:
            raise KProfilerError(
                f"cannot run {arguments[0]!r}: no such program", hint="check its name, or PATH"
            )
        self._status: int | None = None
        gate, self._gate = os.pipe()
        try:
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", _HOLD, "sh", program, *arguments[1:]],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, gate, _GATE)],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them
            )
        except BaseException:
            os.close(self._gate)
            raise
        finally:
            os.close(gate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def release(self) -> None:
        """Run the command."""
        os.write(self._gate, b"\n")
        self._close_gate()

    def poll(self) -> int | None:
        """Exit status once the command has ended, negative for a signal; None before."""
        return self._wait(os.WNOHANG)

    def close(self) -> None:
        """End a command that was not released; wait for one that was."""
        self._close_gate()  # the shell reads end of file and exits
        self._wait(0)

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
