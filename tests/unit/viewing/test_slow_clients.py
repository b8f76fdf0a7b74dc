"""With many slow clients on all ports, `view` uses bounded memory and serves other clients."""

import contextlib
import os
import resource
import subprocess
import sys
import time
import urllib.error

import pytest

from tests.unit.viewing import slow_clients
from tests.unit.viewing.test_view_command import (
    VIEW,
    get,
    listen,
    read_addresses,
    recent,  # noqa: F401
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROCESSES = 4
MOST_BYTES = 40 << 20
"""The permitted memory growth with 256 gRPC connections and 16 threads per HTTP server."""


def anonymous_bytes(pid):
    """Returns the size of a process's anonymous memory, including pages in swap."""
    with open(f"/proc/{pid}/status") as status:
        return sum(
            int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "VmSwap"))
        )


def count_open(pid):
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@contextlib.contextmanager
def connected(count, ports):
    """Runs slow clients in several processes, and yields once each client has connected."""
    words = [sys.executable, "-m", slow_clients.__name__, str(count // PROCESSES), *ports]
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(PROCESSES)
        ]
        for process in crowd:
            assert process.stdout.readline() == "connected\n"
        yield
        made = sum(int(process.communicate("")[0]) for process in crowd)
    assert made >= count


def retry(call, seconds=60):
    """Retries a call for some time, as senders do, and returns its result."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except (OSError, urllib.error.URLError, subprocess.SubprocessError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_slow_clients_do_not_affect_other_clients_and_their_resources_are_released(count, recent):  # noqa: F811
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < count // PROCESSES + 64:
        pytest.skip(f"needs a limit of {count // PROCESSES + 64} open files; the limit is {most}")
    with listen() as (command, address):
        places = read_addresses(command)
        ports = [place.rpartition(":")[2] for place in (*places, address.strip("/"))]
        assert get(address, "profile.json")
        start, opened = anonymous_bytes(command.pid), count_open(command.pid)
        with connected(count, ports):
            for place in places:
                sending = [*VIEW[:-1], "send", recent, place]
                retry(
                    lambda words=sending: subprocess.run(
                        words, check=True, capture_output=True, timeout=60
                    )
                )
            assert b"nginx" in retry(lambda: get(address, "profile.json"))
            grown = anonymous_bytes(command.pid) - start
            connections = count_open(command.pid)[0]
        sys.stdout.write(f"{count} clients: {connections} descriptors, {grown >> 20} MiB more\n")
        assert grown < MOST_BYTES
        most_open = [number + 16 for number in opened]
        wait_until(lambda: all(map(int.__le__, count_open(command.pid), most_open)))
