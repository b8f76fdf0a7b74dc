"""CPU time of child processes."""

import resource
import subprocess
import sys

import pytest

from otel_kprofiler.host.child_cpu import CpuGrant, CpuRate, has_exceeded_cpu, limit_cpu

MIB = 1 << 20


def test_more_input_may_take_more_time_up_to_a_limit():
    rate = CpuRate(least_s=3, per_mib_s=0.25, most_s=60)
    assert [rate.grant(size * MIB).seconds for size in (0, 1, 4, 100, 1000)] == [3, 4, 4, 28, 60]
    assert CpuRate(least_s=0, per_mib_s=0, most_s=10).grant(0).seconds == 1  # 0 would be no limit
    assert rate.grant(1 << 64).seconds == 60


@pytest.mark.system
def test_a_child_ends_at_its_limit_and_the_reason_names_time_and_size():
    grant = CpuGrant(1, 5 * MIB - 1)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        limit_cpu(child.pid, grant)
        _, hard = resource.prlimit(child.pid, resource.RLIMIT_CPU)
        assert hard == resource.getrlimit(resource.RLIMIT_CPU)[1]  # SIGKILL would have no reason
        assert resource.prlimit(child.pid, resource.RLIMIT_CORE)[0] == 0
        status = child.wait(300)
    assert has_exceeded_cpu(status)
    assert grant.describe() == "took more than 1 s of CPU for 5 MiB"


@pytest.mark.system
def test_a_child_that_has_ended_is_no_error():
    child = subprocess.Popen(["true"])
    child.wait()
    limit_cpu(child.pid, CpuGrant(1, 0))
    assert not has_exceeded_cpu(child.returncode)
