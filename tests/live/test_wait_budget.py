"""Wait samples stay within their budget, and leave room for on-CPU samples."""

import contextlib
import os
import subprocess
import time
from collections import Counter

import pytest
from samplers import collect, sampling, spawned
from unwind_maps import compile_c

from otel_kprofiler.model import OFF_CPU, ON_CPU
from otel_kprofiler.sampling import OffCpuConfig
from tests.needs import LIBBPF
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, LIBBPF]

SLEEPERS = """
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static struct timespec nap;
static void *sleep_on(void *unused) {
    for (;;)
        nanosleep(&nap, 0);
    return unused;
}
int main(int argc, char **argv) {
    pthread_attr_t attributes;
    pthread_t thread;
    int threads = argc > 2 ? atoi(argv[1]) : 0;
    nap.tv_sec = atol(argv[2]) / 1000;
    nap.tv_nsec = atol(argv[2]) % 1000 * 1000000;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 16384);
    while (threads--)
        if (pthread_create(&thread, &attributes, sleep_on, 0))
            return 1;
    write(1, "x", 1);
    pause();
}
"""


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory):
    return compile_c(tmp_path_factory.mktemp("sleepers") / "sleepers", SLEEPERS, "-O2", "-pthread")


@contextlib.contextmanager
def sleeping(sleepers, threads, milliseconds):
    with spawned(sleepers, str(threads), str(milliseconds), stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1), "it could not start its threads"
        yield process


def running(rate, **settings):
    return sampling(off_cpu=OffCpuConfig(samples_per_second=rate), **settings)


def waits_of(samples, process):
    mine = [sample for sample in samples if sample.kind is OFF_CPU and sample.tgid == process.pid]
    return len({(sample.tid, sample.wait.start_ns) for sample in mine}), sum(
        sample.value for sample in mine
    )


@pytest.mark.long
def test_many_sleeping_threads_are_sampled_at_the_requested_rate(sleepers):
    """With the initial threshold, all 20,000 waits per second would be sampled."""
    seconds, rate = 8, 20
    with sleeping(sleepers, 2000, 100) as process, running(rate, on_cpu=False) as sampler:
        samples = collect(sampler, seconds)
        exact = sum(
            one.total_ns for key, one in sampler.read_waits().items() if key.tgid == process.pid
        )
        samples += sampler.drain()  # reading totals may take a second
        counts = sampler.counts()["off_cpu"]
        threshold = sampler.wait_threshold_ns
    waits, estimate = waits_of(samples, process)
    assert not counts.lost
    assert 0.3 * rate * seconds < waits < 6 * rate * os.cpu_count() * seconds
    values = [sample.value for sample in samples if sample.tgid == process.pid]
    assert max(values) <= threshold, "the report takes the error from those up to the threshold"
    error = sum(value * value for value in values) ** 0.5
    assert abs(estimate - exact) < 5 * error


def test_continuously_sleeping_threads_are_sampled_at_the_requested_rate(sleepers):
    rate, rounds = 20, Counter()
    with running(rate, on_cpu=False) as sampler, sleeping(sleepers, 3000, 100_000) as process:
        for number in range(3):
            samples = collect(sampler, 2)
            sampler.read_waits()
            rounds[number] = waits_of(samples + sampler.drain(), process)[0]
    assert max(rounds.values()) < 3000 / 5, "each of them, in each window, without a budget"
    assert sum(rounds.values()) > 10


def test_waits_that_fill_the_ring_buffer_do_not_displace_cpu_samples(sleepers):
    with (
        sleeping(sleepers, 500, 10),
        running(10_000, samples_per_second=49, stacks="kernel") as sampler,
    ):
        collect(sampler, 1)
        waits = sampler._attached.waits
        wait_until(lambda: waits.counts().ring_full)
        time.sleep(0.5)
        sampler.stop()
        sampler.drain()
        counts = sampler.counts()
    assert counts[OFF_CPU.name].lost, "or the ring was not full"
    assert not counts[ON_CPU.name].lost
    for count in counts.values():
        assert count.taken == count.received + sum(count.lost.values())
