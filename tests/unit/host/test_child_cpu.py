"""The CPU time of child processes is limited and counted."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from otel_kprofiler.host.child_cpu import CpuGrant, CpuRate, has_exceeded_cpu, limit_cpu
from tests.commands import run_python
from tests.interpreters import ROOT, VERSIONS, environment, require_pythons

MIB = 1 << 20


def test_larger_inputs_are_granted_more_cpu_time_up_to_a_limit():
    rate = CpuRate(least_s=3, per_mib_s=0.25, most_s=60)
    assert [rate.grant(size * MIB).seconds for size in (0, 1, 4, 100, 1000)] == [3, 4, 4, 28, 60]
    assert CpuRate(least_s=0, per_mib_s=0, most_s=10).grant(0).seconds == 1  # 0 would mean no limit
    assert rate.grant(1 << 64).seconds == 60


@pytest.mark.system
def test_a_child_is_killed_at_its_limit_and_the_reason_states_time_and_size():
    grant = CpuGrant(1, 5 * MIB - 1)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        limit_cpu(child.pid, grant)
        _, hard = resource.prlimit(child.pid, resource.RLIMIT_CPU)
        # At the hard limit, the kernel sends SIGKILL, which would hide the reason.
        assert hard == resource.getrlimit(resource.RLIMIT_CPU)[1]
        assert resource.prlimit(child.pid, resource.RLIMIT_CORE)[0] == 0
        status = child.wait(300)
    assert has_exceeded_cpu(status)
    assert grant.describe() == "took more than 1 s of CPU for 5 MiB"


@pytest.mark.system
def test_limiting_an_exited_child_is_not_an_error():
    child = subprocess.Popen(["true"])
    child.wait()
    limit_cpu(child.pid, CpuGrant(1, 0))
    assert not has_exceeded_cpu(child.returncode)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.parametrize("minor", VERSIONS)
def test_children_with_limits_run_under_every_installed_interpreter(minor):
    """Interpreters built for an old glibc lack some functions in the os module."""
    env = {**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env["PYTHONPATH"] += f":{Path(pytest.__file__).parents[1]}"
    options = ["-q", "--noconftest", f"--rootdir={ROOT}", "-c", os.devnull, "-pno:cacheprovider"]
    tests = Path(__file__).with_name("test_limited_children.py")
    for python in require_pythons(minor):
        command = [python.command, "-m", "pytest", *options, tests]
        ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


_WITHOUT_STATUS = """
import os, signal, subprocess, time
from otel_kprofiler.host.child_cpu import MeteredChild
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = MeteredChild(["echo", "output"], stdout=subprocess.PIPE)
while os.path.exists(f"/proc/{child.pid}"):
    time.sleep(0.01)
print(child.communicate(timeout=60), child.cpu_ns)
late = MeteredChild(["sh", "-c", "exec >&-; sleep 0.2"], stdout=subprocess.PIPE)
print(late.communicate(timeout=60), late.cpu_ns)
"""


@pytest.mark.system
def test_the_cpu_time_of_children_reaped_by_the_kernel_counts_as_0():
    output = run_python(_WITHOUT_STATUS, env=environment())
    assert output == "(b'output\\n', None) 0\n(b'', None) 0\n"


_INTERRUPTED = """
import os, signal, subprocess
from otel_kprofiler.host.child_cpu import MeteredChild
os.setsid()
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
child = MeteredChild(["sh", "-c", "read line; echo $line"], stdin=-1, stdout=subprocess.PIPE)
os.killpg(0, signal.SIGINT)
print(child.communicate(b"result", timeout=60)[0])
"""


@pytest.mark.system
def test_the_interrupt_of_a_terminal_does_not_end_a_child():
    assert run_python(_INTERRUPTED) == "interrupted\nb'result\\n'\n"
