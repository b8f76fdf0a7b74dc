"""For all tests: no module leaves descriptors open; hypothesis examples have no time limit."""

import contextlib
import gc
import os
import re
import signal
import time
from collections import Counter

import pytest

from tests.public import remove_copies

KEPT = Counter(
    {
        "/memfd:OTEL_CTX (deleted)": 1,  # the page of the process context
        "pipe": 5,  # libuv's, for signals, those to the browser, multiprocessing's to its tracker
        "anon_inode:[eventpoll]": 4,  # gRPC's, of the last servers and clients
        "anon_inode:[eventfd]": 4,
    }
)
"""Descriptors that the process keeps after their first use."""
NUMBER = re.compile(r":\[\d+\]$")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]  # on a machine with other work
        settings.register_profile("kprofiler", deadline=None, suppress_health_check=slow)
        settings.load_profile("kprofiler")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from repeatedly traversing objects that last for the whole run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_sessionfinish():
    remove_copies()


def pytest_make_parametrize_id(val, argname):
    """Byte strings are numbered: those with a time or a pid would differ between processes."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def sampling_host():
    """Skips tests on a host that cannot be sampled, with what is missing."""
    from otel_kprofiler.host import Access, doctor
    from otel_kprofiler.model import Level

    missing = [finding for finding in doctor(Access()) if finding.level is Level.FAIL]
    if missing:
        pytest.skip("; ".join(f"{finding.check}: {finding.observed}" for finding in missing))


@pytest.fixture(scope="session")
def descriptors_kept():
    """Counts descriptors open before the tests, and descriptors that may stay open after them."""
    return count_descriptors() + KEPT


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_open(request, descriptors_kept):
    failed = request.session.testsfailed
    yield
    # The traceback of a failed test refers to what it had open.
    has_failed = request.session.testsfailed > failed
    left = wait_for_the_rest(descriptors_kept, 0 if has_failed else 60)
    descriptors_kept.update(left)  # so that it is reported once
    assert has_failed or not left


def wait_for_the_rest(kept, seconds):
    """Returns descriptors open beyond the kept ones, after giving threads time to close theirs."""
    deadline = time.monotonic() + seconds
    while (left := count_descriptors() - kept) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return left


def count_descriptors():
    """Open descriptors by their target; all pipes together, and all sockets."""
    results = Counter()
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a thread has closed it
                results[NUMBER.sub("", os.readlink(entry.path))] += 1
    return results
