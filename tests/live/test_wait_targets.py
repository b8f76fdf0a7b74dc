"""Waits are measured for the selected containers, including those that start and stop."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from samplers import sampling, spawned, started

from otel_kprofiler.agent import agent_config
from otel_kprofiler.agent.targets import AgentTargets
from otel_kprofiler.config import parse_config
from otel_kprofiler.host import Access
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig
from tests.needs import LIBBPF
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, LIBBPF]
SLEEPER = "import sys, time; sys.stdin.readline(); time.sleep(600)"
CONFIG = """
receivers:
  kprofiler:
    off_cpu: {{enabled: true, samples_per_second_per_cpu: 0}}
    target_containers: [{0}, {1}]
exporters: {{debug: {{}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [debug]}}}}}}
"""


def is_in(process, function):
    return function in Path(f"/proc/{process.pid}/wchan").read_text()


@contextlib.contextmanager
def sleeper():
    with spawned(sys.executable, "-S", "-c", SLEEPER, stdin=subprocess.PIPE) as process:
        wait_until(lambda: is_in(process, "pipe_read"))
        yield process


def fall_asleep(process):
    process.stdin.write(b"\n")
    process.stdin.flush()
    wait_until(lambda: is_in(process, "nanosleep"))


def read(sampler):
    """Returns the processes that have waited since the last call."""
    sampler.drain()
    return {process.tgid for process in sampler.read_waits()}


@pytest.fixture
def containers(cgroup):
    """Yields the cgroups of two containers, each with the pid of its sleeping process.

    Also yields the agent's targets, and a sampler that measures both waits.
    """
    names = [f"c{number:07x}{os.getpid():056x}" for number in range(2)]
    places = [cgroup / f"docker-{name}.scope" for name in names]
    with sleeper() as first, sleeper() as second:
        for place, process in zip(places, (first, second), strict=True):
            place.mkdir()
            (place / "cgroup.procs").write_text(str(process.pid))
        loaded = parse_config(CONFIG.format(*names), path="agent.yaml", environ={})
        targets = AgentTargets(Access(), agent_config(loaded.config))
        with started(EbpfSampler(targets.sampler)) as sampler:
            fall_asleep(first)
            fall_asleep(second)
            wait_until(lambda: read(sampler) == {first.pid, second.pid})
            yield (places[0], first), (places[1], second), targets, sampler


def test_the_wait_in_progress_of_a_deselected_container_is_no_longer_measured(containers):
    (place, process), _, _, sampler = containers
    left = [one for one in sampler.config.target_cgroups if one[1] != place.stat().st_ino]
    sampler.reconfigure(replace(sampler.config, target_cgroups=tuple(left)))
    read(sampler)
    assert process.pid not in read(sampler)


def test_the_wait_in_progress_is_measured_after_another_container_has_stopped(containers):
    (place, stopped), (_, process), targets, sampler = containers
    stopped.kill()
    stopped.wait()
    place.rmdir()

    def has_followed():
        targets.follow(sampler)
        return len(sampler.config.target_cgroups) == 1

    wait_until(has_followed)
    read(sampler)
    assert read(sampler) == {process.pid}


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
