"""All samples are accounted for despite CPU hotplug, an unreadable /proc or too few descriptors."""

import os
import resource
import subprocess
import sys
import time

import pytest

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import ON_CPU, RawSample
from otel_kprofiler.processes import ProcessResources
from tests.faults.accounts import stop_and_check

live = pytest.mark.live
CPU1 = "/sys/devices/system/cpu/cpu1/online"

FORKS = """
import os, time
end = time.monotonic() + {seconds}
count = 0
while time.monotonic() < end:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    count += 1
print(count)
"""


def check(agent, receiver):
    account, _, got = stop_and_check(agent, receiver)
    assert got.twice == 0
    (totals,) = got.totals.values()
    assert totals.taken == account["taken"]


@live
@pytest.mark.long
def test_every_sample_is_accounted_for_at_fifty_thousand_processes_a_minute(run_agent, receiver):
    receiver.up()
    agent = run_agent(receiver.endpoint, rate=499)
    seconds = 4
    script = FORKS.format(seconds=seconds)
    makers = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(2)
    ]
    made = sum(int(maker.communicate()[0]) for maker in makers)
    assert read_resident_bytes(agent.pid) < 120 << 20
    check(agent, receiver)
    if made * 60 / seconds < 50_000:
        pytest.skip(f"this machine starts only {made * 60 // seconds} processes a minute")


@live
def test_sampling_continues_when_file_descriptors_are_exhausted(run_agent, receiver):
    receiver.up()
    agent = run_agent(receiver.endpoint)
    agent.wait_until(lambda: len(receiver.payloads) > 1)
    pid = agent.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))
    before = len(receiver.payloads)
    subprocess.run([sys.executable, "-c", FORKS.format(seconds=2)], check=True)
    agent.wait_until(lambda: len(receiver.payloads) >= before + 4)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    check(agent, receiver)


@live
@pytest.mark.long
@pytest.mark.skipif(not os.access(CPU1, os.W_OK), reason=f"{CPU1} cannot be written here")
def test_a_cpu_that_goes_offline_and_returns_is_sampled_again(run_agent, receiver):
    receiver.up()
    # While a CPU goes offline, the host may pause for seconds, so timeouts must be longer.
    agent = run_agent(receiver.endpoint, timeout="60s")
    try:
        for state in "01":
            time.sleep(1.5)
            with open(CPU1, "w") as file:
                file.write(state)
    finally:
        with open(CPU1, "w") as file:
            file.write("1")
    time.sleep(2)
    check(agent, receiver)


class Forbidding(Access):
    """An ``Access`` that is not permitted to inspect processes."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def read_link(self, path):
        raise self.error

    def open_fd(self, path):
        raise self.error


@pytest.mark.parametrize("error", [PermissionError(13, "no"), FileNotFoundError(2, "gone"),
                                   ProcessLookupError(3, "gone"), OSError(24, "no descriptors"),
                                   OSError(5, "broken")], ids=str)  # fmt: skip
def test_samples_from_an_unreadable_process_carry_its_pid_and_name(error):
    resources = ProcessResources(Forbidding(error), Clock(), {"host.name": "h"})
    sample = RawSample(ON_CPU, 1, 5, 0, 4242, 4242, 17, 0, b"secret", (), (), None)
    result = resources.get(sample)
    assert result.attributes["process.pid"] == 4242
    assert result.attributes["process.executable.name"] == "secret"
    assert result.attributes["host.name"] == "h"
    assert resources.get(sample) is result
    resources.close()
