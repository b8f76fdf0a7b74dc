"""Samples that the kernel does not take: counted where there are any, and only there."""

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
    """A CPU to stay on."""
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
    """System calls, one after the other."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            os.getppid()


def measure(cpu):
    """The counts of a time of system calls, and how many ticks it had."""
    with running(pin_cpu_ids=(cpu,)) as sampler:
        began = time.monotonic()
        call()
        ticks = RATE * (time.monotonic() - began)
        sampler.stop()
        sampler.drain()
        return sampler.counts()["on_cpu"], ticks


def test_ticks_inside_a_tracer_are_counted_and_not_taken(cpu):
    """A program at a tracepoint of every system call; without it next to nothing is missed."""
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


def test_what_a_filter_leaves_out_is_not_missed(cpu):
    with running(pin_cpu_ids=(cpu,), target_pids=(1,)) as sampler:
        call()
        sampler.drain()
        counts = sampler.counts()["on_cpu"]
    assert counts.filtered["target"] > 10 * counts.missed


def test_pauses_and_changes_of_the_rate_miss_nothing(cpu):
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


def test_a_cpu_that_is_hardly_ever_busy_misses_hardly_anything(cpu):
    """Idle times between two moments of work are no gaps."""
    with running(pin_cpu_ids=(cpu,)) as sampler:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            call(0.002)
            time.sleep(0.02)
        sampler.drain()
        counts = sampler.counts()["on_cpu"]
    assert counts.missed < RATE * SECONDS / 4
