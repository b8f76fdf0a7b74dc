"""Pidfds and memfds can be opened even if the interpreter's os module lacks the functions."""

import pytest

from tests.interpreters import VERSIONS, require_pythons

pytestmark = pytest.mark.system

_OPEN = """
import os, select, signal, subprocess
from otel_kprofiler.host import create_memfd, open_pidfd, signal_pidfd
child = subprocess.Popen(["sleep", "30"])
fd = open_pidfd(child.pid)
signal_pidfd(fd, signal.SIGTERM)
print(select.select([fd], [], [], 60)[0] == [fd], child.wait())
try:
    open_pidfd(child.pid)
except ProcessLookupError:
    print("has ended")
memory = create_memfd("some name")
print(os.readlink(f"/proc/self/fd/{memory}"), os.get_inheritable(memory))
"""
SHOWN = "True -15\nhas ended\n/memfd:some name (deleted) False\n"


@pytest.mark.parametrize("minor", VERSIONS)
def test_pidfds_and_memfds_can_be_opened_in_every_installed_python_version(minor):
    for python in require_pythons(minor):
        ran = python.run("-c", _OPEN)
        assert ran.stdout == SHOWN, ran.stderr
