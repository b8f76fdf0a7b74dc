"""The eBPF sampler's samples are correct on the running kernel."""

import contextlib
import itertools
import os
import resource
import signal
import statistics
import struct
import sys
import threading
import time

import pytest
from samplers import collect, drain_until, load, offline, record_and_replay, sampling

from otel_kprofiler.bpf.layout import parse_counts
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import Access
from otel_kprofiler.model import (
    KERNEL_SIDE,
    STACK_OK,
    STACK_TRUNCATED,
    USER_SIDE,
    LossCause,
    parse_user_stack,
)
from otel_kprofiler.sampling import EbpfSampler, HeldCommand, SamplerConfig
from otel_kprofiler.symbols import KernelSymbolizer
from tests.further import further
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("loader")]

SPIN = "while True: pass"
FORK = """
import os
parent = os.getpid()
while not os.path.exists({path!r}): pass
if os.fork() == 0:
    while os.getppid() == parent: pass
else:
    while True: pass
"""
READ = "while True: open('/proc/stat').read()"


def collect_until(sampler, wanted, *, count=1):
    """Collects samples until ``count`` of them match."""
    return drain_until(sampler, lambda samples: sum(map(wanted, samples)) >= count)


def anything(_sample):
    return True


def in_kernel(sample):
    return bool(sample.words(KERNEL_SIDE))


def typical_period_ns(samples):
    """Returns the median period, which occasional delays on a busy machine do not affect."""
    times = [[s.time_ns for s in samples if s.cpu == cpu] for cpu in range(os.cpu_count())]
    return statistics.median(b - a for a, b in itertools.pairwise(sorted(max(times, key=len))))


def assert_accounted(sampler, received):
    counts = sampler.counts()["on_cpu"]
    assert counts.received == received
    assert counts.taken == counts.received + sum(counts.lost.values())
    return counts


def boot_ns():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def test_starting_the_sampler_takes_little_cpu_time(loader):
    """The limits are ten times the typical values, because other load also increases CPU time."""
    limit_s = {"libbpf": 4.0, "bcc": 60.0}[loader]  # bcc compiles the program
    with load(SPIN):
        started = time.process_time()
        with sampling(stacks="both") as sampler:
            took = time.process_time() - started
            collect_until(sampler, anything)
    assert took < limit_s


def test_samples_contain_the_process_its_start_time_and_the_cpu():
    before = boot_ns()
    with load(READ) as pid, sampling(samples_per_second=999, stacks="both") as sampler:
        samples = collect_until(sampler, lambda s: s.tgid == pid and in_kernel(s), count=100)
        online = sampler.cpus
        with open(f"/proc/{pid}/stat") as stat:
            start_ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    own = [sample for sample in samples if sample.tgid == pid]
    for sample in own:
        assert sample.tid == pid
        assert sample.comm == os.path.basename(os.path.realpath(sys.executable)).encode()[:15] or (
            sample.comm == os.path.basename(sys.executable).encode()[:15]
        )
        assert sample.start_time_ns // 10_000_000 == start_ticks, "as /proc says, in ticks"
        assert before < sample.time_ns < boot_ns()
        assert sample.cpu in online
    with_kernel = list(filter(in_kernel, own))
    assert all(struct.unpack_from("<Q", s.words(KERNEL_SIDE))[0] >> 63 for s in with_kernel)
    with_user = [sample for sample in with_kernel if sample.words(USER_SIDE)]
    assert len(with_user) > len(with_kernel) // 2, "a system call has a user stack below it"
    assert not any(parse_user_stack(s.words(USER_SIDE)).addresses[0] >> 47 for s in with_user)


@pytest.mark.parametrize("loader", ["libbpf", *further("bcc")], indirect=True)
@pytest.mark.parametrize("rate", [4999, *further(99)])
def test_every_sample_taken_is_received(rate):
    with (
        load(READ),
        load(SPIN),
        # The ring can hold several seconds of samples, in case this process is not scheduled.
        sampling(samples_per_second=rate, stacks="both", map_scale_factor=3) as sampler,
    ):
        samples = collect(sampler, 1, interval_s=0.25)
        samples += collect_until(sampler, anything, count=rate)
        sampler.stop()
        samples += sampler.drain()
        counts = assert_accounted(sampler, len(samples))
        assert not counts.lost
        assert typical_period_ns(samples) == pytest.approx(10**9 / rate, rel=0.2)
        time.sleep(0.05)
        assert sampler.drain() == [], "nothing is sampled after the stop"
        assert sampler.counts()["on_cpu"] == counts
    assert sampler.counts()["on_cpu"] == counts, "the last counts outlive the sampler"


