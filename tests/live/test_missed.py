"""Missed samples, which the kernel does not take, are counted exactly."""

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from programs import attach_tracer, close_all

from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("loader")]

RATE = 997
SECONDS = 1.0


@pytest.fixture
def cpu():
    """A CPU to run on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


@contextlib.contextmanager
def running(**settings):
    sampler = EbpfSampler(SamplerConfig(samples_per_second=RATE, **settings))
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()


def call(seconds=SECONDS):
    """Make system calls in a loop."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            os.getppid()


def measure(cpu):
    """Counts during a period of system calls, and its number of ticks."""
    with running(pin_cpu_ids=(cpu,)) as sampler:
        began = time.monotonic()
        call()
        ticks = RATE * (time.monotonic() - began)
        sampler.stop()
        sampler.drain()
        return sampler.counts()["on_cpu"], ticks


def test_ticks_inside_a_tracer_are_counted_as_missed(cpu):
    """A slow program at a tracepoint of every system call causes misses; few occur without it."""
    without, ticks_without = measure(cpu)
    try:
        tracer = attach_tracer("raw_syscalls/sys_enter", 20_000, cpu)
    except OSError as error:
        pytest.skip(str(error))
    try:
        beside, ticks = measure(cpu)
    finally:
        close_all(tracer)
    print(f"missed {without.missed} of {ticks_without:.0f}, {beside.missed} of {ticks:.0f}")  # noqa: T201
    assert beside.missed > ticks / 20
    assert beside.missed / ticks > 2 * without.missed / ticks_without
    for counts, expected in ((without, ticks_without), (beside, ticks)):
        assert counts.taken == counts.received + sum(counts.lost.values())
        happened = counts.taken + sum(counts.filtered.values()) + counts.missed
        assert happened == pytest.approx(expected, rel=0.1)


def test_filtered_ticks_are_not_missed(cpu):
    with running(pin_cpu_ids=(cpu,), target_pids=(1,)) as sampler:
        call()
        sampler.drain()
        counts = sampler.counts()["on_cpu"]
    assert counts.filtered["target"] > 10 * counts.missed


def test_pauses_and_rate_changes_count_nothing_as_missed(cpu):
    with running(pin_cpu_ids=(cpu,)) as sampler:
        for rate in (RATE, 50, RATE):
            sampler.reconfigure(SamplerConfig(samples_per_second=rate, pin_cpu_ids=(cpu,)))
            call(0.3)
            sampler.pause()
            call(0.3)
            sampler.resume()
            call(0.3)
        sampler.drain()
        counts = sampler.counts()["on_cpu"]
    assert counts.missed < RATE * 0.3


def test_a_mostly_idle_cpu_misses_almost_nothing(cpu):
    """Idle periods between bursts of work are not gaps."""
    with running(pin_cpu_ids=(cpu,)) as sampler:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            call(0.002)
            time.sleep(0.02)
        sampler.drain()
        counts = sampler.counts()["on_cpu"]
    assert counts.missed < RATE * SECONDS / 4
