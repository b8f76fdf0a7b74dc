"""Runs a mixed load for a fixed time: computation, pipes, short-lived processes and file I/O.

``python -m benchmarks.mixed_load SECONDS``. Needs only Python, so that the load is the same on
every machine. Each component uses about one CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context


def compute(goes_on: Callable[[], bool], _: str) -> None:
    """Serializes and parses JSON, which uses CPU time and causes page faults."""
    while goes_on():
        for _round in range(50):
            json.loads(json.dumps(list(range(2000))))


def pipes(goes_on: Callable[[], bool], _: str) -> None:
    """Passes a block back and forth between two processes, to exercise the scheduler and pipes."""
    there, back = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there[1])
        while block := os.read(there[0], 512):
            os.write(back[1], block)
        os._exit(0)
    while goes_on():
        for _round in range(200):
            os.write(there[1], b"x" * 512)
            os.read(back[0], 512)
    os.close(there[1])
    os.waitpid(child, 0)


def short_processes(goes_on: Callable[[], bool], _: str) -> None:
    """Runs programs that exit after a millisecond or two, which exercises fork, exec and exit."""
    while goes_on():
        subprocess.run(["/bin/true"], check=True)


def files(goes_on: Callable[[], bool], directory: str) -> None:
    """Writes, reads back and removes files, to exercise the file system and the page cache."""
    index = 0
    while goes_on():
        path = os.path.join(directory, str(index % 64))
        index += 1
        with open(path, "wb") as file:
            file.write(os.urandom(65536))
        with open(path, "rb") as file:
            while file.read(4096):
                pass
        os.unlink(path)


PARTS = (compute, pipes, short_processes, files)


def run(seconds: float) -> None:
    context = get_context("fork")
    until, parent = time.monotonic() + seconds, os.getpid()

    def goes_on() -> bool:
        return time.monotonic() < until and os.getppid() == parent

    with tempfile.TemporaryDirectory() as directory:
        workers = [context.Process(target=part, args=(goes_on, directory)) for part in PARTS]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    run(float(sys.argv[1]))
