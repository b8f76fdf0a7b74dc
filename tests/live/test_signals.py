"""On SIGTERM, profiled services export pending samples before the signal takes effect."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from services import WORK

from tests.further import further
from tests.warnings_of_load import without_lost_records

pytestmark = pytest.mark.live


def terminate(code, env):
    """Runs a service until it prints its number of samples, then sends SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORK + textwrap.dedent(code)],
        env={
            **os.environ,
            "OTEL_KPROFILER_SAMPLES_PER_SECOND": "499",
            "OTEL_KPROFILER_REPORTER_INTERVAL": "1h",
            "PYTHONWARNINGS": "ignore::DeprecationWarning",
            **env,
        },
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = process.stdout.readline()
    process.terminate()
    out, err = process.communicate(timeout=120)
    return process.returncode, line, out, without_lost_records(err)


SAMPLED = """
from otel_kprofiler import KernelProfiler
profiler = KernelProfiler.from_env().start("raise")
HOW
def sampled():
    work(0.5)
    while profiler.stats()["account"]["taken"] <= 100:  # the profiler's thread may be late
        work(0.1)
    print(os.getpid(), profiler.stats()["account"]["taken"], flush=True)
"""


@pytest.mark.parametrize("how", ["call", "setting"])
def test_a_plain_script_exports_pending_samples_and_is_killed_by_the_signal(to_file, how):
    code = SAMPLED.replace("HOW", "profiler.export_on_sigterm()" if how == "call" else "")
    env = {"OTEL_KPROFILER_EXPORT_ON_SIGTERM": "true"} if how == "setting" else {}
    status, line, _, err = terminate(code + "sampled(); time.sleep(600)", {**to_file.env, **env})
    assert (status, err) == (-signal.SIGTERM, "")
    pid, taken = map(int, line.split())
    assert taken > 100
    assert to_file.pids()[pid] >= taken


@pytest.mark.long
def test_the_services_own_signal_handler_is_called_and_the_service_continues(to_file):
    code = """
    import signal, threading
    called = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: called.set())
    """
    more = """
    sampled()
    assert called.wait(60)
    work(0.2)
    print(profiler.stats()["state"])
    """
    status, _, out, err = terminate(
        textwrap.dedent(code)
        + SAMPLED.replace("HOW", "profiler.export_on_sigterm()")
        + textwrap.dedent(more),
        to_file.env,
    )
    assert (status, out, err) == (0, "running\n", "")


@pytest.mark.long
def test_a_server_that_re_raises_sigterm_exports_all_samples_before_it_is_killed(to_file):
    code = """
    import threading, uvicorn

    async def app(scope, receive, send):
        message = await receive()
        assert message["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        sampled()
        await receive()
        work(0.5)
        print(profiler.stats()["account"]["taken"], flush=True)
        await send({"type": "lifespan.shutdown.complete"})

    uvicorn.run(app, port=0, log_level="error")
    """
    service = SAMPLED.replace("HOW", "profiler.export_on_sigterm()") + textwrap.dedent(code)
    status, line, out, err = terminate(service, to_file.env)
    assert (status, err) == (-signal.SIGTERM, "")
    pid, taken = map(int, line.split())
    assert int(out) > taken
    assert to_file.pids()[pid] >= int(out)


@pytest.mark.parametrize("idle", [*further(False), True])
def test_workers_terminated_by_their_pool_export_pending_samples(to_file, idle):
    """A pool stops an idle worker with a message and SIGTERM at the same time."""
    code = """
    import multiprocessing
    def worker(_):
        while profiler.stats()["state"] != "running":
            time.sleep(0.01)
        work(0.5)
        while profiler.stats()["account"]["taken"] <= 100:
            work(0.1)
        sender.send((os.getpid(), profiler.stats()["account"]["taken"]))
        time.sleep(BUSY)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        result = pool.map_async(worker, [0])
        found = receiver.recv()
        if not BUSY:
            result.get()
    print(*found, flush=True)  # no worker still holds the test's pipe
    time.sleep(600)
    """.replace("BUSY", "0" if idle else "600")
    service = SAMPLED.replace("HOW", "profiler.export_on_sigterm()") + textwrap.dedent(code)
    status, line, _, err = terminate(service, to_file.env)
    assert (status, err) == (-signal.SIGTERM, "")
    pid, taken = map(int, line.split())
    assert to_file.pids()[pid] >= taken > 100