def test_no_sample_is_older_than_the_watermark():
    """The test drains often, at a high sampling rate, to encounter half-written records."""
    with load(READ), load(READ), sampling(samples_per_second=10_000, stacks="both") as sampler:
        end, complete, advanced = time.monotonic() + 2, 0, 0
        while time.monotonic() < end or advanced < 10:
            began_ns = boot_ns()
            samples = sampler.drain()
            late = [s.time_ns - complete for s in samples if s.time_ns < complete]
            assert not late
            advanced += sampler.complete_until_ns() > complete
            complete = sampler.complete_until_ns()
        assert began_ns - complete < 1_000_000_000


def test_samples_lost_to_a_full_ring_buffer_are_counted_exactly():
    with (
        load(READ),
        load(READ),
        sampling(samples_per_second=10_000, stacks="both", max_ring_bytes=4 << 20) as sampler,
    ):
        lines = sampler._attached.lines
        wait_until(lambda: parse_counts(lines.copy())[0].ring_full)
        sampler.stop()
        counts = assert_accounted(sampler, len(sampler.drain()))
        assert counts.lost[LossCause.RING_FULL] > 0
        assert counts.received > 1000


def test_waiting_ends_when_the_ring_buffer_fills_to_its_wakeup_level():
    with (
        load(READ),
        load(READ),
        sampling(samples_per_second=10_000, stacks="both", max_ring_bytes=4 << 20) as sampler,
    ):
        started = time.monotonic()
        sampler.wait(60)
        waited = time.monotonic() - started
        used = sum(
            len(s.words(KERNEL_SIDE)) + len(s.words(USER_SIDE)) + 88 for s in sampler.drain()
        )
        assert waited < 50
        assert used > 100_000, "woken by the fill mark, not by every record"
        # Each record above the fill mark may have caused another wake-up.
        woken = (is_woken(sampler) for _ in range(1000))
        assert not all(woken), "a ring with a few records wakes nobody"


def is_woken(sampler):
    started = time.monotonic()
    sampler.wait(0.1)
    waited = time.monotonic() - started
    sampler.drain()
    return waited < 0.05


def test_a_waiting_reader_is_woken_by_another_thread():
    with sampling(target_pids=(1 << 22,)) as sampler:
        timer = threading.Timer(0.1, sampler.wake)
        timer.start()
        started = time.monotonic()
        sampler.wait(30)
        assert time.monotonic() - started < 10
        timer.join()
        started = time.monotonic()
        sampler.wait(0.1)
        assert time.monotonic() - started > 0.05, "one wake ends one wait"
        threading.Timer(0.1, sampler.wake).start()
        assert not sampler.wait_first(600)


def test_target_pids_are_filtered_in_the_kernel():
    with (
        load(SPIN),
        load(SPIN) as pid,
        sampling(samples_per_second=499, stacks="both", target_pids=(pid,)) as sampler,
    ):
        samples = collect_until(sampler, anything, count=50)
        counts = sampler.counts()["on_cpu"]
    assert {sample.tgid for sample in samples} == {pid}
    assert counts.filtered["target"] > 0


def test_processes_below_the_minimum_age_are_not_sampled():
    age = 1_500_000_000
    with (
        sampling(samples_per_second=499, stacks="user", min_process_age_ns=age) as sampler,
        load(SPIN) as pid,
    ):
        samples = collect_until(sampler, lambda sample: sample.tgid == pid)
        assert sampler.counts()["on_cpu"].filtered["age"] > 0
    assert all(s.time_ns - s.start_time_ns >= age for s in samples if s.start_time_ns)


def test_user_mode_is_not_sampled_if_only_kernel_stacks_are_enabled():
    with load(READ), sampling(samples_per_second=999, stacks="kernel") as sampler:
        samples = collect_until(sampler, anything, count=100)
        assert sampler.counts()["on_cpu"].filtered["empty"] > 0
    assert all([side.kind for side in s.sides] == [KERNEL_SIDE] for s in samples)
    assert all(s.words(KERNEL_SIDE) for s in samples)


def test_samples_have_no_kernel_stacks_if_only_user_stacks_are_enabled():
    with load(READ), sampling(samples_per_second=999, stacks="user") as sampler:
        samples = collect_until(sampler, anything, count=100)
    assert all([side.kind for side in s.sides] == [USER_SIDE] for s in samples)
    assert all(s.words(USER_SIDE) for s in samples)


