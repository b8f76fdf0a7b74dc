"""Connects slow clients, and reconnects disconnected clients after about a second.

Usage: python -m tests.unit.viewing.slow_clients COUNT PORT…. The program prints a line once each
client has connected. At end of input, the program prints the number of connections made, and exits.
"""

import contextlib
import resource
import selectors
import socket
import sys
import time

from tests.unit.viewing import http2

HTTP = b"POST /v1development/profiles HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
SENT = HTTP, http2.PREFACE + http2.call(1, b"\0\0\x7f\0\0xxxx"), b""
IN_PROGRESS = 64


class Client(socket.socket):
    """The non-blocking socket of a client, with the client's number."""

    number = 0


def main():
    count, *ports = map(int, sys.argv[1:])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    selector = selectors.EpollSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    waiting, made, connecting, reported = list(range(count)), 0, 0, False
    later, retry_at = [], time.monotonic() + 1
    while True:
        if time.monotonic() >= retry_at:
            waiting, later, retry_at = waiting + later, [], time.monotonic() + 1
        while waiting and connecting < IN_PROGRESS:
            client = Client()
            client.setblocking(False)
            client.number = waiting.pop()
            client.connect_ex(("127.0.0.1", ports[client.number % len(ports)]))
            selector.register(client, selectors.EVENT_WRITE)
            connecting += 1
        for key, events in selector.select(0.1):
            if key.fileobj is sys.stdin:
                sys.stdout.write(f"{made}\n")
                return
            client = key.fileobj
            if events & selectors.EVENT_WRITE:
                connecting -= 1
                made += 1
                with contextlib.suppress(OSError):
                    client.send(SENT[client.number // len(ports) % len(SENT)])
                    selector.modify(client, selectors.EVENT_READ)
                    continue
            elif read(client):
                continue
            selector.unregister(client)
            client.close()
            later.append(client.number)
        if made >= count and not reported:
            reported = True
            sys.stdout.write("connected\n")
            sys.stdout.flush()


def read(client):
    """Reads from a client. Returns a falsy value if the connection has been closed."""
    try:
        return client.recv(1 << 16)
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
