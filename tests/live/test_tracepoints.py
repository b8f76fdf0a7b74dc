"""Samples at raw tracepoints match the program's events, including values and stacks."""

import os
import subprocess
import sys

import pytest
from samplers import started
from test_events import record, report

from otel_kprofiler.host import parse_event
from otel_kprofiler.model import LossCause
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

pytestmark = pytest.mark.live

OPENS, PACKETS, PAGES, WRITES = 3_000, 400, 20_000, 64
PAYLOAD, WRITE = 100, 65_536
QUEUE = 10
"""The minimum number of datagrams that a socket queues (net.unix.max_dgram_qlen)."""
LOAD = f"""
import mmap, os, socket, sys
def open_files():
    for _ in range({OPENS}):
        os.close(os.open("/dev/null", os.O_RDONLY))
def send():
    for _ in range({PACKETS} // {QUEUE}):
        sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for _ in range({QUEUE}):
            sender.send(bytes({PAYLOAD}))
        receiver.close()  # drops the queued datagrams in this process
        sender.close()
def touch():
    memory = mmap.mmap(-1, {PAGES} * mmap.PAGESIZE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range({PAGES}):
        memory[page * mmap.PAGESIZE] = 1
def write():
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    for number in range({WRITES}):
        os.pwrite(file, mmap.mmap(-1, {WRITE}), number * {WRITE})
open_files()
send()
touch()
if len(sys.argv) > 1:
    write()
"""


def has_disk(directory):
    """Returns whether the directory is on a block device that supports direct I/O."""
    path = directory / "probe"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    device = path.stat().st_dev
    return os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tracepoints")
    arguments = [str(directory / "file")] if has_disk(directory) else []
    path = str(directory / "x.otlp")
    names = ("syscalls:sys_enter_openat", "skb:kfree_skb", "mm_page_alloc", "block_bio_queue")
    command = (sys.executable, "-S", "-c", LOAD, *arguments)
    done = record(path, *(word for name in names for word in ("-e", name)), run=command)
    assert done.returncode == 0, done.stderr
    assert "accounting gap" not in done.stderr
    assert "lost 0" in done.stderr
    return report(path), bool(arguments)


def total_of(part, function):
    return sum(group["total"] for group in part["groups"] if group["name"] == function)


def test_each_openat_call_yields_a_sample_with_its_python_function(recorded):
    assert total_of(recorded[0]["sys_enter_openat"], "open_files") == OPENS


def test_samples_of_dropped_packets_count_bytes(recorded):
    assert total_of(recorded[0]["kfree_skb"], "send") == PACKETS * PAYLOAD
    assert recorded[0]["kfree_skb"]["unit"] == "bytes"


def test_page_allocation_samples_are_weighted_in_bytes(recorded):
    """The total also includes one page table for every 512 pages."""
    allocated = total_of(recorded[0]["mm_page_alloc"], "touch") / os.sysconf("SC_PAGE_SIZE")
    assert PAGES <= allocated <= PAGES * 1.02


def test_block_request_samples_are_weighted_in_bytes(recorded):
    if not recorded[1]:
        pytest.skip("the temporary directory is not on a block device")
    written = total_of(recorded[0]["block_bio_queue"], "write")
    assert WRITES * WRITE <= written <= WRITES * WRITE * 1.2  # plus file system metadata


def test_bpf_tracing_functions_are_never_the_leaf_in_a_tracepoint_sample(recorded):
    leaves = {
        group["name"] for part in recorded[0].values() for group in part["groups"] if group["self"]
    }
    assert leaves
    assert not [name for name in leaves if "kprofiler" in name or "bpf_trace" in name]


def run_sampler(config, action):
    with started(EbpfSampler(config)) as sampler:
        action(sampler)
        sampler.stop()
        return sampler.drain(), sampler.counts()


def open_files(number=OPENS):
    for _ in range(number):
        os.close(os.open("/dev/null", os.O_RDONLY))


def configure(*texts, **settings):
    events = tuple(parse_event(text, 99) for text in texts)
    settings = {"on_cpu": False, "target_pids": (os.getpid(),), **settings}
    return SamplerConfig(events=events, **settings)


