"""Runs the call chains from chains.py in threads until standard input ends.

``python program.py SEED STYLES`` writes one line of JSON that contains its pid and, for each
thread, the thread id, the address of the thread's mark, and the functions that call its chains.
"""
# ruff: noqa: T201 - a command

import array
import json
import os
import socket
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import chains


class Things:
    def __init__(self):
        self.zero = os.open("/dev/zero", os.O_RDONLY)
        self.null = os.open("/dev/null", os.O_WRONLY)
        self.data = b"x" * 4096
        self.a, self.b = socket.socketpair()


def functions_below(frame):
    while frame:
        yield frame.f_code.co_qualname
        frame = frame.f_back


def work(functions, reports, ready, stop):
    m, n = array.array("Q", [0, 0]), Things()
    below = list(functions_below(sys._getframe()))
    reports.append([threading.get_native_id(), m.buffer_info()[0], below])
    ready.wait()
    while not stop.is_set():
        for function in functions:
            function(m, n)


def main():
    program = chains.Chains(int(sys.argv[1]), sys.argv[2].split(","))
    names = {}
    exec(compile(program.source, "chains.py", "exec"), names)
    reports, ready, stop = [], threading.Barrier(chains.THREADS + 1), threading.Event()
    threads = [
        threading.Thread(target=work, args=([names[root] for root in roots], reports, ready, stop))
        for roots in program.roots.values()
    ]
    for thread in threads:
        thread.start()
    while len(reports) < chains.THREADS:
        stop.wait(0.01)
    sys.setswitchinterval(0.001)
    print(json.dumps({"pid": os.getpid(), "threads": reports}), flush=True)
    ready.wait()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
