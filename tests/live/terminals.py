"""A terminal whose screen tests can read, and a program that runs in the terminal."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

_PARTS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([^\x1b]+)|(\x1b)")


class Page:
    """A screen that renders text and the escape sequences that ``top`` sends."""

    def __init__(self, columns, lines):
        self.modes = set()
        self.resize(columns, lines)

    def resize(self, columns, lines):
        self.columns, self.height = columns, lines
        self.lines = [[" "] * columns for _ in range(lines)]
        self.row = self.column = 0

    def feed(self, text):
        for parameters, final, plain, lone in _PARTS.findall(text):
            assert not lone, f"an incomplete sequence in {text!r}"
            if plain:
                self._write(plain)
            elif final == "H":
                row, _, column = parameters.partition(";")
                self.row = min(int(row or 1), self.height) - 1
                self.column = int(column or 1) - 1
            elif final == "K":
                assert parameters == "2"
                self.lines[self.row] = [" "] * self.columns
            elif final == "J":
                assert parameters == "2"
                self.resize(self.columns, self.height)
            elif final in "hl":
                if parameters == "?1049":  # the alternate screen, which is empty at first
                    self.resize(self.columns, self.height)
                (self.modes.add if final == "h" else self.modes.discard)(parameters)
            else:
                assert final == "m", f"{parameters}{final}"

    def _write(self, text):
        for char in text:
            if char in "\r\n":
                self.column = 0
                self.row += char == "\n"
                if self.row == self.height:
                    self.row -= 1
                    self.lines = [*self.lines[1:], [" "] * self.columns]
                continue
            assert char.isprintable(), f"{char!r} in {text!r}"
            self.lines[self.row][min(self.column, self.columns - 1)] = char
            self.column += 1

    @property
    def text(self):
        return "\n".join("".join(line).rstrip() for line in self.lines)


class Terminal:
    """Runs a program on a pseudoterminal. ``before`` holds the terminal's initial settings."""

    def __init__(self, words, columns=80, lines=24, **environment):
        self.page = Page(columns, lines)
        self._master, self._slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *map(str, words)],
            stdin=self._slave, stdout=self._slave, stderr=self._slave,
            env={**os.environ, "TERM": "xterm", **environment},
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for number in (self._master, self._slave):
            with contextlib.suppress(OSError):
                os.close(number)

    def settings(self):
        return termios.tcgetattr(self._slave)

    def resize(self, columns, lines):
        self.page.resize(columns, lines)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def type(self, text):
        os.write(self._master, text.encode())

    def hang_up(self):
        os.close(self._slave)
        os.close(self._master)

    def read(self, seconds=0.05):
        if select.select([self._master], [], [], seconds)[0]:
            data = os.read(self._master, 65536)
            while select.select([self._master], [], [], 0.01)[0]:
                data += os.read(self._master, 65536)
            self.page.feed(data.decode())

    def wait_for(self, *wanted, seconds=60):
        deadline = time.monotonic() + seconds
        while not all(one in self.page.text for one in wanted):
            assert time.monotonic() < deadline, f"no {wanted} on\n{self.page.text}"
            self.read(0.1)
        return self.page.text

    def end(self, seconds=60):
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.05)
        self.read()
        return self.process.wait(1)
