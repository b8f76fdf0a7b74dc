"""Runs programs for tests, with output redirected to log files."""

import contextlib
import os
import signal
import subprocess

from tests.waiting import wait_until


class LoggedProcess:
    """A process with its output redirected to a file.

    Leaving a ``with`` block stops the process. ``environ`` is added to the environment.
    """

    def __init__(self, command, log, *, environ=None, **options):
        self._log = log
        with log.open("wb") as file:
            env = {**os.environ, **(environ or {})}
            options = {"stdout": file, "stderr": file, "env": env, **options}
            self.process = subprocess.Popen([*map(str, command)], **options)
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def log(self):
        return self._log.read_text(errors="replace")

    def wait_until(self, condition, seconds=120, say=str):
        """Waits until a condition holds, and returns its value. The process must be running."""

        def is_met():
            assert self.process.poll() is None, self.log
            return condition()

        return wait_until(is_met, seconds, lambda: f"{say()}\n{self.log[-3000:]}")

    def wait_for_line(self, text):
        self.wait_until(lambda: text in self.log)

    def stop(self):
        """Stops the process, which may first write its buffered data."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(120)
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.communicate()