def test_the_frame_limit_keeps_the_leaf_and_marks_the_stack_as_truncated():
    with load(READ), sampling(samples_per_second=999, stacks="kernel", max_frames=3) as sampler:
        samples = collect_until(sampler, lambda sample: len(sample.words(KERNEL_SIDE)) == 24)
    assert max(len(s.words(KERNEL_SIDE)) for s in samples) == 24
    for sample in samples:
        full = len(sample.words(KERNEL_SIDE)) == 24
        assert sample.sides[0].status == (STACK_TRUNCATED if full else STACK_OK)


def test_only_cpus_in_pin_cpu_ids_are_sampled():
    with load(SPIN, cpu=0), sampling(samples_per_second=499, stacks="both", pin_cpu_ids=(0,)) as s:
        samples = collect_until(s, anything, count=50)
        assert s.cpus == (0,)
    assert {sample.cpu for sample in samples} == {0}


def idle_ticks(cpu):
    with open("/proc/stat") as stat:
        line = next(line for line in stat if line.startswith(f"cpu{cpu} "))
    return int(line.split()[4])


@contextlib.contextmanager
def idling(cpu):
    """Skips the test if it fails because another load keeps the CPU busy."""
    before = idle_ticks(cpu)
    try:
        yield
    except AssertionError:
        if idle_ticks(cpu) - before < 10:
            pytest.skip(f"CPU {cpu} is never idle: other work keeps it busy")
        raise


def test_the_idle_task_is_sampled_only_on_request():
    with (
        idling(0),
        sampling(samples_per_second=499, pin_cpu_ids=(0,), send_idle_frames=True) as sampler,
    ):
        idle = collect_until(sampler, lambda sample: sample.tid == 0)
        assert sampler.counts()["on_cpu"].filtered["idle"] == 0
    assert any(sample.comm.startswith(b"swapper/") for sample in idle)
    with sampling(samples_per_second=499, pin_cpu_ids=(0,)) as sampler:
        samples = collect(sampler, 1)
        assert all(sample.tid for sample in samples), "without ranges all of pid 0 is left out"


FLOOD = """
import socket
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
data = bytes(1000)
while True:
    try:
        out.sendto(data, ("127.0.0.1", 9))
    except OSError:
        pass
"""


def test_samples_in_interrupts_on_an_idle_cpu_are_kept():
    """Packets are sent on CPU 1 and received, using packet steering, in softirqs on an idle CPU 0.

    CPU 0 is the idle CPU because timers do not fire on an idle CPU 1 in some guests.
    """
    steering = "/sys/class/net/lo/queues/rx-0/rps_cpus"
    if os.cpu_count() < 2 or not os.path.exists(steering):
        pytest.skip("needs two CPUs and packet steering (CONFIG_RPS)")
    ranges = tuple(
        (r.start, r.end) for r in KernelSymbolizer.live(Access()).snapshot.interrupt_ranges()
    )
    assert ranges, "the kernel's symbols are hidden"
    with open(steering) as file:
        before = file.read()
    try:
        with open(steering, "w") as file:
            file.write("1")
        with (
            idling(0),
            sampling(samples_per_second=1999, pin_cpu_ids=(0,), interrupt_ranges=ranges) as sampler,
        ):
            with load(FLOOD, cpu=1):
                samples = collect_until(sampler, lambda sample: sample.tid == 0)
                samples += collect(sampler, 1)
            # The flood may leave CPU 0 no idle time, so check for idle ticks afterwards.
            samples += drain_until(sampler, lambda _: sampler.counts()["on_cpu"].filtered["idle"])
    finally:
        with open(steering, "w") as file:
            file.write(before)
    for sample in filter(lambda sample: sample.tid == 0, samples):
        frames = struct.unpack(
            f"<{len(sample.words(KERNEL_SIDE)) // 8}Q", sample.words(KERNEL_SIDE)
        )
        assert any(start <= pc < end for pc in frames for start, end in ranges)


@pytest.mark.changes_host
def test_a_cpu_is_sampled_again_once_it_is_back_online():
    with sampling(samples_per_second=199, stacks="both") as sampler:
        with offline(1):
            collect(sampler, 1.3)
            assert 1 not in sampler.cpus
        with load(SPIN, cpu=1):
            samples = collect_until(sampler, lambda sample: sample.cpu == 1)
        assert 1 in sampler.cpus
        sampler.stop()
        samples += sampler.drain()
        counts = sampler.counts()["on_cpu"]
        assert counts.taken == counts.received + sum(counts.lost.values())


