"""The user at the other end of a loopback connection is identified for all address types."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from otel_kprofiler.viewing import peers

pytestmark = pytest.mark.system

NOBODY = 65534
CONNECT = """
import os, socket, sys
if os.getuid() == 0: os.setuid(int(sys.argv[3]))
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sys.stdin.read()
"""
ADDRESSES = [
    ("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::ffff:127.0.0.1"),
    ("127.0.0.1", "::ffff:127.0.0.1"),
]  # fmt: skip


@contextlib.contextmanager
def connected(listening, address, user):
    """Yields a connection from a process, which runs as another user if the test runs as root."""
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    try:
        server = socket.create_server(
            (listening, 0), family=family, dualstack_ipv6=listening == "::"
        )
    except OSError as error:
        pytest.skip(f"cannot listen on {listening}: {error}")
    with server:
        command = [sys.executable, "-c", CONNECT, address, str(server.getsockname()[1]), str(user)]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/")
        try:
            server.settimeout(30)
            connection, _ = server.accept()
            with connection:
                yield connection, client
        finally:
            client.stdin.close()
            client.wait(30)


def has_tcp_diag(connection):
    ends = peers._parse(connection.getsockname()), peers._parse(connection.getpeername())
    return peers._ask_kernel(*ends) is not None


@pytest.mark.parametrize(("listening", "address"), ADDRESSES)
@pytest.mark.parametrize("source", ["sock_diag", "/proc/net/tcp"])
def test_the_user_of_a_local_peer_is_identified(listening, address, source, monkeypatch):
    user = NOBODY if os.getuid() == 0 else os.getuid()
    with connected(listening, address, user) as (connection, client):
        if source == "sock_diag":
            if not has_tcp_diag(connection):
                pytest.skip("the kernel lacks tcp_diag")
            monkeypatch.setattr(peers, "_TABLES", {4: "/nonexistent", 6: "/nonexistent"})
        else:
            monkeypatch.setattr(peers, "_NETLINK_SOCK_DIAG", 31)
        assert peers.find_peer_user(connection) == user
        client.kill()
        client.wait()
        assert peers.find_peer_user(connection) is None


def test_the_proc_table_is_read_if_tcp_diag_is_unavailable(monkeypatch):
    monkeypatch.setattr(peers, "_ask_kernel", lambda local, remote: None)
    with connected("127.0.0.1", "127.0.0.1", os.getuid()) as (connection, _):
        assert peers.find_peer_user(connection) == os.getuid()


def test_a_listening_socket_is_not_a_peer():
    """If the kernel finds no connection, it returns the listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        local = peers._parse(server.getsockname())
        assert peers._ask_kernel(local, peers._End(local.address, 1)) is None
