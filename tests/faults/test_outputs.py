"""While nobody reads the agent's output, sampling continues and SIGTERM stops the agent."""

import contextlib
import os
import signal
import socket

import pytest

from tests.faults.accounts import stop_and_check

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("load")]


@pytest.fixture
def full_pipe():
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


@pytest.fixture
def full_socket(tmp_path):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with sender, contextlib.suppress(BlockingIOError):
            while True:
                sender.sendto(b"x", path)
        yield path


def test_an_unread_notify_socket_does_not_block_the_agent(run_agent, receiver, full_socket):
    receiver.up()
    environment = {"NOTIFY_SOCKET": full_socket, "WATCHDOG_USEC": "200000"}
    agent = run_agent(receiver.endpoint, environment=environment)
    agent.wait_until(lambda: len(receiver.payloads) > 4)
    stop_and_check(agent, receiver)


def reload(agent, receiver):
    """Makes the main loop write to its log, and checks that the loop continues."""
    agent.process.send_signal(signal.SIGHUP)
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
def test_unread_outputs_do_not_keep_the_agent_from_exiting(run_agent, receiver, full_pipe):
    receiver.up()
    agent = run_agent(receiver.endpoint, stdout=full_pipe, stderr=full_pipe)
    reload(agent, receiver)
    agent.process.terminate()
    assert agent.process.wait(60) == 0
