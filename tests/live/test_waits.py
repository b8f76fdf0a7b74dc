"""Exact off-CPU totals agree with the scheduler's statistics and with the clock."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samplers import sampling, spawned

from otel_kprofiler.bpf import BccLoader, find_wait_offsets
from otel_kprofiler.bpf.wait_maps import THREAD_BYTES
from otel_kprofiler.errors import HostError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    NO_WAITS,
    STACK_NOT_CAPTURED,
    ProcessKey,
    WaitState,
    WaitTotals,
)
from otel_kprofiler.otlp import read_profiles
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig, wait_follower
from tests.commands import COMMAND
from tests.needs import LIBBPF
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, LIBBPF]

TOTALS = OffCpuConfig(samples_per_second=0)
# Each program prints "ready", works for the seconds in its argument, and prints three durations in
# nanoseconds: elapsed, on a CPU, and waiting for a CPU (the last two from schedstat).
FRAME = """
import os, sys, threading, time
def stat():
    return [int(word) for word in open("/proc/thread-self/schedstat").read().split()]
time.sleep(0.2)
print("ready", flush=True)
sys.stdin.readline()
start, before = time.monotonic_ns(), stat()
end = time.monotonic() + float(sys.argv[1])
{body}
after = stat()
print(time.monotonic_ns() - start, after[0] - before[0], after[1] - before[1], flush=True)
sys.stdin.readline()
"""
SLEEP = "while time.monotonic() < end: time.sleep(0.01)"
SLEEPS = "for _ in range(200): time.sleep(0.01)"
SPIN = "while time.monotonic() < end: pass"
# Competes with two other processes for one CPU until it has waited 1 s for that CPU.
COMPETE = """
import signal
others = []
for _ in range(2):
    if not (child := os.fork()):
        while True: pass
    others.append(child)
