"""Controls a terminal in full-screen mode, and restores it on every exit and on Ctrl-Z."""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, Self

from otel_kprofiler.cli.keys import REDRAW, KeyParser
from otel_kprofiler.errors import KProfilerError

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # alternate screen, no cursor, no line wrapping
_LEAVE: Final = "\x1b[0m\x1b[999;1H\x1b[2K\x1b[?7h\x1b[?25h\x1b[?1049l"
"""Leaves the alternate screen; on terminals without one, clears the last line and stays there."""
_CLEAR: Final = "\x1b[0m\x1b[2J"
_ESCAPE_MS: Final = 50
"""Time to wait for the rest of an escape sequence, in milliseconds."""
_LEAVE_S: Final = 0.5
_USUAL_SIZE: Final = os.terminal_size((80, 24))
_SIGNALS: Final = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)


def check_terminal() -> None:
    """Raise ``KProfilerError`` unless standard output is a terminal that supports drawing."""
    if not sys.stdout.isatty():
        raise KProfilerError("standard output is not a terminal", hint="use --once or --batch")
    if os.environ.get("TERM", "dumb") in ("dumb", ""):
        raise KProfilerError(
            "the terminal does not support drawing: TERM is unset or dumb",
            hint="set TERM, for example to xterm; or use --once or --batch",
        )


class Screen:
    """Context manager that takes over the terminal that standard output is connected to.

    Use the screen only from the main thread. Raises ``KProfilerError`` if there is no terminal to
    read keys from. Drawing never waits for the terminal. While the terminal accepts no output
    (Ctrl-S, a slow line), updates are skipped. Another thread or a signal handler calls ``wake``
    when there is a key to read or something to draw.

    Attributes:
        is_closed: whether the terminal was closed, so that no more keys can arrive.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.is_closed = False
        self._keys: deque[str] = deque()
        self._shown: list[str] = []
        self._pending = b""
        self._is_active = self._is_asked_to_stop = False
        self._before: dict[signal.Signals, Any] = {}
        self._encoding = sys.stdout.encoding or "utf-8"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._input = _open_input()
            stack.callback(os.close, self._input)
            self._output = _open_output()
            stack.callback(os.close, self._output)
            self._modes = termios.tcgetattr(self._input)
            self._end, self._ended = os.pipe()
            stack.callback(os.close, self._end)
            stack.callback(os.close, self._ended)
            stack.callback(self._restore_signals)
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
            stack.callback(self._leave)
            self._take()
            self._reader = threading.Thread(target=self._read, name="kprofiler-keys", daemon=True)
            self._reader.start()
            stack.callback(self._stop_reading)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        finally:  # even if another signal interrupts _leave()
            self._open.close()

    def size(self) -> os.terminal_size:
        """Returns the terminal's size, or 80 columns and 24 lines if the size is unknown."""
        try:
            size = os.get_terminal_size(self._output)
        except OSError:  # the terminal was closed
            return _USUAL_SIZE
        return size if size.columns and size.lines else _USUAL_SIZE

    @property
    def is_empty(self) -> bool:
        """Returns whether the whole screen must be drawn, as after startup, resizing or Ctrl-Z."""
        return not self._shown

    def take_keys(self) -> list[str]:
        """Returns the keys pressed since the last call."""
        keys = []
        while self._keys:
            key = self._keys.popleft()
            if key == REDRAW:
                self._shown = []
            else:
                keys.append(key)
        return keys

    def draw(self, lines: Sequence[str]) -> bool:
        """Draw lines. Return False if the previous screen has not been fully written yet."""
        if self._pending or not self._is_active:
            self.flush()
            return False
        text = "" if self._shown else _CLEAR
        for number, line in enumerate(lines):
            if number >= len(self._shown) or self._shown[number] != line:
                text += f"\x1b[{number + 1};1H\x1b[2K{line}\x1b[0m"
        for number in range(len(lines), len(self._shown)):
            text += f"\x1b[{number + 1};1H\x1b[2K"
        self._shown = list(lines)
        self._pending = text.encode(self._encoding, "replace")
        self.flush()
        return True

    def flush(self) -> None:
        """Write as much of the screen as the terminal accepts."""
        try:
            while self._pending and self._can_write():
                self._pending = self._pending[os.write(self._output, self._pending) :]
        except BlockingIOError:
            return
        except OSError:  # the terminal was closed
            self._pending = b""

    def _can_write(self) -> bool:
        poll = select.poll()
        poll.register(self._output, select.POLLOUT)
        return bool(poll.poll(0))

    def stop_if_asked(self, *, has_ended: Callable[[], bool]) -> None:
        """If Ctrl-Z was pressed, restore the terminal, and stop the process.

        When the process continues, take over the terminal, unless ``has_ended`` returns True.
        """
        if not self._is_asked_to_stop:
            return
        self._is_asked_to_stop = False
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        # The call above stops the process; execution resumes here after SIGCONT.
        signal.signal(signal.SIGTSTP, self._handle)
        if not has_ended():
            self._take()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._is_asked_to_stop = True
        elif number == signal.SIGCONT and self._is_active:  # after SIGSTOP
            self._take()
        self._shown = []
        self._wake()

    def _take(self) -> None:
        modes = [*self._modes[:6], list(self._modes[6])]
        modes[3] &= ~(termios.ICANON | termios.ECHO)
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        modes[6][termios.VQUIT] = b"\0"  # Ctrl-\ would exit without restoring the terminal
        with contextlib.suppress(termios.error):  # the terminal was closed
            # The kernel stops a background process here, before the process draws anything.
            termios.tcsetattr(self._input, termios.TCSANOW, modes)
        self._is_active, self._shown = True, []
        self._pending = _ENTER.encode()
        self.flush()

    def _leave(self) -> None:
        """Restore the terminal, waiting briefly if the terminal accepts no output."""
        if not self._is_active:
            return
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._input, termios.TCSANOW, self._modes)
            termios.tcflush(self._input, termios.TCIFLUSH)
        self._pending = _LEAVE.encode()
        deadline = time.monotonic() + _LEAVE_S
        while self._pending and time.monotonic() < deadline:
            self.flush()
            if self._pending:
                time.sleep(0.01)
        self._pending = b""
        self._is_active = False

    def _restore_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _read(self) -> None:
        parser, poll = KeyParser(), select.poll()
        poll.register(self._input, select.POLLIN)
        poll.register(self._end, select.POLLIN)
        while not self.is_closed:
            ready = [number for number, _ in poll.poll(_ESCAPE_MS if parser.is_waiting else None)]
            if self._end in ready:
                return
            if ready:
                data = self._read_some()
                self.is_closed = not data
                self._keys.extend(parser.feed(data))
            else:
                self._keys.extend(parser.flush())
            self._wake()

    def _read_some(self) -> bytes:
        try:
            return os.read(self._input, 1024)
        except OSError:  # the terminal was closed, or this is an orphaned background process
            return b""

    def _stop_reading(self) -> None:
        os.write(self._ended, b"\0")
        self._reader.join()


def _open_input() -> int:
    """Opens the terminal from which keys are read: standard input, or otherwise ``/dev/tty``."""
    if sys.stdin is not None and sys.stdin.isatty():
        return os.dup(sys.stdin.fileno())
    try:
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise KProfilerError(
            f"there is no terminal to read keys from: {error.strerror}", hint="use --batch"
        ) from error


def _open_output() -> int:
    """Opens the terminal again, in non-blocking mode, with a separate file description."""
    number = sys.stdout.fileno()
    try:
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(os.ttyname(number), flags)
    except OSError:  # the terminal has no path in this container
        return os.dup(number)
