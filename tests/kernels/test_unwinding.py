"""Tests user stack unwinding on the guest kernel."""

import os
import subprocess
from collections import Counter

import pytest
from guest.sampled import drain_until, finish, sampler

from otel_kprofiler.host import Access, read_release
from otel_kprofiler.model import USER_SIDE, StackEnd, parse_user_stack

pytestmark = [pytest.mark.kernel, pytest.mark.one_boot]

PYTHON = "def f(n):\n return sum(map(f, [n - 1])) + n if n else 0\nwhile True: f(9)"
SHELL = 'f() { [ "$1" -gt 0 ] && f $(($1 - 1)); }; while :; do f 7; done'
ENOUGH = 100


@pytest.mark.parametrize(
    "command",
    [("/usr/bin/python3", "-c", PYTHON), ("/bin/bash", "-c", SHELL)],
    ids=["python", "bash"],
)
def test_user_stacks_reach_the_entry_point_of_the_program(command):
    """User stacks in code without frame pointers reach the program's entry point."""
    inode = os.stat(command[0]).st_ino
    with subprocess.Popen(command) as process:
        try:

            def stacks_of(samples):
                words = (s.words(USER_SIDE) for s in samples if s.tgid == process.pid)
                return [parse_user_stack(raw) for raw in words if raw]

            def enough(samples):
                return Counter(s.end for s in stacks_of(samples))[StackEnd.COMPLETE] >= ENOUGH

            with sampler(stacks="both") as running:
                if read_release(Access())[:2] >= (5, 12):
                    assert running.tables.requested > 0, "before the first sample"
                samples = drain_until(running, enough)
                samples += finish(running)
                tables = running.tables
        finally:
            process.kill()
    stacks = stacks_of(samples)
    # Emulated CPUs may spend most of the test loading the tables.
    first = next(at for at, stack in enumerate(stacks) if stack.end is StackEnd.COMPLETE)
    late = stacks[first:]
    ends = Counter(stack.end for stack in late)
    assert ends[StackEnd.COMPLETE] >= 0.95 * len(late), ends
    outermost = {
        stack.mappings[stack.places[-1]].file.inode
        for stack in late
        if stack.end is StackEnd.COMPLETE
    }
    assert outermost == {inode}
    assert tables.loaded >= 2
