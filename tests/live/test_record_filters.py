"""``record`` samples only processes selected by id, name, cgroup or container."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import recording
from samplers import spawned

from tests.commands import COMMAND, run_checked, run_command
from tests.waiting import wait_until

pytestmark = pytest.mark.live

TO_FILE = ["-F", "499", "--force", "-o", "x.folded"]
LOOP = "while :; do :; done"
WAIT = "while [ ! -e go ]; do sleep 0.1; done"
"""Shell command that waits for the file ``go``. Its ``sleep`` commands may also be sampled."""
WORK = "i=0; while [ $i -lt 500000 ]; do i=$((i+1)); done"
LONG = ["-d", "120s"]
"""A duration that recordings never reach, because they end when their processes exit."""


def record_from_go(directory, *words):
    """Records, and creates the ``go`` file once sampling has begun."""
    with recording(*TO_FILE, *LONG, *words, cwd=directory) as running:
        (directory / "go").touch()
        _, errors = running.communicate(timeout=110)
    assert running.returncode == 0, errors


def processes(directory):
    text = (directory / "x.folded").read_text()
    return {line.rpartition(" ")[0].split(";")[0] for line in text.splitlines()}


@pytest.fixture
def programs(tmp_path):
    """Returns a function that starts copies of the shell with different names.

    An unrelated program, named ``beside``, has a lower scheduling priority than the recording.
    """
    started = []

    def start(name, script):
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        shutil.copy(shutil.which("sh"), program)
        command = [*(["nice"] if name == "beside" else []), program, "-c", script]
        started.append(subprocess.Popen(command, cwd=tmp_path, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def test_a_target_that_does_not_exist_is_reported_immediately(tmp_path):
    for words, message in (
        (["-p", 2**22 - 1], "there is no process 4194303"),
        (["--cgroup", "/no/such"], "/no/such is not a v2 cgroup"),
        (["--container", "nosuch"], "there is no running container nosuch"),
        (["--pod", "nosuch"], "there is no pod nosuch"),
        (["--unit", "nosuch"], "there is no unit nosuch"),
    ):
        done = run_command("record", *TO_FILE, *LONG, *words, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {message}\nfix: ")
        assert list(tmp_path.iterdir()) == []


def test_a_thread_id_given_as_a_pid_is_rejected(tmp_path):
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    with spawned(sys.executable, "-c", code) as process:
        tasks = Path(f"/proc/{process.pid}/task")
        threads = wait_until(lambda: {int(task.name) for task in tasks.iterdir()} - {process.pid})
        done = run_command("record", *TO_FILE, *LONG, "-p", threads.pop(), cwd=tmp_path)
    assert done.returncode == 1
    assert f"is a thread of process {process.pid}" in done.stderr


def test_descendants_are_recorded_until_the_last_one_exits(programs, tmp_path):
    programs("beside", LOOP)
    orphan = "sleep 4; head -c 5G /dev/zero > /dev/null; true"
    target = programs("target", f"{WAIT}; ( {orphan} ) & {WORK}; sleep 2; exit 0")
    other = programs("other", f"{WAIT}; {WORK}")
    record_from_go(tmp_path, "-p", target.pid, "-p", other.pid)
    assert target.poll() is not None
    assert other.poll() is not None
    assert processes(tmp_path) - {"sleep"} == {"head", "target", "other"}


@pytest.mark.long
def test_the_comm_option_selects_processes_by_name(programs, tmp_path):
    for name in ("one", "another", "a-name-of-more-than-15-characters"):
        programs(name, LOOP)
    for name in ("one", "a-name-of-more-than-15-characters"):
        run_checked("record", *TO_FILE, "-d", "2s", "--comm", name, cwd=tmp_path)
        assert processes(tmp_path) == {name}


def test_selecting_a_process_name_includes_all_threads_of_the_process(tmp_path):
    code = """
