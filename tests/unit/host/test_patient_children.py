"""Children that read files on a hanging file system are abandoned."""

import subprocess
import sys
import time

import pytest

from otel_kprofiler.host import children_time_ns
from otel_kprofiler.host.child_cpu import MeteredChild
from otel_kprofiler.host.patient_children import DeviceHangs, PatientChildren
from tests.waiting import call_in_thread

pytestmark = pytest.mark.system

HERE, THERE = 1, 2
LONG_S = 300


@pytest.fixture
def start():
    started = []

    def start(code, *arguments):
        command = [sys.executable, "-c", f"import sys; {code}", *map(str, arguments)]
        started.append(MeteredChild(command, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def start_lingering(start):
    """Starts a child whose own child keeps the output pipe open until nobody reads from it."""

    def start_lingering(first="pass"):
        ends = "signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.fork()"
        writes = "while True: print('.', flush=True); time.sleep(0.05)"
        child = start(f"import os, signal, time\n{first}\n{ends}\n{writes}")
        assert child.stdout.readline()  # printed by the child or its fork
        return child

    return start_lingering


def test_a_child_blocked_by_its_file_system_is_abandoned(fuse, start):
    children = PatientChildren(patience_s=1, retry_s=0)
    fuse.freeze("read")
    child = start("open(sys.argv[1], 'rb').read()", fuse.point / "file")
    with pytest.raises(DeviceHangs):
        children.wait(child, THERE, LONG_S)
    children.check(HERE)
    assert children.wait(start("print('other')"), HERE, LONG_S)[0] == b"other\n"
    fuse.thaw()
    child.wait()
    children.check(THERE)


def test_a_hung_device_is_retried_later(fuse, start):
    children = PatientChildren(patience_s=0.1, retry_s=1000)
    fuse.freeze("read")
    with pytest.raises(DeviceHangs):
        children.wait(start("open(sys.argv[1], 'rb').read()", fuse.point / "file"), THERE, LONG_S)
    fuse.thaw()
    with pytest.raises(DeviceHangs):
        children.check(THERE)
    children.check(HERE)


def test_the_parent_waits_for_a_child_that_computes_or_sleeps(start):
    children = PatientChildren(patience_s=1)
    sleeps = start("import time; print('begins', flush=True); time.sleep(2.5); print('slept')")
    assert sleeps.stdout.readline() == b"begins\n"  # the child has imported its modules
    assert children.wait(sleeps, HERE, LONG_S)[0] == b"slept\n"
    children.check(HERE)


def test_a_child_that_takes_too_long_is_killed(start):
    children = PatientChildren(patience_s=60)
    child = start("import time; time.sleep(1000)")
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        children.wait(child, HERE, 0.1)
    assert time.monotonic() - began < LONG_S
    assert child.returncode
    children.check(HERE)


def test_a_child_that_is_slow_to_exit_does_not_block_its_device(start_lingering):
    children = PatientChildren(patience_s=0.5, retry_s=1000)
    child = start_lingering()
    with pytest.raises(subprocess.TimeoutExpired):
        children.wait(child, HERE, 0.1)
    assert child.returncode is None, "it has ended in time"
    children.check(HERE)


BURNS = "while time.process_time() < 0.3: pass"


def test_cpu_time_of_children_is_charged_to_the_waiting_thread(start):
    children, began_ns = PatientChildren(), children_time_ns()
    children.wait(start(f"import time\n{BURNS}"), HERE, LONG_S)
    first_ns = children_time_ns() - began_ns
    endless = start("print('begins', flush=True)\nwhile True: pass")
    assert endless.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        children.wait(endless, HERE, 0.1)
    assert 0.3e9 <= first_ns < children_time_ns() - began_ns
    assert call_in_thread(children_time_ns).result() == 0


def test_the_cpu_time_of_an_abandoned_child_is_counted(start_lingering):
    child = start_lingering(BURNS)
    began_ns = children_time_ns()
    with pytest.raises(subprocess.TimeoutExpired):
        PatientChildren(patience_s=0.5).wait(child, HERE, 0.1)
    assert child.returncode is None, "it has ended in time"
    assert children_time_ns() - began_ns >= 0.3e9
