"""While no process reads the agent's output, sampling continues and SIGTERM stops the agent."""

from types import SimpleNamespace

import pytest

from tests.faults.accounts import stop_and_check
from tests.faults.table.kinds import health

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("load")]


@pytest.fixture
def run(request, tmp_path):
    """Returns a stub run with the attributes that output faults use."""
    return SimpleNamespace(on_close=request.addfinalizer, directory=tmp_path)


@pytest.fixture
def full_pipe(run):
    return health.full_pipe(run)


@pytest.mark.long
def test_an_unread_notify_socket_does_not_block_the_agent(run_agent, receiver, run):
    receiver.up()
    agent = run_agent(receiver.endpoint, environ=health.full_socket(run))
    agent.wait_until(lambda: len(receiver.payloads) > 4)
    stop_and_check(agent, receiver)


def reload(agent, receiver):
    """Makes the main loop write a log line, and checks that the loop continues."""
    agent.reload()
    agent.wait_until(lambda: agent.get("/readyz")[0] == 200)
    before = len(receiver.payloads)
    agent.wait_until(lambda: len(receiver.payloads) > before + 6)


@pytest.mark.long
def test_an_unread_standard_error_does_not_block_the_agent(run_agent, receiver, full_pipe):
    receiver.up()
    agent = run_agent(receiver.endpoint, stderr=full_pipe)
    reload(agent, receiver)
    stop_and_check(agent, receiver)


@pytest.mark.long
def test_unread_outputs_do_not_prevent_the_agent_from_exiting(run_agent, receiver, full_pipe):
    receiver.up()
    agent = run_agent(receiver.endpoint, stdout=full_pipe, stderr=full_pipe)
    reload(agent, receiver)
    agent.process.terminate()
    assert agent.process.wait(60) == 0
