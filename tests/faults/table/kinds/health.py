"""Faults: other users' connections to the health endpoint, and agent output that nobody reads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

from tests.faults.table.scenario import Scenario, beside, repeatedly

HEALTH, OUTPUT = "health endpoint", "output that nobody reads"

CLIENT = """
import socket, sys, time
port, count, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
pieces = [eval(piece) for piece in sys.argv[4:]]
held = []
while True:
    for _ in range(count):
        try:
            one = socket.create_connection(("127.0.0.1", port), 5)
            one.settimeout(5)
            for piece in pieces:
                one.sendall(piece)
                time.sleep(pause)
            held.append(one)
        except OSError:
            pass
    if count > 1:
        time.sleep(0.5)
    del held[:-2000]
"""
GET = "b'GET /status HTTP/1.1\\r\\nHost: localhost\\r\\n"


def clients(*pieces, count=1, pause_s=0.0, programs=2):
    words = (count, pause_s, *pieces)
    return beside(lambda run: [run.python(CLIENT, run.health, *words) for _ in range(programs)])


RESETS = """
import socket, struct, sys
while True:
    one = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.sendall(b"GET /status HTTP/1.1\\r\\n\\r\\n")
    one.close()
"""
UNREAD = """
import socket, sys, time
held = []
for _ in range(500):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    try:
        one.connect(("127.0.0.1", int(sys.argv[1])))
        one.sendall(b"GET /status HTTP/1.1\\r\\n\\r\\n" * 50)
    except OSError:
        pass
    held.append(one)
time.sleep(60)
"""


def program(code):
    return beside(lambda run: run.python(code, run.health))


ATTACKS = {
    "1,000 connections that send nothing": clients(count=1000),
    "headers that arrive one byte every 0.5 s": clients(
        *[repr(bytes([byte])) for byte in b"GET / HTTP/1.1"], count=1, pause_s=0.5, programs=30),
    "a 1 MB header": clients(GET + "X: ' + b'a' * 1_000_000"),
    "10,000 headers": clients(GET + "' + b'X: y\\r\\n' * 10_000 + b'\\r\\n'"),
    "a 1 MB URL": clients("b'GET /' + b'a' * 1_000_000 + b' HTTP/1.1\\r\\n\\r\\n'"),
    "bytes that are not HTTP": clients("bytes(range(256)) * 100"),
    "a TLS ClientHello": clients("bytes.fromhex('16030100a5010000a10303') + bytes(160)"),
    "a body of 2^63 bytes": clients(
        "b'POST /status HTTP/1.1\\r\\nContent-Length: %d\\r\\n\\r\\n' % 2**63 + bytes(99)"),
    "paths that lead outside the directory": clients(
        "b'GET /../../etc/shadow HTTP/1.1\\r\\n\\r\\n'"),
    "requests as fast as two processes can send them": clients(GET + "\\r\\n'"),
    "clients that send a request and reset the connection": program(RESETS),
    "500 clients that each leave 50 responses unread": program(UNREAD),
    "requests whose Host header names another site": clients(
        "b'GET /status HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n'"),
    "a request with NUL bytes and line feeds in its URL": clients(
        "b'GET /\\0\\n\\x1b[2J HTTP/1.1\\r\\n\\r\\n'"),
}  # fmt: skip


def full_pipe(run):
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    run.on_close(lambda: (os.close(read), os.close(write)))
    return write


def closed_pipe(run):
    read, write = os.pipe()
    os.close(read)
    run.on_close(lambda: os.close(write))
    return write


def opened(path):
    def open_it(run):
        descriptor = os.open(path, os.O_WRONLY)
        run.on_close(lambda: os.close(descriptor))
        return descriptor

    return open_it


def full_socket(run):
    """Returns the environment for a notification socket whose queue is full."""
    path = str(run.directory / "notify")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(path)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with sender, contextlib.suppress(BlockingIOError):
        while True:
            sender.sendto(b"x", path)
    run.on_close(listener.close)
    return {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"}


def unread(name, make):
    """The agent reloads repeatedly, so that it writes to its log."""
    talk = repeatedly(lambda run: run.process.send_signal(signal.SIGHUP), 0.5)
    return Scenario(OUTPUT, name, talk, outputs=lambda run: {"stderr": make(run)},
                    service={"telemetry": {"logs": {"level": "debug"}}})  # fmt: skip


def notified(name, make):
    return Scenario(OUTPUT, name, environment=make)


def take_port(run):
    """Listens on the agent's health port before the agent does, for 6 s."""
    taken = socket.create_server(("127.0.0.1", run.health))
    release = threading.Timer(6, taken.close)
    release.start()
    run.on_close(release.join)


SCENARIOS = [
    *[Scenario(HEALTH, name, fault) for name, fault in ATTACKS.items()],
    Scenario(HEALTH, "another process is using the port when the agent starts", before=take_port),
    unread("log is written to a full pipe", full_pipe),
    unread("log is written to a pipe without a reader", closed_pipe),
    unread("log is written to a full disk", opened("/dev/full")),
    notified("systemd's notification socket is full", full_socket),
    notified(
        "systemd's notification socket does not exist",
        lambda run: {"NOTIFY_SOCKET": str(run.directory / "nothing"), "WATCHDOG_USEC": "200000"},
    ),
    notified(
        "systemd's notification socket has an invalid name",
        lambda _: {"NOTIFY_SOCKET": "x" * 5000, "WATCHDOG_USEC": "-1"},
    ),
]
