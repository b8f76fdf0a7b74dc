"""Compares sampled waits with exact totals and with the programs' records."""

import bisect
import contextlib
import json
import math
import mmap
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from samplers import collect, drain_until, record_and_replay, sampling, spawned

from otel_kprofiler.bpf import WAIT_HAS_BEGUN
from otel_kprofiler.bpf.wait_maps import THREAD_BYTES
from otel_kprofiler.host import Access
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    STACK_NOT_CAPTURED,
    USER_SIDE,
    Stack,
    WaitStacks,
    WaitState,
)
from otel_kprofiler.pipeline import open_symbols
from otel_kprofiler.sampling import OffCpuConfig, SamplerConfig
from tests.needs import LIBBPF
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, LIBBPF]


def running(rate=1000, *, wakers=False, **settings):
    off_cpu = OffCpuConfig(samples_per_second=rate, wakers=wakers)
    return sampling(off_cpu=off_cpu, **{"on_cpu": False, **settings})


def program(code, *arguments):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return spawned(sys.executable, "-S", "-c", code, *map(str, arguments), **pipes)


def drain_while(sampler, going_on):
    return drain_until(sampler, lambda _: not going_on()) + sampler.drain()


def wait_asleep(process):
    wchan = Path(f"/proc/{process.pid}/wchan")
    wait_until(lambda: "nanosleep" in wchan.read_text())


@contextlib.contextmanager
def sampled(code, *arguments, **settings):
    """Runs a program, and samples only its waits, not those of other processes."""
    held = f"import sys\nsys.stdin.readline()\n{code}"
    with (
        program(held, *arguments) as process,
        running(target_pids=(process.pid,), **settings) as sampler,
    ):
        process.stdin.write("\n")
        process.stdin.flush()
        yield sampler, process


@pytest.fixture(scope="module")
def functions():
    places = []
    for line in Path("/proc/kallsyms").read_text().splitlines():
        address, kind, name = line.split()[:3]
        if kind in "tTwW":
            places.append((int(address, 16), name))
    places.sort()

    def find(sample):
        addresses = next(side for side in sample.sides if side.kind is KERNEL_SIDE).addresses()
        return [places[bisect.bisect(places, (address, "~")) - 1][1] for address in addresses]

    return find


MIXED = """
import random, sys, threading, time
rng, end = random.Random(int(sys.argv[1])), time.monotonic() + float(sys.argv[2])
def wait():
    while time.monotonic() < end:
        time.sleep(min(rng.lognormvariate(-7, 1.5), 0.2))
threads = [threading.Thread(target=wait) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


RUNS = int(os.environ.get("KPROFILER_RUNS", "1"))


@pytest.mark.parametrize("run", range(RUNS))
def test_the_weights_of_sampled_waits_sum_to_about_the_total_wait_time(run):
    """Ten processes are sampled sparsely. Both sums exclude waits that are too short to sample."""
    with running(rate=150) as sampler:
        started = [subprocess.Popen([sys.executable, "-S", "-c", MIXED, str(seed), "8"])
                   for seed in range(10 * run, 10 * run + 10)]  # fmt: skip
        samples = drain_while(sampler, lambda: any(one.poll() is None for one in started))
        totals = {}
        for process, one in sampler.read_waits().items():
            totals[process.tgid] = one.total_ns - one.below_ns
        threshold = sampler.wait_threshold_ns
        counts = sampler.counts()["off_cpu"]
    assert counts.taken == counts.received + sum(counts.lost.values())
    assert counts.received == len(samples)
    assert threshold > 1_000_000, "or everything was sampled"
    waits = defaultdict(lambda: [0, 0])
    for sample in samples:
        wait = waits[sample.tgid, sample.tid, sample.wait.start_ns]
        wait[0] += sample.value
        wait[1] += sample.wait.duration_ns
    raised = [value for value, duration in waits.values() if value > duration]
    usual = sum(raised) / len(raised)  # approximately the threshold, which varies
    close = 0
    estimate, exact, variance = 0, 0, 0.0
    for process in started:
        of_process = [wait for key, wait in waits.items() if key[0] == process.pid]
        weight = sum(value for value, _ in of_process)
        spread = sum(value * (value - duration) for value, duration in of_process)
        # With few samples, the estimate of the error is imprecise.
        error = math.sqrt(max(spread, usual * totals[process.pid])) + 0.01 * totals[process.pid]
        close += abs(weight - totals[process.pid]) <= 5 * error
        estimate, exact, variance = (
            estimate + weight, exact + totals[process.pid], variance + spread,
        )  # fmt: skip
    error = math.sqrt(variance)
    sys.stdout.write(
        f"exactly {exact / 1e6:.1f} ms, by samples {estimate / 1e6:.1f} ± {error / 1e6:.1f} ms:"
        f" {(estimate - exact) / error:+.2f} standard errors\n"
    )
    assert close == 10, "within 5 standard errors"
    assert abs(estimate - exact) <= 5 * error + 0.01 * exact


KNOWN = """
import json, os, sys, threading, time
def clock(wait):
    start = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    wait()
    return start, time.clock_gettime_ns(time.CLOCK_BOOTTIME)