import ctypes, threading
def work():
    ctypes.CDLL(None).prctl(15, b"worker", 0, 0, 0)
    while True: pass
threading.Thread(target=work).start()
import time; time.sleep(60)
"""
    program = tmp_path / "python-of-test"
    program.symlink_to(sys.executable)
    with spawned(program, "-c", code):
        words = ["-d", "2s", "--stacks", "user", "--comm", "python-of-test"]
        run_checked("record", *TO_FILE, *words, cwd=tmp_path)
    assert (tmp_path / "x.folded").read_text()


@pytest.mark.long
def test_selecting_a_cgroup_includes_its_descendants(programs, cgroup, tmp_path):
    (cgroup / "below").mkdir()
    programs("beside", LOOP)
    for name, directory in (("here", cgroup), ("below", cgroup / "below")):
        (directory / "cgroup.procs").write_text(str(programs(name, f"{WAIT}; {WORK}").pid))
    record_from_go(tmp_path, "--cgroup", cgroup)
    assert processes(tmp_path) - {"sleep"} == {"here", "below"}


def test_a_container_is_selected_by_an_id_prefix(programs, cgroup, tmp_path):
    container = f"{os.getpid():064x}"[::-1]
    scope = cgroup / f"docker-{container}.scope"
    scope.mkdir()
    programs("beside", LOOP)
    (scope / "cgroup.procs").write_text(str(programs("inside", f"{WAIT}; {WORK}").pid))
    record_from_go(tmp_path, "--container", container[:12])
    assert processes(tmp_path) - {"sleep"} == {"inside"}


@pytest.mark.long
def test_a_pod_is_selected_by_its_uid(programs, cgroup, tmp_path):
    uid = f"ccf19bc6-503b-4dd0-b33d-{os.getpid():012x}"
    pod = cgroup / f"pod{uid}"
    pod.mkdir()
    programs("beside", LOOP)
    (pod / "cgroup.procs").write_text(str(programs("inside", f"{WAIT}; {WORK}").pid))
    record_from_go(tmp_path, "--pod", uid)
    assert processes(tmp_path) - {"sleep"} == {"inside"}


@pytest.fixture
def in_namespace(tmp_path):
    """Returns a function that runs a script in a PID namespace. ``./inner`` is a copy of ``sh``."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    shutil.copy(shutil.which("sh"), tmp_path / "inner")

    def run(script, *options):
        prefix = ["unshare", "--pid", "--fork", "--kill-child", *options]
        return subprocess.run(
            [*prefix, "sh", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60,
        )  # fmt: skip

    return run


NAMESPACED = " ".join([*COMMAND, "record", *TO_FILE])


def test_pid_arguments_are_interpreted_in_the_callers_pid_namespace(in_namespace, tmp_path):
    # Process 1 is the shell, process 2 the target, whose child is also sampled.
    target = f"./inner -c '(exec dd if=/dev/zero of=/dev/null bs=1M) & {LOOP}'"
    done = in_namespace(f"{target} & {NAMESPACED} -d 3s -p 2", "--mount-proc")
    assert done.returncode == 0, done.stderr
    assert processes(tmp_path) == {"inner", "dd"}


def test_commands_are_recorded_in_the_callers_pid_namespace(in_namespace, tmp_path):
    """A command is identified by its executable's name, which is available only in /proc."""
    (tmp_path / "command").symlink_to("inner")
    done = in_namespace(f"{NAMESPACED} -- ./command -c '{WORK}'", "--mount-proc")
    assert done.returncode == 0, done.stderr
    assert processes(tmp_path) == {"inner"}


@pytest.mark.parametrize("words", ["-p 1", "-- true"])
def test_a_proc_mount_for_another_pid_namespace_is_rejected(words, in_namespace, tmp_path):
    done = in_namespace(f"{NAMESPACED} {words}")
    assert done.returncode == 1
    assert "error: /proc belongs to a different pid namespace than this process" in done.stderr
    assert not (tmp_path / "x.folded").exists()
