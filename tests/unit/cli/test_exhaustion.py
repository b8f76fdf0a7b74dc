"""Commands that run out of descriptors end with an error and a fix, wherever this happens."""

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
    ("number", "fix"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max")]
)
def test_running_out_of_descriptors_is_an_error_of_the_host(number, fix):
    command = [sys.executable, "-c", CODE, str(number)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    cause, hint = done.stderr.splitlines()
    assert "too many open files" in cause
    assert fix in hint
