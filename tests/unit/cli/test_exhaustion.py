"""Commands that run out of a resource end with an error and a fix, wherever this happens.

The exit status is 3, after which systemd does not restart the agent, only if a restart is futile.
"""

import errno
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

CODE = """
import os, sys
from otel_kprofiler.cli.main import cli, main
def fail(*_, **__):
    raise OSError(int(sys.argv[1]), os.strerror(int(sys.argv[1])))
cli.main = fail
main(["run"])
"""


@pytest.mark.parametrize(
    ("number", "message", "fix", "status"),
    [
        (errno.EMFILE, "too many open files", "ulimit -n", 3),
        (errno.ENFILE, "the host has too many open files", "fs.file-max", 1),
        (errno.EAGAIN, "more processes or threads", "TasksMax", 1),
    ],
)
def test_running_out_of_a_resource_is_reported_with_a_fix(number, message, fix, status):
    command = [sys.executable, "-c", CODE, str(number)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status
    cause, hint = done.stderr.splitlines()
    assert message in cause
    assert fix in hint