@pytest.mark.changes_host
def test_a_briefly_offline_cpu_is_sampled_again():
    """If a CPU is offline only between two checks of the CPU list, neither check detects it."""
    with sampling(samples_per_second=199, stacks="both") as sampler:
        collect(sampler, 0.1)
        with offline(1):
            pass
        with load(SPIN, cpu=1):
            collect_until(sampler, lambda sample: sample.cpu == 1)


def test_a_command_and_its_children_are_sampled_from_the_first_instruction():
    child = "for i in range(2 * 10**7): pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', '{child}'])"
    with load(SPIN) as other, HeldCommand([sys.executable, "-S", "-c", code]) as command:
        config = SamplerConfig(samples_per_second=999, stacks="both", child_pid=command.pid)
        sampler = EbpfSampler(config)
        sampler.start()
        assert collect(sampler, 0.2) == [], "nothing before the command is executed"
        command.release()
        samples = []
        while command.poll() is None:
            samples += collect(sampler, 0.05)
        samples += sampler.drain()
        sampler.stop()
        samples += sampler.drain()
        assert_accounted(sampler, len(samples))
        sampler.close()
    assert command.poll() == 0
    by_process = {tgid: len(list(group)) for tgid, group in itertools.groupby(
        sorted(sample.tgid for sample in samples))}  # fmt: skip
    assert other not in by_process
    assert command.pid in by_process
    assert max(count for tgid, count in by_process.items() if tgid != command.pid) > 100


def test_a_command_held_before_exec_can_be_released_or_abandoned():
    with HeldCommand(["sh", "-c", "test ! -e /dev/fd/3 && exit 7"]) as command:
        command.release()
    assert command.poll() == 7
    with HeldCommand(["true"]) as command:
        assert command.poll() is None
    assert command.poll() == 125


def test_replaying_a_recording_yields_the_same_samples(tmp_path):
    config = SamplerConfig(samples_per_second=499, stacks="both")
    with load(READ):
        samples, _ = record_and_replay(config, 0.5, str(tmp_path / "a"))
    assert samples


def test_closing_the_sampler_closes_every_descriptor():
    def descriptors():
        return sorted(os.listdir("/proc/self/fd"))

    before, limit = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with sampling():
        assert len(descriptors()) > len(before)
    assert descriptors() == before
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 3, limit[1]))
    try:
        with pytest.raises(KProfilerError):
            EbpfSampler(SamplerConfig()).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert descriptors() == before


def test_an_idle_reader_is_woken_by_the_first_sample():
    with load(SPIN) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        with sampling(target_pids=(pid,), stacks="both", samples_per_second=99) as sampler:
            sampler.wait(0.05)
            sampler.drain()
            assert not sampler.wait_first(0.2)
            assert sampler.drain() == []
            threading.Timer(0.1, os.kill, (pid, signal.SIGCONT)).start()
            assert sampler.wait_first(600)
            assert sampler.drain()


def test_waiting_for_new_processes_ends_only_when_a_new_process_is_sampled(tmp_path):
    path = tmp_path / "fork"
    with (
        load(FORK.format(path=str(path))) as pid,
        sampling(target_pids=(pid,), target_descendants=True, samples_per_second=99) as sampler,
    ):
        sampler.wait_first(600)
        sampler.drain()
        began = time.monotonic()
        sampler.wait_new(0.05, 0.5)
        assert time.monotonic() - began >= 0.4, "the older process ended it"
        collect(sampler, 0.1)
        path.touch()
        sampler.wait_new(0.05, 600)
        assert {sample.tgid for sample in sampler.drain()} - {pid}


def test_the_first_sample_does_not_wake_a_reader_that_waits_for_many_samples():
    with load(SPIN) as pid, sampling(target_pids=(pid,), stacks="both") as sampler:
        assert sampler.wait_first(600)
        before = time.monotonic()
        sampler.wait(0.5)
        assert time.monotonic() - before >= 0.4


def test_the_run_time_of_the_bpf_program_grows_with_the_sample_count():
    began = time.monotonic_ns()
    with load(SPIN) as pid, sampling(target_pids=(pid,), stacks="both") as sampler:
        assert sampler.busy_ns == 0
        assert 100 * len(collect_until(sampler, anything, count=10)) < sampler.busy_ns
    assert sampler.busy_ns < (time.monotonic_ns() - began) * os.cpu_count()
