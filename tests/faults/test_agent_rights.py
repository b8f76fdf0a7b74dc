"""Threads of a running agent hold only the capabilities that they need, as /proc shows."""

import os
import time

import pytest

from otel_kprofiler.host import Access, doctor, read_threads
from otel_kprofiler.host.privileges import SAMPLING
from tests.faults.accounts import Arrived
from tests.needs import ROOT

pytestmark = [pytest.mark.live, ROOT]
OTHERS = tuple(
    f"kprofiler-{part}" for part in ("ksymb", "conte", "modul", "files", "table", "pytho")
)
"""The names of threads that keep some capabilities, truncated to 15 bytes by the kernel."""


def threads_of(agent):
    time.sleep(1.5)
    threads = read_threads(Access(), agent.process.pid)
    assert len(threads) >= 5
    return threads


def test_every_thread_holds_only_capabilities_that_doctor_lists(run_agent, receiver):
    receiver.up()
    agent = run_agent(receiver.endpoint)
    agent.wait_until(lambda: receiver.payloads)
    listed = {f.check: f.observed for f in doctor(Access())}["kept while sampling"]
    for thread, held in threads_of(agent).items():
        assert all(name in listed for name in held), thread
        if thread.startswith(f"{agent.process.pid} "):
            assert held == set(SAMPLING)
        elif not thread.partition(" ")[2].startswith(OTHERS):
            assert held == set(), thread
    agent.stop()


def test_drop_all_drops_every_capability_and_sampling_continues(run_agent, receiver):
    receiver.up()
    agent = run_agent(receiver.endpoint, more="privileges: {drop_all: true}")
    assert set(threads_of(agent).values()) == {frozenset()}
    before = len(receiver.payloads)
    agent.wait_until(lambda: len(receiver.payloads) > before + 1)
    log = agent.log
    assert "dropped CAP_PERFMON, which is needed for sampling CPUs that come online later" in log
    account = agent.stop()
    assert account["taken"] > 100
    assert sum(Arrived(receiver.payloads).samples.values()) == account["received"]


def test_no_thread_can_regain_capabilities_by_exec(run_agent, receiver):
    agent = run_agent(receiver.endpoint)
    directory = f"/proc/{agent.process.pid}/task"
    for tid in os.listdir(directory):
        with open(f"{directory}/{tid}/status") as status:
            assert "NoNewPrivs:\t1" in status.read()
