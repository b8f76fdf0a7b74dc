"""Agents that are frozen, or receive unrelated signals, account for every sample.

The kernel continues to sample, so a frozen agent's ring buffer overflows at a high sampling rate.
By default, two agents are frozen for ``FREEZE_S``: one with a high sampling rate, and one with a
large enough ring buffer. ``make test-freezes`` runs longer freezes repeatedly, for each sampling
rate and kind of stack. All agents in an iteration are frozen concurrently.
"""

import itertools
import os
import signal
import sys
import time

import pytest

from tests.faults.accounts import UNHURRIED, check_stream, stop_and_check

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("load")]

ROUNDS = int(os.environ.get("KPROFILER_FREEZES", "1"))
FREEZE_S = float(os.environ.get("KPROFILER_FREEZE_S", "10"))
AFTER_S = 2.0
AGENTS = (
    tuple(itertools.product((99, 997), ("kernel", "both")))
    if "KPROFILER_FREEZES" in os.environ
    else ((99, "kernel"), (997, "both"))
)

FOREIGN = (
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO,
    signal.SIGRTMIN, signal.SIGRTMAX,
)  # fmt: skip


def check_all_accounted(agent, receiver):
    """Checks that taken = arrived + lost, in both the printed and the received counts."""
    account, exporter, got = stop_and_check(agent, receiver)
    assert exporter["pending"] == 0
    check_stream(got, *got.totals)
    return account


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.long
def test_every_sample_lost_during_a_freeze_is_counted(run_agent, open_receiver, number):
    running = []
    for rate, stacks in AGENTS:
        receiver = open_receiver()
        receiver.up()
        name = f"{rate}-{stacks}"
        agent = run_agent(
            receiver.endpoint, directory=name, rate=rate, stacks=stacks, more=UNHURRIED
        )
        running.append((name, agent, receiver))
    for _, agent, _ in running:
        agent.process.send_signal(signal.SIGSTOP)
    time.sleep(FREEZE_S)
    for _, agent, _ in running:
        agent.process.send_signal(signal.SIGCONT)
    time.sleep(AFTER_S)
    for name, agent, receiver in running:
        assert agent.get("/livez")[0] == 200
        account = check_all_accounted(agent, receiver)
        assert "stalled" not in agent.log
        lost = sum(account["lost"].values())
        line = f"round {number}, {name}: {account['taken']} taken, {lost} lost in the ring"
        sys.stdout.write(line + "\n")


@pytest.mark.long
def test_unrelated_signals_neither_kill_nor_disturb_the_agent(run_agent, receiver):
    receiver.up()
    agent = run_agent(receiver.endpoint, rate=997, more=UNHURRIED)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for number in FOREIGN:
            agent.process.send_signal(number)
    check_all_accounted(agent, receiver)
