"""HTTP clients that run as threads in the tested service's process."""

import http.client
import itertools
import threading
import time

CLIENTS = 4


def request_until(end, port, paths):
    """Requests the paths cyclically, with several clients, until a given time. Asserts success."""
    failed = []

    def request():
        for path in itertools.cycle(paths):
            if time.monotonic() > end or failed:
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            connection.close()
            if response.status != 200:
                failed.append(f"{path}: {response.status} {body!r}")

    clients = [threading.Thread(target=request) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert not failed, failed[0]