reader, writer = os.pipe()
times = int(sys.argv[1])
def is_reading():
    with open(f"/proc/self/task/{os.getpid()}/wchan") as function:
        return "pipe_read" in function.read()
def write():
    for _ in range(times):
        while not is_reading():
            time.sleep(0.001)
        time.sleep(0.02)
        os.write(writer, b"x")
thread = threading.Thread(target=write)
found = {"sleep": [clock(lambda: time.sleep(0.02)) for _ in range(times)]}
thread.start()
found["pipe"] = [clock(lambda: os.read(reader, 1)) for _ in range(times)]
thread.join()
locked = threading.Lock()
locked.acquire()
found["futex"] = [clock(lambda: locked.acquire(timeout=0.02)) for _ in range(times)]
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""
SLEEPS_IN = {"sleep": "hrtimer_nanosleep", "pipe": "pipe_read", "futex": "futex_wait"}


WAITS = int(os.environ.get("KPROFILER_WAITS", "20"))


def test_wait_samples_have_the_correct_duration_and_stack(functions):
    with sampled(KNOWN, WAITS, stacks="both") as (sampler, process):
        samples = collect(sampler, 1 + 0.06 * WAITS)
        known = json.loads(process.stdout.readline())
        samples += sampler.drain()
    mine = [sample for sample in samples if sample.tid == process.pid]
    for name, waits in known.items():
        result, unknown, missing = 0, 0, []
        for start, end in waits:
            parts = [one for one in mine if start <= one.wait.start_ns <= end]
            asleep = [part for part in parts if part.wait.state is WaitState.INTERRUPTIBLE]
            if not asleep:
                unknown += 1
                continue
            result += any(SLEEPS_IN[name] in " ".join(functions(one)) for one in asleep)
            missing.append(end - start - sum(part.wait.duration_ns for part in parts))
            assert missing[-1] >= -0.001 * (end - start), "the clocks may differ in speed"
            if name == "sleep":
                assert max(one.wait.duration_ns for one in asleep) >= 0.019e9
        within = sum(one < 100_000 for one in missing) / len(missing)
        sys.stdout.write(f"{name}: {result} of {len(waits)}, {within:.1%} within 0.1 ms\n")
        # The kernel does not report every switch, so a few waits lack a start and its stack.
        unreported = 0.01 * WAITS
        assert result >= WAITS - unreported - 5 * math.sqrt(unreported), (name, unknown)


def test_wait_samples_contain_the_stack_of_the_sleeping_thread(functions):
    def find_asleep(samples):
        return [s for s in samples if s.wait.state is WaitState.INTERRUPTIBLE]

    with sampled("import time\nwhile 1: time.sleep(0.05)", stacks="both") as (sampler, process):
        wait_asleep(process)
        samples = drain_until(sampler, lambda samples: len(find_asleep(samples)) > 20)
    samples = [s for s in samples if s.tid == process.pid]
    asleep = find_asleep(samples)
    known = [s for s in asleep if s.words(USER_SIDE)]
    assert len(known) > len(asleep) / 2
    for sample in known:
        names = functions(sample)
        # Frames from context-switch tracers may precede __schedule.
        at = names.index("__schedule")
        assert names[at : at + 2] == ["__schedule", "schedule"]
    assert len({s.comm for s in samples}) == 1
    assert {s.kind for s in samples} == {OFF_CPU}
    assert len({s.start_time_ns for s in samples}) == 1


