"""On this kernel, event and tracepoint samples add up to the number of events that occurred."""

import mmap
import subprocess
import sys

import pytest

from otel_kprofiler.host import EventSpec, parse_event
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig

pytestmark = [pytest.mark.kernel, pytest.mark.one_boot]

PAGES, SLEEPS, OPENS, PACKETS, PACKET = 3000, 200, 500, 50, 300
LOAD = f"""
import mmap, os, socket, time
for _ in range({OPENS}):
    os.close(os.open("/dev/null", os.O_RDONLY))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for _ in range({PACKETS}):
        sender.sendto(bytes({PACKET}), ("127.0.0.1", 9))
memory = mmap.mmap(-1, {PAGES} * mmap.PAGESIZE)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range({PAGES}):
    memory[page * mmap.PAGESIZE] = 1
for _ in range({SLEEPS}):
    time.sleep(1e-4)
"""


def test_sample_values_sum_to_the_number_of_events():
    """Two events are sampled on every occurrence, while a third is sampled at a fixed frequency."""
    events = (
        EventSpec("page-faults", 1),
        EventSpec("context-switches", 1),
        EventSpec("minor-faults", 0, 99),
    )
    process, samples, counts = sample_load(SamplerConfig(stacks="both", events=events))
    sums = sum_values(process, samples, counts)
    assert counts.keys() == {"on_cpu", "page_faults", "context_switches", "minor_faults"}
    assert PAGES <= sums["page_faults"] <= 2 * PAGES
    assert SLEEPS <= sums["context_switches"] <= 20 * SLEEPS
    # With rate-based sampling, events after the last sample are attributed to another program.
    assert 0 < sums["minor_faults"] <= 2 * PAGES


def test_tracepoint_samples_have_the_correct_values_on_this_kernel():
    """Tracepoint values are correct on this kernel, and a specific system call can be counted."""
    names = ("mm_page_alloc", "sys_enter:openat", "kfree_skb")
    events = tuple(parse_event(name, 99) for name in names)
    config = SamplerConfig(stacks="both", events=events, off_cpu=OffCpuConfig())
    process, samples, counts = sample_load(config)
    sums = sum_values(process, samples, counts)
    assert PAGES <= sums["mm_page_alloc"] / mmap.PAGESIZE <= 2 * PAGES
    assert OPENS <= sums["sys_enter_openat"] <= OPENS + 200
    # On a busy machine, ksoftirqd drops some packets.
    dropped = sum(sample.value for sample in samples if sample.kind.name == "kfree_skb")
    assert dropped >= PACKETS * PACKET


def sample_load(config):
    sampler = EbpfSampler(config)
    sampler.start()
    try:
        process = subprocess.Popen([sys.executable, "-S", "-c", LOAD])
        samples = []
        while process.poll() is None:
            sampler.wait(0.25)
            samples += sampler.drain()
        sampler.stop()
        samples += sampler.drain()
        counts = sampler.counts()
    finally:
        sampler.close()
    return process, samples, counts


def sum_values(process, samples, counts):
    """Checks the sample counts, and returns the sum of the process's values by kind."""
    sums = dict.fromkeys(counts, 0)
    for sample in samples:
        sums[sample.kind.name] += sample.value * (sample.tgid == process.pid)
    for kind in counts.values():
        assert kind.taken == kind.received + sum(kind.lost.values())
        assert not kind.lost
    return sums
