"""In processes with subinterpreters, samples have frames from a thread's current interpreter."""

import os
import subprocess
import time
from contextlib import closing

import pytest
from python_frames import functions, sampling, stacks

from otel_kprofiler.interpreters import PythonTracking
from otel_kprofiler.model import PYTHON_SIDE
from tests.further import further_of
from tests.interpreters import VERSIONS, environment, require_pythons
from tests.waiting import wait_until

pytestmark = pytest.mark.live

# The first subinterpreter is idle; one thread always runs the second, another sometimes the third.
PROGRAM = """
import os, sys, threading, time
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

WORK = '''
import os, time
def work_NAME(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        compute_NAME()
        os.listdir("/proc/self")
def compute_NAME():
    return sum(range(500))
'''
exec(WORK.replace("NAME", "main"))
exec(WORK.replace("NAME", "alternating"))
idle, busy, third = (interpreters.create() for _ in range(3))
tids = {}

def runs_busy():
    tids["busy"] = threading.get_native_id()
    interpreters.run_string(busy, WORK.replace("NAME", "busy") + "work_busy(1000)")

def alternates():
    tids["third"] = threading.get_native_id()
    while True:
        interpreters.run_string(third, WORK.replace("NAME", "third") + "work_third(0.01)")
        work_alternating(0.01)

if "idle" not in sys.argv:
    for target in (runs_busy, alternates):
        threading.Thread(target=target, daemon=True).start()
    while len(tids) < 2:
        time.sleep(0.01)
print(tids.get("busy", 0), tids.get("third", 0), flush=True)
threading.Thread(target=lambda: sys.stdin.read() or os._exit(0), daemon=True).start()
while True:
    work_main(1)
"""
MAIN = {"<module>", "work_main", "compute_main"}
ENTRY = {"runs_busy", "alternates", "Thread.run", "Thread._bootstrap", "Thread._bootstrap_inner",
         "Thread._context.run"}  # fmt: skip
BUSY = {"<module>", "work_busy", "compute_busy"}
THIRD = {"<module>", "work_third", "compute_third"}
ALTERNATING = {"work_alternating", "compute_alternating"}


def take(command, *arguments, enough):
    """Returns the function names in the Python stacks of the main, busy and third threads."""
    with subprocess.Popen(
        [command, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    ) as run:  # fmt: skip
        busy, third = map(int, run.stdout.readline().split())
        result = {run.pid: [], busy: [], third: []}
        with (
            sampling(pid=run.pid) as sampler,
            closing(PythonTracking(sampler.python, (run.pid,))) as tracking,
        ):
            tracking.start()

            def has_enough():
                time.sleep(0.1)
                for sample in sampler.drain():
                    if sample.words(PYTHON_SIDE) and sample.tid in result:
                        result[sample.tid].append(functions(stacks(sampler, [sample])[0]))
                return enough(result, run.pid, busy, third)

            wait_until(has_enough, say=sampler.python.counts)
        run.stdin.close()
    return result[run.pid], result[busy], result[third]


@pytest.mark.parametrize("minor", further_of(VERSIONS, ("3.12", "3.14")))
def test_an_idle_subinterpreter_does_not_hide_frames(minor):
    python, *_ = require_pythons(minor)
    main, _, _ = take(python.command, "idle", enough=lambda result, pid, *_: len(result[pid]) > 50)
    assert all(set(names) <= MAIN and "work_main" in names for names in main if len(names) > 1)


@pytest.mark.parametrize("minor", further_of(VERSIONS, ("3.12", "3.14")))
def test_stacks_contain_only_frames_from_the_threads_current_interpreter(minor):
    """Before Python 3.13, only the main interpreter's frames are read."""
    python, *_ = require_pythons(minor)
    least = int(os.environ.get("KPROFILER_SUBINTERPRETER_STACKS", "50"))

    def enough(found, pid, busy, third):
        return all(len(found[tid]) > least for tid in (pid, busy, third))

    main, busy, third = take(python.command, enough=enough)
    assert [names for names in main if not set(names) <= MAIN] == []
    if minor in ("3.11", "3.12"):
        assert [names for names in busy if not set(names) <= ENTRY] == []
        assert [names for names in third if not set(names) <= ENTRY | ALTERNATING] == []
        return
    assert [names for names in busy if not set(names) <= BUSY] == []
    wrong = [
        names for names in third if not (set(names) <= THIRD or set(names) <= ENTRY | ALTERNATING)
    ]
    assert wrong == []
    assert {"work_third", "work_alternating"} <= {name for names in third for name in names}
