"""Processes with memory on a hanging file system do not delay other reads."""

import os

import pytest

from otel_kprofiler.host import MAX_LEFT, Access
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.processes.hanging_processes import MAX_OF_USER, HangingProcesses
from tests.fuse import mounted
from tests.waiting import wait_until

pytestmark = pytest.mark.system

USERS = FIRST, SECOND, THIRD = (1000, 2000, 3000)


@pytest.fixture
def keys(tmp_path):
    """Returns process keys by user; each user exceeds the limit on hanging processes by one."""
    results = {}
    for user in USERS:
        results[user] = [ProcessKey(user + number, 1) for number in range(MAX_OF_USER + 1)]
        for key in results[user]:
            (tmp_path / "proc" / str(key.tgid)).mkdir(parents=True)
            os.chown(tmp_path / "proc" / str(key.tgid), user, user)
    return results


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives directories to other users")
def test_hanging_processes_block_neither_callers_nor_reads_for_other_users(tmp_path, keys):
    read = []
    with mounted(tmp_path / "fuse", {"mem": b"content"}, cached=False) as fuse:
        processes = HangingProcesses(Access(str(tmp_path)), "kprofiler-test", patience_s=0.05)
        fuse.freeze("read")

        def call(key):
            return processes.call(key, (fuse.point / "mem").read_bytes)

        def call_quick(user):
            return processes.call(keys[user][-1], lambda: read.append(user))

        assert [call(key) for key in keys[FIRST]] == [True] * MAX_OF_USER + [False]
        assert not call(keys[FIRST][0]), "it was called again"
        assert (call_quick(FIRST), call_quick(SECOND)) == (False, True)
        assert [call(key) for key in keys[SECOND]] == [True] * MAX_OF_USER + [False]
        assert len(processes._users) == MAX_LEFT
        assert not call(keys[THIRD][0]), "it would hold the caller"
        assert read == [SECOND]
        fuse.thaw()
        wait_until(lambda: call_quick(FIRST) and call_quick(THIRD))
        assert read[-1] == THIRD
        for thread in processes.stop():
            thread.join(60)


def test_no_thread_is_woken_for_a_process_that_has_exited(tmp_path):
    processes = HangingProcesses(Access(str(tmp_path)), "kprofiler-test")
    assert not processes.call(ProcessKey(5, 1), lambda: None)
    assert processes.stop() == []