def test_stacks_from_the_start_and_the_end_of_a_wait_have_the_same_leaf():
    with contextlib.closing(open_symbols(Access())) as symbols:
        stacks = WaitStacks(symbols.snapshot.scheduler_rvas())
        leaves = {True: set(), False: set()}  # by whether the stack is from a wait's start

        def has_both(samples):
            for sample in samples:
                (raw,) = [side.addresses() for side in sample.sides if side.kind is KERNEL_SIDE]
                stack = Stack.from_frames(symbols.resolve_addresses(raw, time_ns=sample.time_ns))
                leaf = stacks.cut(stack).frames[0]
                if leaf.function == "hrtimer_nanosleep":
                    leaves[bool(sample.words(USER_SIDE))].add(leaf.address)
            return all(leaves.values())

        with sampled(MIXED, 1, 600, stacks="both", rate=50) as (sampler, _):
            drain_until(sampler, has_both)
    assert leaves[True] == leaves[False]


# Offsets in ``struct thread`` (``wait_types.bpf.h``), in 32-bit words.
SINCE, STATE, FLAGS, TID, RAN = 2, 7, 10, 37, 41


def test_a_wait_after_a_missed_context_switch_has_no_start_time():
    """The kernel misses some context switches, so a wait's stored span may be outdated."""
    code = "import time\nwhile True: time.sleep(0.2)"
    changed = set()

    def find_statuses(samples):
        return [
            dict(sample.collected)[USER_SIDE]
            for sample in samples
            if sample.tid == process.pid and sample.wait.state is WaitState.INTERRUPTIBLE
        ]

    def count_unknown(samples):
        return find_statuses(samples).count(STACK_NOT_CAPTURED)

    with sampled(code, stacks="both") as (sampler, process), contextlib.ExitStack() as end:
        table = sampler._attached.waits._table
        size = table._places * THREAD_BYTES
        threads = end.enter_context(mmap.mmap(table._threads_fd, size))
        words = end.enter_context(memoryview(threads)[:size].cast("I"))

        def change():
            for at in range(0, len(words), THREAD_BYTES // 4):
                since = words[at + SINCE]
                if words[at + TID] != process.pid or since in changed:
                    continue
                if since and words[at + STATE] and words[at + FLAGS] & WAIT_HAS_BEGUN:
                    words[at + RAN] ^= 1
                    changed.add(since)
            return len(changed) > 3

        samples = drain_while(sampler, lambda: not change())
        # One thread may be woken while its wait is being changed.
        wanted = len(changed) - 1 - count_unknown(samples)
        samples += drain_until(sampler, lambda later: count_unknown(later) >= wanted)
    assert count_unknown(samples) >= len(changed) - 1, find_statuses(samples)


def test_an_ongoing_wait_is_sampled(functions):
    with sampled("import time; time.sleep(600)") as (sampler, process):
        wait_asleep(process)
        collect(sampler, 1)
        sampler.read_waits()
        first = collect(sampler, 1)
        sampler.read_waits()
        second = sampler.drain()
    (one,), (two,) = first, second
    assert not one.wait.is_ended
    assert one.wait.start_ns == two.wait.start_ns
    assert one.value >= 0.5e9
    assert two.value == two.wait.duration_ns >= 1e9, "what came since then"
    assert "nanosleep" in " ".join(functions(two))


def test_a_stuck_thread_is_sampled_although_its_earlier_waits_were_short(functions):
    """With twenty stuck threads, most waits are short, and the starts of waits are not reported."""
    code = """
import sys, threading, time
def work():
    for _ in range(300):
        time.sleep(0.0001)
    time.sleep(60)
for _ in range(20):
    threading.Thread(target=work, daemon=True).start()
time.sleep(60)
"""
    # Ongoing waits are sampled at half the rate of completed waits.
    with sampled(code, rate=100) as (sampler, process):
        result, end = {}, time.monotonic() + 60
        while len(result) < 21:
            assert time.monotonic() < end, result
            collect(sampler, 1)
            sampler.read_waits()
            result |= {
                sample.tid: sample
                for sample in sampler.drain()
                if sample.tgid == process.pid and not sample.wait.is_ended
            }
        counts = sampler.counts()["off_cpu"]
    assert counts.taken == counts.received + sum(counts.lost.values())
    for sample in result.values():
        assert "nanosleep" in " ".join(functions(sample))
        assert sample.comm
        assert sample.wait.state is WaitState.INTERRUPTIBLE


def test_preempted_threads_are_recorded_as_waiting_for_a_cpu():
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile 1: pass"
    states = defaultdict(int)
    with program(spin) as first, program(spin) as second:
        first.stdout.readline()
        second.stdout.readline()
        with running(target_pids=(first.pid, second.pid)) as sampler:
            samples = drain_until(sampler, lambda samples: sum(s.value for s in samples) > 1e9)
    for sample in samples:
        states[sample.wait.state] += sample.value
    assert states[WaitState.RUNNABLE] > 0.9 * sum(states.values())


TWO_THAT_WAKE_EACH_OTHER = """
import os, time
a, b = os.pipe()
c, d = os.pipe()
child = os.fork()
if child:
    print(child, flush=True)
    while True:
        os.write(b, b"x")
        os.read(c, 1)
        time.sleep(0.01)
os.close(b)
while os.read(a, 1):
    os.write(d, b"x")
"""


def test_wait_samples_identify_the_waking_thread_only_while_wakers_are_enabled():
    def since_change(samples):
        return [s.wait for s in samples if s.tid == child and s.wait.start_ns > changed_ns]

    def find_wakers(samples):
        asleep = [w for w in since_change(samples) if w.state is WaitState.INTERRUPTIBLE]
        return [wait.waker for wait in asleep if wait.waker or not wakers]

    with program(TWO_THAT_WAKE_EACH_OTHER) as process:
        child = int(process.stdout.readline())
        with running(wakers=True, target_pids=(child,)) as sampler:
            for wakers in (True, False, True):
                off_cpu = OffCpuConfig(samples_per_second=1000, wakers=wakers)
                config = SamplerConfig(on_cpu=False, target_pids=(child,), off_cpu=off_cpu)
                sampler.reconfigure(config)
                changed_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
                samples = drain_until(sampler, lambda samples: len(find_wakers(samples)) > 50)
                result = find_wakers(samples)
                if not wakers:
                    assert not any(result)
                    continue
                assert [w.tid for w in result].count(process.pid) > 0.9 * len(result)
                assert any(waker.comm.startswith(b"python") for waker in result)


def test_on_cpu_and_off_cpu_time_are_sampled_together():
    with running(on_cpu=True, samples_per_second=199) as sampler, program("while 1: pass"):
        samples = drain_until(sampler, lambda samples: len({s.kind for s in samples}) == 2)
        sampler.stop()
        samples += sampler.drain()
        counts = sampler.counts()
    assert {s.kind for s in samples} == {ON_CPU, OFF_CPU}
    for kind in (ON_CPU, OFF_CPU):
        one = counts[kind.name]
        assert one.received == sum(s.kind is kind for s in samples)
        assert one.taken == one.received + sum(one.lost.values())


@pytest.mark.long
def test_a_lower_rate_yields_fewer_samples():
    with running(rate=500) as sampler, program("import time\nwhile 1: time.sleep(0.001)"):
        collect(sampler, 4)
        before = sampler.wait_threshold_ns
        sampler.reconfigure(SamplerConfig(on_cpu=False, off_cpu=OffCpuConfig(samples_per_second=5)))
        collect(sampler, 8)
        assert sampler.wait_threshold_ns > before


def test_replays_report_the_recorded_waits(tmp_path):
    config = SamplerConfig(on_cpu=False, off_cpu=OffCpuConfig(samples_per_second=1000))
    samples, counts = record_and_replay(config, 2, str(tmp_path / "raw"))
    assert counts["off_cpu"].received == len(samples) > 0
