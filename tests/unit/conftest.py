"""Unit tests must not use the system outside their process, unless they are marked ``system``.

An audit hook (PEP 578) keeps Python from starting processes and opening sockets, and the package's
bpf(2) call is replaced. An unmarked test using the system fails, even if it catches the error.
"""

import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests  # noqa: F401 - asks the system for IPv6 where it is first imported

FORBIDDEN = {
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"),
    *("pty.spawn", "subprocess.Popen"),
    *("socket.__new__", "socket.bind", "socket.connect", "socket.sendto"),
}
PRIVILEGED = {"capset", "mount", "setns", "syscall", "unshare"}
UNIT_TESTS = Path(__file__).parent
BPF_CALL = "otel_kprofiler.bpf.call"


class SystemUsedError(Exception):
    """Raised if a test without the ``system`` marker uses the system outside its process."""


class Guard:
    """Blocks and records access to the system by tests. ``uses`` is None if use is permitted."""

    def __init__(self):
        self.uses, self.threads = None, frozenset()

    def start(self):
        threads = {thread.ident for thread in threading.enumerate()}
        self.uses, self.threads = [], threads - {threading.main_thread().ident}

    def stop(self):
        self.uses = None

    def forbid(self, use):
        if self.uses is not None and threading.get_ident() not in self.threads:
            self.uses.append(use)
            raise SystemUsedError(f"{use}: {ADVICE}")

    def audit(self, event, args):
        # use is permitted; also None at exit, when the module's globals have been cleared
        if self.uses is None:
            return
        if event in FORBIDDEN:
            self.forbid(f"{event}{args!r}"[:200])
        elif event == "ctypes.dlopen" and "libbpf" in str(args[0]):
            self.forbid(f"dlopen of {args[0]}")
        elif event == "ctypes.dlsym" and args[1] in PRIVILEGED:
            self.forbid(f"call of {args[1]}")


ADVICE = "mark the test with @pytest.mark.system, or do not use the system"
_guard = Guard()
sys.addaudithook(_guard.audit)


@pytest.fixture
def guard():
    """Returns this process's guard, which is enabled in tests without the ``system`` marker."""
    return _guard


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Guards each test, and the fixtures that are set up for it."""
    # The hooks in this file are also called for tests in other directories.
    if UNIT_TESTS in item.path.parents and not item.get_closest_marker("system"):
        _guard.start()
    try:
        return (yield)
    finally:
        _guard.stop()


@pytest.fixture(autouse=True)
def _stay_in_this_process(request, monkeypatch):
    """Fails a test that accessed the system outside its process, even if it caught the error."""
    if BPF_CALL in sys.modules and not request.node.get_closest_marker("system"):
        calls = SimpleNamespace(syscall=lambda *numbers: _guard.forbid(f"syscall{numbers!r}"))
        monkeypatch.setattr(sys.modules[BPF_CALL], "_libc", calls)
    yield
    assert not _guard.uses, f"{'; '.join(_guard.uses)}: {ADVICE}"


class SettableClock:
    """A clock in nanoseconds that changes only when a test sets it."""

    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns


@pytest.fixture
def clock():
    return SettableClock()


@pytest.fixture
def ignored_children():
    """Ignores SIGCHLD in this process, as some services with an embedded profiler do."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, handler)
