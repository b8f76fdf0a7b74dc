"""Samples missed by the kernel are counted exactly."""

import os
import time

import pytest
from programs import attach_tracer, close_all
from samplers import sampling

from otel_kprofiler.sampling import SamplerConfig

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("loader")]

RATE = 997
SECONDS = 1.0


@pytest.fixture
def cpu():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


def running(**settings):
    return sampling(samples_per_second=RATE, **settings)


def call(seconds=SECONDS):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            os.getppid()


def measure(cpu, spin):
    """Takes samples while system calls are traced.

    Returns the counts, the bounds on the number of ticks, and the number of ticks in this process.
    """
    earliest = time.monotonic()
    with running(pin_cpu_ids=(cpu,)) as sampler:
        began = time.monotonic()
        call(0.1)  # so that counting begins at a sample
        tracer = attach_tracer("raw_syscalls/sys_enter", spin, cpu)
        try:
            ran = -time.thread_time()
            while ran + time.thread_time() < SECONDS:
                call(0.01)
            ran += time.thread_time()
        finally:
            close_all(tracer)
        call(0.1)  # so that counting ends at a sample
        sure = time.monotonic() - began
        sampler.stop()
        possible = time.monotonic() - earliest
        sampler.drain()
        return sampler.counts()["on_cpu"], (RATE * sure, RATE * possible), RATE * ran


def test_samples_missed_while_a_tracing_bpf_program_runs_are_counted(cpu):
    """A slow BPF program on the sys_enter tracepoint causes many misses; a fast program, few."""
    try:
        results = [measure(cpu, spin) for spin in (1, 20_000)]
    except OSError as error:
        pytest.skip(str(error))
    for counts, (sure, possible), ran in results:
        print(f"missed {counts.missed} of {sure:.0f}, of which this process ran {ran:.0f}")  # noqa: T201
        assert counts.taken == counts.received + sum(counts.lost.values())
        happened = counts.taken + sum(counts.filtered.values()) + counts.missed
        assert 0.9 * sure <= happened <= 1.1 * possible
    (quick, (sure, _), _), (slow, (_, possible), ran) = results
    assert slow.missed > quick.missed * possible / sure + ran / 20


def test_filtered_samples_are_not_counted_as_missed(cpu):
    with running(pin_cpu_ids=(cpu,), target_pids=(1,)) as sampler:
        call()
        sampler.drain()
        counts = sampler.counts()["on_cpu"]
    assert counts.filtered["target"] > 2 * counts.missed


def count_missed(sampler):
    sampler.drain()
    return sampler.counts()["on_cpu"].missed


def test_pauses_and_rate_changes_are_not_counted_as_missed_samples(cpu):
    with running(pin_cpu_ids=(cpu,)) as witness, running(pin_cpu_ids=(cpu,)) as sampler:
        for rate in (RATE, 50, RATE):
            sampler.reconfigure(SamplerConfig(samples_per_second=rate, pin_cpu_ids=(cpu,)))
            call(0.3)
            sampler.pause()
            call(0.3)
            sampler.resume()
            call(0.3)
        assert count_missed(sampler) < count_missed(witness) + RATE * 0.3


def test_a_mostly_idle_cpu_misses_almost_no_samples(cpu):
    """Idle periods between bursts of work do not count as gaps."""
    with (
        running(pin_cpu_ids=(cpu,), send_idle_frames=True) as witness,
        running(pin_cpu_ids=(cpu,)) as sampler,
    ):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            call(0.002)
            time.sleep(0.02)
        assert count_missed(sampler) < count_missed(witness) + RATE * SECONDS / 4
