"""Settings for all tests: no module may leave descriptors open, and hypothesis has no deadline."""

import contextlib
import gc
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.host_settings import hold_settings
from tests.public import remove_copies

HERE = Path(__file__).parent
COMPUTING = ("docs", "fuzz", "property", "unit")
KEPT = Counter(
    {
        "/memfd:OTEL_CTX (deleted)": 1,  # the published process context
        "pipe": 5,  # used by libuv (for signals), the browser, and multiprocessing's tracker
        "anon_inode:[eventpoll]": 4,  # used by the most recent gRPC servers and clients
        "anon_inode:[eventfd]": 4,
    }
)
"""Descriptors that the process keeps open after their first use."""
NUMBER = re.compile(r":\[\d+\]$")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]  # the machine may be busy
        settings.register_profile("kprofiler", deadline=None, suppress_health_check=slow)
        settings.load_profile("kprofiler")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keeps the garbage collector from traversing objects that live for the whole run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items):
    """Alternates files of tests that compute and files of tests that wait, to keep the CPUs busy.

    Collector tests come last, because it takes minutes to build Collectors.
    """
    layers = {item.path: item.path.relative_to(HERE).parts[0] for item in items}
    computing = [path for path, layer in layers.items() if layer in COMPUTING]
    waiting = [path for path, layer in layers.items() if layer not in COMPUTING]
    waiting.sort(key=lambda path: layers[path] == "collector")
    places = {
        path: place / len(files)
        for files in (computing, waiting)
        for place, path in enumerate(files)
    }
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Never runs live tests alongside a test that changes the host's settings.

    The time that a test waits for other tests does not count towards its timeout.
    """
    changes = item.get_closest_marker("changes_host") is not None
    if not changes and item.get_closest_marker("live") is None:
        return (yield)
    with hold_settings(changes=changes):
        return (yield)


def pytest_sessionfinish():
    remove_copies()


def pytest_make_parametrize_id(val, argname):
    """Keeps byte strings out of test ids: times and pids in them differ between xdist workers."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def sampling_host():
    """Skips a test if this host cannot be sampled, and states what is missing."""
    from otel_kprofiler.host import Access, doctor
    from otel_kprofiler.model import Level

    missing = [finding for finding in doctor(Access()) if finding.level is Level.FAIL]
    if missing:
        pytest.skip("; ".join(f"{finding.check}: {finding.observed}" for finding in missing))


@pytest.fixture(scope="session")
def descriptors_kept():
    """Counts the descriptors that are already open, or may remain open after the tests."""
    return count_descriptors() + KEPT


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_open(request, descriptors_kept):
    failed = request.session.testsfailed
    yield
    # The traceback from a failed test keeps the test's open objects alive.
    has_failed = request.session.testsfailed > failed
    left = wait_for_the_rest(descriptors_kept, 0 if has_failed else 60)
    descriptors_kept.update(left)  # report each leaked descriptor only once
    assert has_failed or not left


def wait_for_the_rest(kept, seconds):
    """Waits for threads to close descriptors. Returns the open descriptors not in ``kept``."""
    deadline = time.monotonic() + seconds
    while (left := count_descriptors() - kept) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return left


def count_descriptors():
    """Counts open descriptors by target. All pipes count as one target, and so do all sockets."""
    results = Counter()
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # closed by another thread
                results[NUMBER.sub("", os.readlink(entry.path))] += 1
    return results
