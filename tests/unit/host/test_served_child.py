"""A child process can read several files. Files do not affect each other's results."""

import os
import sys

import pytest

from otel_kprofiler.host import ChildFailed, ChildLimits, ChildProblem, CpuRate, LimitedChildren

pytestmark = pytest.mark.system

MIB = 1 << 20
LIMITS = ChildLimits(256 * MIB, CpuRate(least_s=30, per_mib_s=0, most_s=30).grant(0), 100)
BRIEF = LIMITS._replace(cpu=CpuRate(least_s=1, per_mib_s=0, most_s=1).grant(0))
SERVING = """
import os, socket, sys, time
read = []
with socket.socket(fileno=0) as requests:
    while True:
        code, (fd,), *_ = socket.recv_fds(requests, 65536, 1)
        read.append(os.pread(fd, 100, 0))
        os.close(fd)
        result = b"%d" % os.getpid()
        exec(code)
        os.write(1, len(result).to_bytes(8, "little") + result)
"""
COMMAND = (sys.executable, "-I", "-S", "-c", SERVING)


@pytest.fixture
def serve(tmp_path):
    children = LimitedChildren()

    def serve(code="pass", limits=LIMITS, path=tmp_path / "file"):
        path.touch()
        with path.open("rb") as file:
            return children.serve(COMMAND, [code], file.fileno(), limits)

    serve.children = children
    yield serve
    children.stop()


def problem(serve, code, limits=LIMITS):
    with pytest.raises(ChildFailed) as caught:
        serve(code, limits)
    return caught.value.problem


def test_a_child_process_is_reused_for_several_files(serve, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    child = serve(path=tmp_path / "first")
    assert serve("result=repr((os.getpid(),read)).encode()", path=tmp_path / "second") == (
        f"({int(child)}, [b'first', b'second'])".encode()
    )
    assert serve("result=b'x'*1000000") == b"x" * 1000000
    assert serve() == child


def test_files_owned_by_different_users_are_read_in_different_child_processes(serve, tmp_path):
    if os.geteuid():
        pytest.skip("only root can give files to others")
    other = tmp_path / "other"
    other.touch()
    os.chown(other, 12345, -1)
    assert serve() != serve(path=other)
    assert serve() == serve()


def test_only_the_two_newest_idle_child_processes_are_kept(serve, tmp_path):
    if os.geteuid():
        pytest.skip("only root can give files to others")
    children = {}
    for owner in range(12345, 12350):
        path = tmp_path / str(owner)
        path.touch()
        os.chown(path, owner, -1)
        children[path] = serve(path=path)
    *ended, third, newest = children
    assert (serve(path=third), serve(path=newest)) == (children[third], children[newest])
    for path in ended:
        assert not os.path.exists(f"/proc/{int(children[path])}")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit('damaged')", ChildProblem.FAILED),
        ("os.kill(os.getpid(),11)", ChildProblem.FAILED),
        ("os.kill(os.getpid(),9)", ChildProblem.MEMORY),
        ("os.close(1);os.close(2);time.sleep(0.1);os._exit(3)", ChildProblem.FAILED),
        ("os.write(1,bytes([9,0,0,0,0,0,0,0,1]));os._exit(3)", ChildProblem.FAILED),
    ],
)
def test_a_file_that_crashes_its_child_does_not_affect_other_files(serve, code, expected):
    first = serve()
    assert problem(serve, code) is expected
    assert serve() != first


def test_a_file_that_fails_only_after_other_files_is_retried_in_a_new_child(serve):
    first = serve()
    second = serve("len(read)>1 and sys.exit('an earlier file is the cause')")
    assert second != first
    assert serve() == second


def test_a_child_that_takes_too_long_is_replaced(serve):
    first = serve()
    assert problem(serve, "time.sleep(1000)", LIMITS._replace(wall_s=0.1)) is ChildProblem.TIME
    assert serve() != first


def test_each_file_has_its_own_cpu_time_limit(serve):
    child = serve("sum(range(10**7))", BRIEF)
    for _ in range(6):
        assert serve("sum(range(10**7))", BRIEF) == child
    assert problem(serve, "max(iter(int,1))", BRIEF) is ChildProblem.CPU_TIME


def test_each_file_has_its_own_memory_limit(serve):
    code = "len(bytearray(60<<20))"
    child = serve(code, LIMITS._replace(memory_bytes=160 * MIB))
    small = LIMITS._replace(memory_bytes=40 * MIB)
    assert problem(serve, code, small) is ChildProblem.MEMORY
    other = serve(limits=small)
    assert other != child
    assert serve(code, LIMITS._replace(memory_bytes=160 * MIB)) == other


def test_idle_children_are_terminated(serve):
    child = int(serve())
    assert 50 < serve.children.end_idle(100) <= 100
    os.kill(child, 0)
    assert serve.children.end_idle() is None
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    child = int(serve())
    serve.children.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert problem(serve, "pass") is ChildProblem.STOPPED


def test_a_child_that_died_while_idle_is_replaced(serve):
    child = int(serve())
    os.kill(child, 9)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert int(serve()) != child


def test_a_request_that_is_too_long_is_rejected(serve):
    serve()
    with pytest.raises(ChildFailed, match="no process could be started: Argument list too long"):
        serve("#" + "x" * 70000)
    assert not serve.children._idle


def test_the_error_names_the_program_that_cannot_be_started(serve, tmp_path):
    with pytest.raises(ChildFailed, match=r"no process could be started: .*nowhere") as caught:
        serve.children.serve(["/nowhere"], [], 0, LIMITS)
    assert caught.value.problem is ChildProblem.NO_PROCESS
