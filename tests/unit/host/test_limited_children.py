"""Children that read files run with resource limits, and report why they fail."""

import os
import sys
import threading
import time

import pytest

from otel_kprofiler.host import (
    ChildFailed,
    ChildLimits,
    ChildProblem,
    CpuRate,
    LimitedChildren,
    child_memory,
)
from otel_kprofiler.host.child_memory import MemoryLeft
from tests.commands import run_python
from tests.interpreters import environment

pytestmark = pytest.mark.system

MIB = 1 << 20
CPU = CpuRate(least_s=30, per_mib_s=0, most_s=30).grant(0)
LIMITS = ChildLimits(256 * MIB, CPU, 100)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    children = LimitedChildren()
    with open(path, "rb") as file:

        def run(code, limits=LIMITS, **options):
            command = [sys.executable, "-I", "-c", f"import os, sys; {code}"]
            return children.run(command, file.fileno(), limits, **options)

        run.children = children
        yield run
    children.stop()


def failure(run, code, limits=LIMITS):
    with pytest.raises(ChildFailed) as caught:
        run(code, limits)
    return caught.value.problem, str(caught.value)


def test_a_child_reads_the_file_from_standard_input(run, tmp_path):
    assert run("print(os.pread(0, 100, 0).decode())") == b"content\n"
    with open(tmp_path / "output", "w+b") as output:
        run("print('result')", output=output.fileno())
        assert os.pread(output.fileno(), 100, 0) == b"result\n"


_IGNORING = """
import os, signal, sys
from otel_kprofiler.host import ChildFailed, ChildLimits, CpuRate, LimitedChildren
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
limits = ChildLimits(256 << 20, CpuRate(least_s=30, per_mib_s=0, most_s=30).grant(0), 100)
for code in (
    "print('result')",  # prints no DONE
    "print('result', flush=True); os.write(2, b'\\4')",
    "print('part', flush=True); os.kill(os.getpid(), 9)",
    "sys.exit('damaged')",
):
    with open("/dev/null") as file:
        try:
            command = [sys.executable, "-I", "-c", f"import os, sys; {code}"]
            print(LimitedChildren().run(command, file.fileno(), limits))
        except ChildFailed as error:
            print(error.problem.name, error.may_pass, error)
"""


def test_a_child_with_an_unknown_exit_status_succeeds_only_with_an_intact_report():
    output = run_python(_IGNORING, env=environment())
    lost = "FAILED True ended early; its status is unknown, since this process ignores SIGCHLD"
    lines = [line.removesuffix(" or reaps all children") for line in output.splitlines()]
    assert lines == [lost, "b'result\\n'", lost, "FAILED True damaged"]


def test_a_child_cannot_exceed_its_memory_limit(run):
    code = "print(len(bytearray(60 << 20)))"
    assert failure(run, code, LIMITS._replace(memory_bytes=40 * MIB))[0] is ChildProblem.MEMORY
    assert run(code, LIMITS._replace(memory_bytes=160 * MIB)) == b"62914560\n"


def test_no_child_is_started_if_too_little_memory_is_left(run):
    limits = LIMITS._replace(memory_bytes=MIB, least_bytes=2 * MIB)
    with pytest.raises(ChildFailed) as caught:
        run("sys.exit('started')", limits)
    assert caught.value.problem is ChildProblem.MEMORY
    assert caught.value.grant.count_bytes == MIB


def test_a_childs_cpu_time_limit_depends_on_its_input_size(run):
    cpu = CpuRate(least_s=1, per_mib_s=0, most_s=1).grant(0)
    expected = (ChildProblem.CPU_TIME, "took more than 1 s of CPU for 0 MiB")
    assert failure(run, "\nwhile True: pass", LIMITS._replace(cpu=cpu)) == expected


def test_the_error_for_a_missing_program_names_the_program(run):
    with pytest.raises(ChildFailed, match=r"no process could be started: .*nowhere") as caught:
        run.children.run(["/nowhere"], 0, LIMITS)
    assert caught.value.problem is ChildProblem.NO_PROCESS


def test_stopping_kills_children_and_prevents_new_ones(run):
    failures = []
    work = threading.Thread(
        target=lambda: failures.append(failure(run, "import time; time.sleep(1000)"))
    )
    work.start()
    while not run.children._running and work.is_alive():
        time.sleep(0.001)
    run.children.stop()
    work.join(20)
    assert len(failures) == 1
    assert failure(run, "") == (ChildProblem.STOPPED, "the profiler is stopping")


FAILED, MEMORY = ChildProblem.FAILED, ChildProblem.MEMORY


@pytest.mark.parametrize(
    ("code", "limits", "problem", "cause", "may_pass"),
    [
        ("import time; time.sleep(1000)", {"wall_s": 0.1}, ChildProblem.TIME, "took over 0.1 s",
         True),
        ("os.kill(os.getpid(), 9)", {}, MEMORY, "SIGKILL", True),
        ("os._exit(os.EX_TEMPFAIL)", {}, FAILED, "status 75", True),
        ("os._exit(3)", {}, FAILED, "status 3", False),
        ("sys.exit('damaged')", {}, FAILED, "damaged", False),
        ("bytearray(60 << 20)", {"memory_bytes": 40 * MIB}, MEMORY, "MemoryError", False),
        ("os.abort()", {}, MEMORY, "SIGABRT", False),
    ],
    ids=("slow", "killed", "full_disk", "silent", "damaged", "large", "aborted"),
)  # fmt: skip
def test_a_failure_states_its_cause_and_whether_it_is_temporary(
    *, run, code, limits, problem, cause, may_pass
):
    with pytest.raises(ChildFailed) as caught:
        run(code, LIMITS._replace(**limits))
    assert (caught.value.problem, caught.value.may_pass) == (problem, may_pass)
    assert cause in str(caught.value)


def test_a_memory_shortage_in_the_cgroup_counts_as_temporary(run, monkeypatch):
    left = MemoryLeft(80 * MIB, "/sys/fs/cgroup/memory.max", 100 * MIB)
    monkeypatch.setattr(child_memory, "find_memory_left", lambda _: left)
    with pytest.raises(ChildFailed) as caught:
        run("bytearray(60 << 20)")
    assert (caught.value.problem, caught.value.may_pass) == (ChildProblem.MEMORY, True)