def test_with_a_period_of_n_every_nth_event_is_sampled():
    config = configure("sys_enter:openat:period=10", target_pids=(), stacks="both")
    samples, counts = run_sampler(config, lambda sampler: open_files())
    (kind,) = counts.values()
    mine = [sample for sample in samples if sample.tgid == os.getpid()]
    assert {sample.value for sample in mine} == {10}
    assert sum(sample.value for sample in mine) == pytest.approx(OPENS, rel=0.05)
    assert kind.taken == kind.received == len(samples)


def test_a_sampler_takes_no_samples_while_it_is_paused():
    def act(sampler):
        open_files(100)
        sampler.pause()
        open_files(1_000)
        sampler.resume()
        open_files(10)

    samples, _ = run_sampler(configure("sys_enter:openat"), act)
    assert 110 <= len(samples) <= 200  # the sampler also opens files


def test_only_events_on_selected_cpus_are_sampled():
    first = min(os.sched_getaffinity(0))
    everywhere = os.sched_getaffinity(0)
    if len(everywhere) == 1:
        pytest.skip("needs two CPUs, to leave one out")
    try:

        def act(_):
            os.sched_setaffinity(0, {first})
            open_files(100)
            os.sched_setaffinity(0, everywhere - {first})
            open_files(1_000)

        samples, _ = run_sampler(configure("sys_enter:openat", pin_cpu_ids=(first,)), act)
    finally:
        os.sched_setaffinity(0, everywhere)
    assert {sample.cpu for sample in samples} == {first}
    assert 100 <= len(samples) <= 200  # the sampler also opens files


def test_samples_that_do_not_fit_into_the_ring_buffer_are_counted():
    """Tracepoints are hit in interrupts, and the clock interrupts their BPF programs."""
    names = ("mm_page_alloc", "sched_waking", "sys_enter", "hrtimer_expire_entry")
    held = (sys.executable, "-S", "-c", f"import sys\nsys.stdin.readline()\n{LOAD}")
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as load:
        config = SamplerConfig(
            samples_per_second=19,
            stacks="both",
            events=tuple(parse_event(name, 99) for name in names),
            max_ring_bytes=1 << 18,
            target_pids=(load.pid,),  # the load's samples fit in a quarter of the ring
        )
        samples, counts = run_sampler(config, lambda _: load.communicate(b"\n"))
    assert load.returncode == 0
    for name, kind in counts.items():
        if name != "off_cpu":
            received = [sample for sample in samples if sample.kind.name == name]
            assert kind.taken == len(received) + sum(kind.lost.values()), name
    assert counts["sys_enter"].lost[LossCause.RING_FULL] > 0
    assert not counts["on_cpu"].lost, "events leave a quarter of the ring to other kinds"


@pytest.mark.long
def test_bpf_programs_that_interrupt_each_other_write_intact_records():
    """A timer interrupts tracepoint programs, and its handler also hits a tracepoint."""
    names = ("sys_enter", "hrtimer_expire_entry")
    config = SamplerConfig(
        samples_per_second=4999,
        stacks="both",
        events=tuple(parse_event(name, 99) for name in names),
    )
    load = "import os, time; until = time.time() + 2\nwhile time.time() < until: os.stat('/')"
    samples, counts = run_sampler(
        config, lambda _: subprocess.run([sys.executable, "-S", "-c", load], check=True)
    )
    for name in ("on_cpu", *names):
        received = [sample for sample in samples if sample.kind.name == name]
        assert counts[name].taken == len(received) + sum(counts[name].lost.values()), name
    assert counts["hrtimer_expire_entry"].missed > 0


@pytest.mark.parametrize("text", ["kmem_mm_page_alloc", "mm_page_allocc"])
def test_an_unknown_tracepoint_is_rejected_before_recording_starts(tmp_path, text):
    path = tmp_path / "x.html"
    done = record(path, "-e", text, "-d", "1s")
    assert done.returncode == 3
    assert f"error: no event or tracepoint is named {text}" in done.stderr
    assert "fix: similar names: mm_page_alloc" in done.stderr
    assert not path.exists()
