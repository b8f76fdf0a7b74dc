"""Runs a sampler or a program, or takes a CPU offline, for the duration of a with block."""

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

from otel_kprofiler.recording import Recording, RecordingFacts, RecordingWriter, ReplaySampler
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig


@contextlib.contextmanager
def started(sampler):
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()


def sampling(**settings):
    return started(EbpfSampler(SamplerConfig(**settings)))


def collect(sampler, seconds, *, interval_s=0.05):
    samples, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        sampler.wait(interval_s)
        samples += sampler.drain()
    return samples


def drain_until(sampler, is_enough):
    """Collects samples until ``is_enough`` accepts them, even on a busy machine."""
    samples, end = [], time.monotonic() + 60
    while not is_enough(samples):
        assert time.monotonic() < end, len(samples)
        sampler.wait(0.05)
        samples += sampler.drain()
    return samples


def record_and_replay(config, seconds, path):
    """Checks that a replay yields the recorded samples. Returns the samples and the counts."""
    writer = RecordingWriter(path)
    with started(EbpfSampler(config, raw_sink=writer.add_records)) as sampler:
        samples = collect(sampler, seconds)
        sampler.stop()
        samples += sampler.drain()
        until, counts = sampler.complete_until_ns(), sampler.counts()
        writer.finish(RecordingFacts(0, sampler.period_ns, sampler.stack_limit, until, counts))
    with contextlib.closing(Recording(path)) as recording:
        replay, replayed = ReplaySampler(recording), []
        while not replay.exhausted:
            replayed += replay.drain()
    assert replayed == samples
    assert replay.counts() == counts
    return samples, counts


class Witness:
    """A fast sampler with constant settings. Gaps in its samples show that the machine stalled."""

    RATE = 3989

    def __init__(self):
        self.times = defaultdict(list)
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def _run(self):
        settings = {"send_idle_frames": True, "stacks": "both", "map_scale_factor": 3}
        with sampling(samples_per_second=self.RATE, **settings) as sampler:
            self._ready.set()
            while not self._stop.is_set():
                for sample in collect(sampler, 0.1, interval_s=0.1):
                    self.times[sample.cpu].append(sample.time_ns)

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def stood_still(self, cpu, start, end):
        """Returns whether delayed interrupts also caused a gap in the witness's samples."""
        return any(
            b > start and a < end and b - a > 1.5 * 10**9 / self.RATE
            for a, b in itertools.pairwise(sorted(self.times[cpu]))
        )


@contextlib.contextmanager
def spawned(*command, **options):
    """Runs a program that is killed at the end of the block, and yields its process."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


IN_KERNEL = "import os\nwhile True: os.urandom(65536)"
"""A load that is nearly always in the kernel."""


@contextlib.contextmanager
def load(code, *, cpu=None):
    """Runs Python code in a process, optionally on one CPU, and yields the pid."""
    pin = f"import os; os.sched_setaffinity(0, {{{cpu}}})\n" if cpu is not None else ""
    with spawned(sys.executable, "-S", "-c", pin + code) as process:
        yield process.pid


@contextlib.contextmanager
def offline(cpu):
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/online")
    if not path.exists():
        pytest.skip(f"this host cannot take CPU {cpu} offline: no {path}")
    path.write_text("0")
    try:
        yield
    finally:
        path.write_text("1")
