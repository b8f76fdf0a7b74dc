"""Children from C's ``fork()``, which runs no hooks, profile themselves once they use the API."""

import pytest
from services import problems, run

from tests.further import further_of
from tests.raw_forks import CODE

pytestmark = pytest.mark.live

SERVICE = (
    CODE
    + """
import faulthandler
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler import KernelProfiler, labels

trace.set_tracer_provider(TracerProvider())
tracer = trace.get_tracer("t")
profiler = KernelProfiler.from_env().start("raise")

def fork_and(child):
    work(0.2)
    pid = raw_fork()
    if not pid:
        faulthandler.dump_traceback_later(150, exit=True)  # shows where a child hangs
        child()
        sys.exit()
    print(pid)
    deadline = time.monotonic() + 200
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.05)
    assert ended[1] == 0, ended
    work(0.2)
    profiler.stop()
"""
)
PROFILED = """
def child():
    FIRST
    await_running(profiler)
    with tracer.start_as_current_span("later"):
        work(0.5)
    profiler.stop(30_000)
    account = profiler.stats()["account"]
    assert account["taken"] > 50 and not account["gaps"], account
    assert profiler.stats()["linked"] > 50, profiler.stats()

fork_and(child)
"""
FIRST = {
    "start": 'profiler.start("raise")',
    "span": 'tracer.start_span("first").end()',
    "labels": "labels(tenant='acme').__enter__()",
    "stats": "profiler.stats()",
    "flush": "profiler.flush_window(1000)",
}


@pytest.mark.parametrize("first", further_of(FIRST, ("span",)))
def test_a_child_profiles_itself_after_its_first_call_to_the_profiler(to_file, first):
    code = SERVICE + PROFILED.replace("FIRST", FIRST[first])
    done = run(code, env=to_file.env, timeout=300)
    assert problems(done.stderr) == []
    assert to_file.pids()[int(done.stdout)] > 50


STOPPED = """
def child():
    began = time.monotonic()
    profiler.stop(120_000)
    assert time.monotonic() - began < 40
    time.sleep(0.5)  # longer than a restart waits
    assert profiler.stats()["state"] == "stopped", profiler.stats()

fork_and(child)
"""


@pytest.mark.long
def test_stopping_the_profiler_in_a_forked_child_neither_blocks_nor_restarts_it(to_file):
    done = run(SERVICE + STOPPED, env=to_file.env)
    assert problems(done.stderr) == []
    assert int(done.stdout) not in to_file.pids()


def test_a_child_that_never_calls_the_profiler_exits_normally(to_file):
    done = run(SERVICE + "\nfork_and(lambda: work(0.2))\n", env=to_file.env)
    assert problems(done.stderr) == []
    assert int(done.stdout) not in to_file.pids()
