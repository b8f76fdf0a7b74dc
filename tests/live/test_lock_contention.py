"""Samples of kernel lock waits include the exact duration, the lock's holder, and a stack."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from samplers import load, sampling
from test_events import record, report

from otel_kprofiler.bpf import WAIT_UNIT_NS
from otel_kprofiler.host import parse_event
from otel_kprofiler.model import LOCK_CONTENTION, UNCOUNTED_LOCK, LockHolder
from otel_kprofiler.sampling.wait_joiner import FIRST_THRESHOLD_NS
from tests.lock_holder import hold_once, open_faults

pytestmark = pytest.mark.live

ROUNDS, WAITERS, SECONDS = 4, 3, 0.05
PROGRAM = str(Path(__file__).parents[1] / "lock_holder.py")
LOAD = (sys.executable, PROGRAM, str(ROUNDS), str(WAITERS), str(SECONDS))
RENAMES = """
import os, sys, tempfile
with tempfile.TemporaryDirectory() as directory:
    os.chdir(directory)
    children = []
    for number in range(4):
        if not (child := os.fork()):
            open(f"a{number}", "w").close()
            for _ in range(int(sys.argv[1])):
                os.rename(f"a{number}", f"b{number}")
                os.rename(f"b{number}", f"a{number}")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""
CONTENTION = parse_event("lock-contention", 99)


@pytest.fixture(scope="module", autouse=True)
def _has_faults():
    try:
        os.close(open_faults())
    except OSError as error:
        pytest.skip(f"this kernel has no userfaultfd: {error}")


def run_sampler(command, **settings):
    with sampling(on_cpu=False, stacks="both", events=(CONTENTION,), **settings) as sampler:
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        samples = []
        while process.poll() is None:
            sampler.wait(0.1)
            samples += sampler.drain()
        output = process.communicate()[0]
        assert process.returncode == 0
        sampler.stop()
        return output, samples + sampler.drain(), sampler.counts()["lock_contention"]


@pytest.fixture(scope="module")
def held():
    """Returns the program's measurements, its threads' samples, and the sampler's counts."""
    output, samples, counts = run_sampler(LOAD, target_comms=(b"lock_waiter", b"lock_holder"))
    return json.loads(output), samples, counts


def test_counts_and_durations_of_lock_waits_are_exact(held):
    """All writers wait until the holder releases the lock.

    The threads may also wait briefly for locks of this type that other processes hold.
    """
    measured, _, counts = held
    waits, total_ns = counts.locks["rwsem:W"]
    others = waits - ROUNDS * WAITERS
    assert others >= 0
    assert total_ns >= ROUNDS * WAITERS * SECONDS * 1e9
    assert total_ns <= sum(measured["waits_ns"]) + others * SECONDS * 1e9


def test_each_long_lock_wait_yields_a_sample_that_names_the_lock_holder(held):
    measured, samples, counts = held
    assert counts.taken == counts.received + sum(counts.lost.values())
    long = [
        sample
        for sample in samples
        if sample.tid in measured["waiters"] and sample.value >= SECONDS * 1e9
    ]
    assert len(long) + counts.missed >= ROUNDS * WAITERS
    assert {sample.kind for sample in samples} == {LOCK_CONTENTION}
    assert {sample.comm for sample in long} == {b"lock_waiter"}
    assert {sample.wait.type for sample in long} == {"rwsem:W"}
    holders = {sample.wait.holder for sample in long}
    assert holders == {LockHolder(tid, b"lock_holder") for tid in measured["holders"]}


def test_sample_values_estimate_the_total_lock_wait_time():
    output, samples, counts = run_sampler(
        (sys.executable, "-c", RENAMES, "5000"), target_comms=(Path(sys.executable).name.encode(),)
    )
    assert output == b""
    exact = sum(total.total_ns for total in counts.locks.values())
    values = [sample.value for sample in samples]
    # A wait below the threshold is sampled with probability duration / threshold; the sample's
    # value is then the threshold, a multiple of a unit. Every longer wait is sampled, and its
    # duration is the sample's value.
    raised = [value for value in values if value % WAIT_UNIT_NS == 0]
    threshold = statistics.median(raised or [FIRST_THRESHOLD_NS])
    # If the waits below the threshold sum to 14 thresholds, the probability that none of these
    # waits is sampled is one in a million.
    error = 5 * math.sqrt(sum(value**2 for value in raised)) + 14 * threshold
    unsampled = counts.missed + sum(counts.lost.values())
    assert abs(sum(values) - exact) <= error + unsampled * max(values)
    assert error < exact


def test_a_report_shows_the_waiting_functions_and_the_exact_totals(tmp_path):
    path = str(tmp_path / "x.otlp")
    # On a busy machine, the first iterations may complete before the interpreter's frames are read.
    load = (sys.executable, PROGRAM, "40", str(WAITERS), str(SECONDS))
    done = record(path, "-e", "lock-contention", run=load)
    assert done.returncode == 0, done.stderr
    assert " for locks: " in done.stderr
    assert "accounting gap" not in done.stderr
    (part,) = report(path, "--by", "function").values()
    groups = {group["name"]: group for group in part["groups"]}
    assert groups["hold_once.<locals>.wait_for_lock"]["total"] > 0
    leaves = [group["name"] for group in part["groups"] if group["self"]]
    assert not [name for name in leaves if "kprofiler" in name or "bpf_trace" in name]
    waits, total_ns = part["locks"]["exact"]["rwsem:W"].values()
    assert waits >= 40 * WAITERS
    assert total_ns >= 40 * WAITERS * SECONDS * 1e9
    (by_lock,) = report(path, "--by", "lock").values()
    assert by_lock["groups"][0]["name"] == "rwsem:W"
    (by_holder,) = report(path, "--by", "holder").values()
    assert any(group["name"].startswith("lock_holder (") for group in by_holder["groups"])


def test_lock_waits_outside_of_the_targets_are_neither_counted_nor_sampled():
    _, samples, counts = run_sampler(LOAD, target_comms=(b"no such name",))
    assert (samples, counts.taken) == ([], 0)
    assert not any(total.total_ns for total in counts.locks.values())
    assert counts.filtered["target"] >= ROUNDS


def test_lock_waits_while_the_sampler_is_paused_are_not_counted():
    comms = b"lock_waiter", b"lock_holder"
    with sampling(on_cpu=False, events=(CONTENTION,), target_comms=comms) as sampler:
        sampler.pause()
        subprocess.run(LOAD, stdout=subprocess.DEVNULL, check=True)
        sampler.drain()
        locks = sampler.counts()["lock_contention"].locks
    assert not any(total.waits for name, total in locks.items() if name != UNCOUNTED_LOCK)


THREADS = """
import threading
while True:
    threads = [threading.Thread(target=int) for _ in range(20)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_lock_waits_of_the_profiler_and_its_exiting_threads_are_excluded():
    """Exiting threads may wait for locks after they have left their pid namespace."""
    with sampling(on_cpu=False, events=(CONTENTION,), target_pids=(os.getpid(),)) as sampler:
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(load(THREADS))
            for _ in range(30):
                faults = stack.enter_context(os.fdopen(open_faults()))
                file = stack.enter_context(tempfile.TemporaryFile())
                hold_once(faults.fileno(), file.fileno(), 10, 0.01)
        assert sampler.drain() == []
        counts = sampler.counts()["lock_contention"]
    assert not any(total.total_ns for total in counts.locks.values())
