"""``record -- COMMAND`` preserves COMMAND's exit status and output, and ends its processes."""

import os
import signal
import subprocess
import sys

import pytest
from programs import recording

from tests.commands import COMMAND, run_command
from tests.waiting import wait_until

pytestmark = pytest.mark.live

RECORD = [*COMMAND, "record", "--stacks", "kernel"]


def record(directory, *words):
    return run_command(*RECORD[3:], *words, cwd=directory)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("script", "status", "stderr_text"),
    [
        ("exit 0", 0, "wrote x.html: "),
        ("exit 7", 7, "the command exited with status 7"),
        ("kill -KILL $$", 137, "the command was killed by SIGKILL"),
        ("kill -RTMIN $$", 128 + signal.SIGRTMIN, "the command was killed by SIGRTMIN"),
    ],
)
def test_record_exits_with_the_status_of_the_command(tmp_path, script, status, stderr_text):
    done = record(tmp_path, "-o", "x.html", "--idle", "--", "sh", "-c", f"sleep 0.2; {script}")
    assert done.returncode == status, done.stderr
    assert stderr_text in done.stderr.splitlines()[-1]
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("no-such-program", 127, "no-such-program: command not found"),
        ("./none", 127, "./none: No such file or directory"),
        ("./text", 126, "./text: Permission denied"),
        ("./directory", 126, "./directory: Is a directory"),
    ],
)
def test_record_exits_like_a_shell_if_the_command_cannot_run(tmp_path, name, status, message):
    (tmp_path / "text").write_text("")
    (tmp_path / "directory").mkdir()
    done = record(tmp_path, "-o", "x.html", "--", name)
    assert done.returncode == status
    assert done.stderr.startswith(f"error: {message}\nfix: ")
    assert not (tmp_path / "x.html").exists()


def test_command_output_is_kept_separate_from_the_profile(tmp_path):
    words = ["sh", "-c", "echo of the command; head -c 3G /dev/zero > /dev/null"]
    done = record(tmp_path, "-F", 999, "-f", "folded", "-o", "-", "--", *words)
    assert done.returncode == 0, done.stderr
    assert "of the command" not in done.stdout
    assert done.stdout
    assert "of the command\n" in done.stderr
    done = record(tmp_path, "-o", "x.html", "--", *words)
    assert done.stdout == "of the command\n"


def test_a_command_and_its_children_are_terminated_when_the_recording_ends(tmp_path):
    """Covers children that ignore SIGTERM."""
    stubborn = "trap '' TERM; echo $$; sleep 1000 & echo $!; while :; do sleep 1; done"
    words = [*RECORD, "-o", "x.html", "--", "sh", "-c", stubborn]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as running:
        pids = [int(running.stdout.readline()) for _ in range(2)]
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert "the command did not end within 5 s and was killed" in errors
    wait_until(lambda: not any(map(is_running, pids)))
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_record_also_ends_the_command(tmp_path, by):
    words = ["-o", "x.html", "--", "sh", "-c", "echo $$; exec sleep 1000"]
    options = {"stdout": subprocess.PIPE, "cwd": tmp_path, "start_new_session": True}
    with recording("--stacks", "kernel", *words, **options) as running:
        pid = int(running.stdout.readline())
        running.send_signal(by)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert not is_running(pid)
    assert "was killed" not in errors
    assert (tmp_path / "x.html").exists()


def test_ctrl_c_at_a_terminal_reaches_the_command_once(tmp_path):
    script = "trap 'echo again >> got; sleep 0.5; exit 3' INT; echo > ready; while :; do :; done"
    pid, master = os.forkpty()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*RECORD, "-o", "x.html", "--", "sh", "-c", script])
    wait_until((tmp_path / "ready").exists)
    os.write(master, b"\x03")
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:
        pass  # all processes have closed the terminal
    os.close(master)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    assert (tmp_path / "got").read_text() == "again\n"
    assert b"interrupted" in shown


def test_the_summary_suggests_a_fix_for_commands_too_short_to_be_sampled(tmp_path):
    done = record(tmp_path, "-F", 1, "-o", "x.html", "--", "true")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("raise --rate, or use --off-cpu\n")
