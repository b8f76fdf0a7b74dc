"""Tests the sampler on this kernel: on every CPU, without root, and during CPU hotplug."""

import os
import subprocess
import time

import pytest
from guest.kernel_files import sysctl, write
from guest.modules import spinning
from guest.nobody import as_nobody
from guest.sampled import drain_for, drain_until, finish, sample, sampler

from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import PrivilegeError
from otel_kprofiler.model import KERNEL_SIDE

pytestmark = pytest.mark.kernel

BUSY = ("dd", "if=/dev/zero", "of=/dev/null", "bs=1M")
CPU1 = "/sys/devices/system/cpu/cpu1/online"


@pytest.fixture
def second_cpu():
    if not os.path.exists(CPU1):
        pytest.skip("this boot has one CPU")
    yield
    write(CPU1, "1")


def test_every_cpu_is_sampled_and_every_sample_is_accounted_for():
    """Every online CPU is sampled; taken = received + lost."""
    cpus = os.sched_getaffinity(0)

    def count(samples, cpu):
        return sum(s.cpu == cpu and s.comm == b"dd" and bool(s.words(KERNEL_SIDE)) for s in samples)

    load = [subprocess.Popen(["taskset", "-c", str(cpu), *BUSY], stderr=-3) for cpu in cpus]
    try:
        with sampler() as running:
            samples = drain_until(
                running, lambda result: min(count(result, cpu) for cpu in cpus) >= 50
            )
            samples += finish(running)
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert {cpu: count(samples, cpu) >= 50 for cpu in cpus} == dict.fromkeys(cpus, True)
    assert [s.time_ns for s in samples if s.cpu == 0] == sorted(
        s.time_ns for s in samples if s.cpu == 0
    )


def is_spin(sample):
    return sample.comm == b"kprof_spin"


def test_the_start_time_of_a_process_is_read_through_btf():
    """The process start time in a sample equals the start time in /proc."""
    with spinning():
        with sampler() as running:
            samples = drain_until(running, lambda result: any(map(is_spin, result)))
            finish(running)
        spin = list(filter(is_spin, samples))
        assert spin
        with open(f"/proc/{spin[0].tgid}/stat") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
    assert {s.start_time_ns // 10_000_000 for s in spin} == {ticks}


def test_successive_programs_of_a_process_are_distinguished():
    """Samples carry the execve(2) count, stack start and owner of their process."""
    processes = [subprocess.Popen([*shim, *BUSY], stderr=-3) for shim in ((), ("env",))]
    pids = [process.pid for process in processes]
    try:
        with sampler() as running:
            samples = drain_until(
                running, lambda result: set(pids) <= {s.tgid for s in result if s.comm == b"dd"}
            )
            finish(running)
        stacks = []
        for pid in pids:
            with open(f"/proc/{pid}/stat") as stat:
                stacks.append(int(stat.read().rpartition(")")[2].split()[25]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    first, second = [{s for s in samples if s.tgid == pid and s.comm == b"dd"} for pid in pids]
    assert [{s.stack_start for s in one} for one in (first, second)] == [{at} for at in stacks]
    (once,), (twice,) = [{s.exec_id for s in one} for one in (first, second)]
    assert twice == once + 1
    assert {s.owner for s in first | second} == {0}


def test_sampling_works_without_root():
    """With perf_event_paranoid 2, the sampler runs as nobody with CAP_BPF and CAP_PERFMON."""
    with spinning(), sysctl("kernel.perf_event_paranoid", 2):
        names = as_nobody(("CAP_BPF", "CAP_PERFMON"), lambda: {s.comm for s in sample(1)})
    assert b"kprof_spin" in names


def test_the_error_explains_debians_perf_event_paranoid_level_3():
    """The error names Debian's perf_event_paranoid 3, which requires CAP_SYS_ADMIN."""

    def attempt():
        try:
            sample(0.1)
        except PrivilegeError as error:
            return str(error) + error.hint
        return "started"

    with sysctl("kernel.perf_event_paranoid", 3):
        message = as_nobody(("CAP_BPF", "CAP_PERFMON"), attempt)
    assert "perf_event_paranoid" in message


@pytest.mark.parametrize(
    ("capabilities", "missing"),
    [((), ("CAP_BPF", "CAP_PERFMON")), (("CAP_BPF",), ("CAP_PERFMON",))],
    ids=["none", "bpf"],
)
def test_the_error_names_missing_capabilities(capabilities, missing):
    """Without the required capabilities, the sampler fails and reports which are missing."""

    def attempt():
        try:
            sample(0.1)
        except PrivilegeError as error:
            return error.missing
        return "started"

    assert as_nobody(capabilities, attempt) == missing


def assert_cpu1_is_sampled(running):
    busy = subprocess.Popen(["taskset", "-c", "1", *BUSY], stderr=-3)
    try:
        samples = drain_until(running, lambda samples: len(on_cpu1(samples)) >= 50)
    finally:
        busy.kill()
        busy.wait()
    assert len(on_cpu1(samples)) >= 50
    assert running.cpus == (0, 1)


def on_cpu1(samples):
    return [s for s in samples if s.cpu == 1 and s.comm == b"dd"]


def test_a_cpu_taken_offline_and_brought_back_online_is_sampled_again(second_cpu):
    """A CPU taken offline and brought back is sampled again within seconds."""
    with sampler() as running:
        write(CPU1, "0")
        drain_for(running, 2.5)
        assert running.cpus == (0,)
        write(CPU1, "1")
        assert_cpu1_is_sampled(running)
        finish(running)


def test_a_cpu_that_is_briefly_offline_between_checks_is_sampled_again(second_cpu):
    """A CPU that is briefly offline between two checks is sampled again."""
    with sampler() as running:
        drain_for(running, 0.5)
        write(CPU1, "0")
        write(CPU1, "1")
        assert_cpu1_is_sampled(running)
        finish(running)


def test_samples_stay_in_order_when_the_wall_clock_is_stepped():
    """Samples stay in order when the wall clock is stepped; the next sync measures the step."""
    clock = Clock()
    with spinning(cpu=0), sampler() as running:
        samples = drain_for(running, 0.5)
        step_ns = 3600 * 10**9
        time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() + step_ns)
        try:
            moved_ns = clock.sync()
            samples += drain_for(running, 0.5) + finish(running)
        finally:
            time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() - step_ns)
    assert abs(moved_ns - step_ns) < 10**9
    times = [s.time_ns for s in samples if s.cpu == 0]
    assert times == sorted(times)
    assert times[-1] - times[0] < 60 * 10**9
