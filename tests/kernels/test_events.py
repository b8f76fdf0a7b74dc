"""Samples at page faults and context switches on this kernel: as many as the program makes."""

import subprocess
import sys

import pytest

from otel_kprofiler.host import EventSpec
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

pytestmark = pytest.mark.kernel

PAGES, SLEEPS = 3000, 200
LOAD = f"""
import mmap, time
memory = mmap.mmap(-1, {PAGES} * mmap.PAGESIZE)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range({PAGES}):
    memory[page * mmap.PAGESIZE] = 1
for _ in range({SLEEPS}):
    time.sleep(1e-4)
"""


def test_event_values_sum_to_the_programs_events():
    """Three events at once: two with each event a sample, one with a rate."""
    events = (
        EventSpec("page-faults", 1),
        EventSpec("context-switches", 1),
        EventSpec("minor-faults", 0, 99),
    )
    sampler = EbpfSampler(SamplerConfig(stacks="both", events=events))
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
    sums = dict.fromkeys(counts, 0)
    for sample in samples:
        sums[sample.kind.name] += sample.value * (sample.tgid == process.pid)
    assert counts.keys() == {"on_cpu", "page_faults", "context_switches", "minor_faults"}
    for kind in counts.values():
        assert kind.taken == kind.received + sum(kind.lost.values())
        assert not kind.lost
    assert PAGES <= sums["page_faults"] <= 2 * PAGES
    assert SLEEPS <= sums["context_switches"] <= 20 * SLEEPS
    # With a rate, those after the last sample are in the sample of another program.
    assert 0 < sums["minor_faults"] <= 2 * PAGES
