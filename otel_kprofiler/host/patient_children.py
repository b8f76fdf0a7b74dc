"""Waits for child processes that read files, and abandons children blocked on hung file systems."""

import subprocess
import threading
import time
from typing import Final

from otel_kprofiler.host.child_cpu import MeteredChild, charge_child
from otel_kprofiler.host.patient_calls import MAX_LEFT, PATIENCE_S, find_storage_wait

DEVICE_RETRY_S: Final = 30.0
"""Delay in seconds before a device that hangs is tried again."""


class DeviceHangs(Exception):  # noqa: N818 - an outcome
    """Raised if a file system does not respond to a child process, which is then abandoned."""

    def __init__(self) -> None:
        super().__init__("its file system is not responding")


class PatientChildren:
    """Waits for children that read files; thread-safe.

    A child is killed if a single wait for storage exceeds ``patience_s``. The device is not read
    again until ``retry_s`` have passed and the killed child has exited. A child that is merely slow
    does not make its device unavailable.
    """

    def __init__(self, patience_s: float = PATIENCE_S, retry_s: float = DEVICE_RETRY_S) -> None:
        self._patience_s, self._retry_s = patience_s, retry_s
        self._lock = threading.Lock()
        self._left: list[tuple[int | None, float, MeteredChild]] = []

    def check(self, device: int) -> None:
        """Raise ``DeviceHangs`` if a device hangs, or if too many children have been abandoned."""
        with self._lock:
            now_s = time.monotonic()
            self._left = [
                (hung, until_s, child)
                for hung, until_s, child in self._left
                if child.poll() is None or now_s < until_s
            ]
            if len(self._left) >= MAX_LEFT or any(hung == device for hung, *_ in self._left):
                raise DeviceHangs

    def wait(self, child: MeteredChild, device: int, timeout_s: float) -> tuple[bytes, bytes]:
        """Wait for a child, killing it after ``timeout_s``, and return its piped output.

        The child's CPU time is charged to the calling thread; see :func:`children_time_ns`.

        Raises:
            DeviceHangs: the child's file system does not respond.
            TimeoutExpired: the child took longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        wait: int | None = None
        hangs = False
        try:
            while not hangs:
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    return child.communicate(timeout=min(left_s, self._patience_s))
                except subprocess.TimeoutExpired:
                    if left_s <= self._patience_s:
                        raise
                last, wait = wait, find_storage_wait(f"/proc/{child.pid}")
                hangs = wait is not None and wait == last
            raise DeviceHangs
        finally:
            if not self._end(child) or hangs:
                self._leave(child, device if hangs else None)
            charge_child(child)

    def _end(self, child: MeteredChild) -> bool:
        """Kill the child if it is still working. Return False if it does not exit in time."""
        if child.returncode is None and not child.is_idle:
            child.kill()
            try:
                child.communicate(timeout=self._patience_s)
            except subprocess.TimeoutExpired:
                for pipe in (child.stdout, child.stderr):
                    if pipe is not None:
                        pipe.close()
                return False
        return True

    def _leave(self, child: MeteredChild, device: int | None) -> None:
        child.read_cpu_time()
        until_s = 0.0 if device is None else time.monotonic() + self._retry_s
        with self._lock:
            self._left.append((device, until_s, child))
