"""New targets do not disturb the measurement of waits."""

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from samplers import sampling, spawned

from otel_kprofiler.sampling import OffCpuConfig
from tests.needs import LIBBPF
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, LIBBPF]
SLEEPER = "import sys, time; sys.stdin.readline(); time.sleep(600)"


def is_in(process, function):
    return function in Path(f"/proc/{process.pid}/wchan").read_text()


@contextlib.contextmanager
def sleeper():
    with spawned(sys.executable, "-S", "-c", SLEEPER, stdin=subprocess.PIPE) as process:
        wait_until(lambda: is_in(process, "pipe_read"))
        yield process


def read(sampler):
    """Returns the processes that have waited since the last call."""
    sampler.drain()
    return {process.tgid for process in sampler.read_waits()}


def test_new_targets_do_not_reset_the_threshold_for_sampling_waits():
    with (
        sleeper() as process,
        sampling(on_cpu=False, off_cpu=OffCpuConfig(), target_pids=(process.pid,)) as sampler,
    ):
        first = sampler.wait_threshold_ns
        wait_until(lambda: not read(sampler) and sampler.wait_threshold_ns < first)
        threshold_ns = sampler.wait_threshold_ns
        sampler.reconfigure(replace(sampler.config, target_pids=(process.pid, 1)))
        assert sampler.wait_threshold_ns == threshold_ns