while stat()[1] - before[1] < 1e9: pass
for other in others: os.kill(other, signal.SIGKILL)
"""


@pytest.fixture(params=["kernel", "wakers"])
def account(request, monkeypatch):
    """Selects how waits for a CPU are detected: from kernel run-queue delays, or from wake-ups."""
    if request.param == "wakers":

        def find(types):
            return find_wait_offsets(types)._replace(run_delay=0)

        monkeypatch.setattr(wait_follower, "find_wait_offsets", find)
    return request.param


def running(**settings):
    return sampling(on_cpu=False, off_cpu=TOTALS, **settings)


class Program:
    """A process that starts a given kind of wait when :meth:`go` is called."""

    def __init__(self, body, seconds, *, cpu=None):
        pin = [] if cpu is None else ["taskset", "-c", str(cpu)]
        self.process = subprocess.Popen(
            [*pin, sys.executable, "-S", "-c", FRAME.format(body=body), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"
        # the process is waiting for a command on stdin
        wait_until(lambda: "pipe_read" in self.place())

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def switches(self):
        """Returns how often the main thread has been switched out."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)

    def place(self):
        """Returns the kernel function in which the program is sleeping."""
        with open(f"/proc/{self.process.pid}/wchan") as function:
            return function.read()

    def is_asleep(self):
        """Returns whether the program is sleeping in nanosleep(2), not waiting for a CPU."""
        return "nanosleep" in self.place()

    def is_stopped(self):
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def wait_for_switches(self, count):
        """Waits until the main thread has been switched out another ``count`` times."""
        start = self.switches()
        wait_until(lambda: self.switches() >= start + count)

    def reported(self):
        """Reads the program's report: ns elapsed, ns on a CPU, and ns waiting for a CPU."""
        return [int(word) for word in self.process.stdout.readline().split()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def read(sampler):
    """Returns the totals since the last read, by process id."""
    sampler.drain()
    results = {}
    for process, totals in sampler.read_waits().items():
        before = results.get(process.tgid, NO_WAITS)
        results[process.tgid] = WaitTotals(
            tuple(a + b for a, b in zip(before.by_state, totals.by_state, strict=True)),
            before.switches + totals.switches,
        )
    return results


def measure(*programs):
    """Returns each program's report and totals, and the extra time in the totals, in ns."""
    with running() as sampler, contextlib.ExitStack() as stack:
        started = [stack.enter_context(Program(*program[:2], **program[2])) for program in programs]
        time.sleep(0.2)
        start = time.monotonic_ns()
        read(sampler)
        for one in started:
            one.go()
        reported = [one.reported() for one in started]
        totals = read(sampler)
        passed = time.monotonic_ns() - start
    # The totals include off-CPU time before the start signal and after the report.
    return [
        (numbers, totals[one.process.pid], passed - numbers[0])
        for numbers, one in zip(reported, started, strict=True)
    ]


def test_wait_totals_and_cpu_time_sum_to_elapsed_time(account):
    (((wall, on_cpu, delay), totals, more),) = measure((SLEEPS, 60, {}))
    # In schedstat, the run time of a thread woken on an idle CPU may start at the wake-up, because
    # the kernel does not update the clock again (rq_clock_skip_update in kernel/sched/core.c). In
    # the totals, the thread is off the CPU until it runs.
    skipped = 100_000 * totals.switches
    assert wall - on_cpu == pytest.approx(totals.total_ns, rel=0.005, abs=more + skipped)
    if account == "wakers":
        more += skipped
    assert totals.by_state[WaitState.RUNNABLE] == pytest.approx(delay, rel=0.005, abs=more)
    assert totals.by_state[WaitState.INTERRUPTIBLE] >= 0.99 * 200 * 0.01e9
    assert totals.switches >= 0.95 * 200


def test_threads_competing_for_a_cpu_are_counted_as_waiting_for_it(account):
    cpu = min(os.sched_getaffinity(0))
    (((wall, on_cpu, delay), totals, more),) = measure((COMPETE, 60, {"cpu": cpu}))
    assert totals.by_state[WaitState.RUNNABLE] == pytest.approx(delay, rel=0.005, abs=more)
    assert wall - on_cpu == pytest.approx(totals.total_ns, rel=0.005, abs=more)


def test_a_stopped_process_waits_until_it_is_continued():
    with running() as sampler, Program(SPIN, 60) as program:
        program.go()
        read(sampler)
        os.kill(program.process.pid, 19)  # SIGSTOP
        wait_until(program.is_stopped)
        time.sleep(1)
        first = read(sampler)[program.process.pid]
        time.sleep(1)
        second = read(sampler)[program.process.pid]
        os.kill(program.process.pid, 18)  # SIGCONT
    assert first.by_state[WaitState.STOPPED] > 0.5e9
    assert second.by_state[WaitState.STOPPED] >= 1e9
    assert second.switches == 0, "a wait that has not ended is counted"


def starve_a_sleeper(sampler, cpu):
    """Returns a thread's totals and context switches while starved, and its totals afterwards.

    A SCHED_FIFO thread occupies the CPU for 0.8 s of the 0.95 s per second that the kernel allows.
    Returns None if a busy machine delays this thread or its read of the totals.
    """
    first = """
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
taken = time.monotonic()
while time.monotonic() < taken + 0.8: pass
print(taken)
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
"""
    with Program("time.sleep(0.3)", 1, cpu=cpu) as sleeper, Program(first, 0.8, cpu=cpu) as spinner:
        read(sampler)
        before = sleeper.switches()
        asleep = time.monotonic()
        sleeper.go()
        while not sleeper.is_asleep():
            if time.monotonic() - asleep > 0.15:  # the thread may already have slept and woken up
                return None
            time.sleep(0.001)
        missed = sampler.wait_counts.missed
        spinner.go()
        time.sleep(0.6)
        waiting = read(sampler)[sleeper.process.pid]
        late = time.monotonic()
        begun = sleeper.switches() - before
        missed = sampler.wait_counts.missed - missed
        taken = float(spinner.process.stdout.readline())
        if taken - asleep > 0.15 or late - taken > 0.7 or late - asleep < 0.55:
            return None
        sleeper.reported()
        return waiting, range(begun - missed, begun + 1), read(sampler)[sleeper.process.pid]


def test_a_woken_thread_that_does_not_run_is_counted_as_waiting_for_a_cpu(account):
    cpu = min(os.sched_getaffinity(0))
    with running() as sampler:
        tries = (starve_a_sleeper(sampler, cpu) for _ in range(20))
        waiting, begun, after = next(filter(None, tries))
    assert waiting.by_state[WaitState.RUNNABLE] > 0.2e9
    assert waiting.by_state[WaitState.INTERRUPTIBLE] > 0.1e9
    # The wait before the first switch has completed, but the wait after the last switch has not.
    assert waiting.switches in begun, "an unfinished wait is counted"
    assert after.by_state[WaitState.RUNNABLE] > 0.05e9


def test_the_time_of_an_ongoing_wait_is_reported_only_once():
    with running() as sampler, Program("time.sleep(60)", 60) as program:
        program.go()
        time.sleep(0.5)
        before = time.monotonic_ns()
        read(sampler)
        start = time.monotonic_ns()
        reported = 0
        for _ in range(5):
            time.sleep(0.2)
            end = time.monotonic_ns()
            reported += read(sampler)[program.process.pid].total_ns
        after = time.monotonic_ns()
    # A run queue's clock does not advance between updates.
    assert 0.99 * (end - start) <= reported <= 1.01 * (after - before)


@pytest.mark.long
def test_wait_totals_of_exited_threads_are_kept():
    body = """
for _ in range(200):
    threads = [threading.Thread(target=time.sleep, args=(0.05,)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if time.monotonic() > end: break
"""
    (((wall, _, _), totals, _),) = measure((body, 60, {}))
    # 800 threads wait 50 ms each; the main thread waits at the same time.
    assert totals.by_state[WaitState.INTERRUPTIBLE] >= 800 * 0.05e9
    assert totals.total_ns < 800 * 0.05e9 + wall + 0.05 * 40e9 + 4 * wall * 0.5


def test_short_lived_processes_have_separate_wait_totals():
    """No process inherits wait times from an earlier process with the same task_struct or id."""
    with running() as sampler:
        read(sampler)
        pids = set()
        for _ in range(300):
            process = subprocess.Popen(["sleep", "0.02"])
            process.wait()
            pids.add(process.pid)
        sampler.drain()
        totals = sampler.read_waits()
        counts = sampler.wait_counts
    mine = {key: one for key, one in totals.items() if key.tgid in pids}
    assert mine
    assert len({key.start_time_ns for key in mine}) == len(mine)
    assert counts.no_room == 0
    # The kernel does not report every switch. The sampler's counts limit how many waits may be
    # missing or begin late. A run queue's clock does not advance between updates.
    missing = pids - {key.tgid for key in mine}
    late = [one for one in mine.values() if one.by_state[WaitState.INTERRUPTIBLE] < 0.016e9]
    assert len(missing) + len(late) <= counts.missed + counts.lost
    with running() as sampler:
        assert not {key for key in sampler.read_waits() if key in mine}


SHORT_OF_DESCRIPTORS = """
import logging, os, resource, time
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig

logging.basicConfig(format="%(message)s")
config = SamplerConfig(target_pids=(os.getpid(),), off_cpu=OffCpuConfig(samples_per_second=9))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

def read():
    time.sleep(0.2)
    sampler.drain()
    return sum(totals.total_ns for totals in sampler.read_waits().values())

sampler = EbpfSampler(config)
sampler.start()
read()
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
assert [read(), read()] == [0, 0]
for file in files:
    os.close(file)
assert read() > 0.5e9
sampler.stop()
"""


def test_wait_totals_are_complete_after_a_shortage_of_descriptors():
    command = [sys.executable, "-c", SHORT_OF_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines().count("waits are reported later: Too many open files") == 1


def test_map_slots_of_exited_threads_are_reused(monkeypatch):
    for name in ("_MIN_THREADS", "_MAX_THREADS"):
        monkeypatch.setattr(wait_follower, name, 32)
    body = """
started = threading.Event()
threads = [threading.Thread(target=started.wait) for _ in range(100)]
[thread.start() for thread in threads]
time.sleep(0.1)
started.set()
[thread.join() for thread in threads]
print("few", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=time.sleep, args=(1,)) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    with Program(body, 60) as program, running(target_pids=(program.process.pid,)) as sampler:
        program.go()
        assert program.process.stdout.readline() == "few\n"
        # A thread releases its slot at its last context switch, unless that switch is missed.
        table = sampler._attached.waits._table
        wait_until(
            lambda: (
                len(table.read()) <= (1 + sampler.wait_counts.missed) * THREAD_BYTES
                and len(os.listdir(f"/proc/{program.process.pid}/task")) == 1
            )
        )
        start = time.monotonic_ns()
        read(sampler)
        full = sampler.wait_counts.no_room
        assert full > 0
        program.go()
        program.reported()
        totals = read(sampler)[program.process.pid]
        passed = time.monotonic_ns() - start
        assert sampler.wait_counts.no_room == full
    assert 8.5e9 < totals.total_ns < 9 * passed, "eight threads, and the one that joins"


def test_only_waits_in_targets_are_counted():
    with (
        Program(SLEEP, 60) as wanted,
        Program(SLEEP, 60) as other,
        running(target_pids=(wanted.process.pid,)) as sampler,
    ):
        wanted.go()
        other.go()
        wanted.wait_for_switches(20)
        other.wait_for_switches(20)
        assert read(sampler).keys() == {wanted.process.pid}
        sampler.retarget((other.process.pid,))
        wanted.wait_for_switches(2)  # ends the wait that has already begun
        read(sampler)
        wanted.wait_for_switches(20)
        other.wait_for_switches(20)
        assert read(sampler).keys() == {other.process.pid}


def test_time_while_the_sampler_is_paused_is_not_counted_as_waiting():
    with running() as sampler, Program(SLEEP, 60) as program:
        program.go()
        program.wait_for_switches(20)
        sampler.pause()
        read(sampler)
        program.wait_for_switches(20)
        time.sleep(1)
        assert read(sampler) == {}
        start = time.monotonic_ns()
        sampler.resume()
        program.wait_for_switches(20)
        totals = read(sampler)[program.process.pid]
        passed = time.monotonic_ns() - start
    assert 0 < totals.total_ns <= 1.01 * passed


def program_names():
    names = []
    for fd in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            names += [line for line in fd.read_text().splitlines() if line.startswith("prog_type")]
    return names


def test_off_cpu_programs_are_not_loaded_unless_configured():
    before = len(program_names())
    with sampling() as sampler:
        assert len(program_names()) == before + 1
        assert sampler.read_waits() == {}
        assert sampler.wait_threshold_ns == 0
    with running():
        assert len(program_names()) > before + 1
    assert len(program_names()) == before


def test_wait_totals_can_be_read_after_the_sampler_has_stopped():
    with running() as sampler, Program(SLEEP, 60) as program:
        program.go()
        program.wait_for_switches(20)
        sampler.stop()
        assert read(sampler)[program.process.pid].total_ns > 0.1e9


@pytest.mark.skipif(not BccLoader.is_installed(), reason="python3-bpfcc is not installed")
def test_bcc_rejects_off_cpu_programs_and_suggests_libbpf():
    sampler = EbpfSampler(SamplerConfig(off_cpu=TOTALS), loader=BccLoader())
    with pytest.raises(HostError, match="bcc cannot load the programs for off-CPU time") as raised:
        sampler.start()
    assert "libbpf1" in raised.value.hint


def test_the_start_time_in_a_process_key_matches_proc_pid_stat():
    with running() as sampler, Program(SLEEP, 60) as program:
        program.go()
        program.wait_for_switches(20)
        (key,) = {key for key in sampler.read_waits() if key.tgid == program.process.pid}
        stat = Path(f"/proc/{program.process.pid}/stat").read_text()
    assert isinstance(key, ProcessKey)
    assert key.start_time_ns // 10_000_000 == int(stat.rsplit(")", 1)[1].split()[19])


SLEEPER = "import time\nwhile True: time.sleep(0.003)"


def test_identical_sleeps_share_a_single_stack_without_scheduler_functions(tmp_path):
    path = str(tmp_path / "waits.otlp")
    with spawned(sys.executable, "-c", SLEEPER) as sleeper:
        wchan = Path(f"/proc/{sleeper.pid}/wchan")
        wait_until(lambda: "nanosleep" in wchan.read_text())
        # Sample only the sleeper and the record command: other processes may block often.
        words = ["--off-cpu", "--no-on-cpu", "--off-cpu-rate", "200", "-d", "2", "-o", path]
        command = [*COMMAND, "record", *words, "-p", str(sleeper.pid)]
        record = subprocess.Popen(["sh", "-c", 'exec "$@" -p $$', "sh", *command])
        assert record.wait(120) == 0
    (window,) = read_profiles(path)
    samples = [
        (resource.attributes.get("process.pid"), sample)
        for resource, sample in window.samples
        if sample.timestamps_unix_ns and sample.weight
    ]
    slept = [one for pid, one in samples if pid == sleeper.pid]
    sides = [
        side
        for sample in slept
        if sample.wait.state is WaitState.INTERRUPTIBLE
        for side in sample.stack.sides
        if side.kind is KERNEL_SIDE
    ]
    # The stack of an unexpectedly long wait is captured while the thread is off-CPU, or not at all.
    stacks = {
        tuple(frame.function for frame in side.frames)
        for side in sides
        if side.status != STACK_NOT_CAPTURED
    }
    assert len(stacks) == 1, stacks
    ((leaf, *_),) = stacks
    assert leaf in ("hrtimer_nanosleep", "common_nsleep", "common_nsleep_timens")
    assert record.pid not in {pid for pid, _ in samples}
