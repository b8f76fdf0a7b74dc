"""Creates, runs and frees functions continuously, so that code objects reuse freed addresses.

Runs like program.py, without arguments. In two threads, every function has a unique name. In two
others, functions differ only in line numbers, and line tables also reuse earlier addresses.
"""
# ruff: noqa: T201 - a command

import array
import json
import os
import sys
import threading
import types

LINED = 1 << 40
"""Added to the marks of functions that differ only in their line numbers."""
SPREAD = 5
_NAMES = 1_000_000
_WORK = " m[0] = {0}\n for i in r: pass\n for i in r: pass\n"
_FEW_LINES = 5
"""Offset of each function's first line, chosen so that all line tables have the same size."""


def make(source, name):
    names = {}
    exec(compile(source, "churn.py", "exec"), names)
    return names[name]


def name_of(serial):
    return f"f{serial % _NAMES:06d}"


def named(serial):
    name = name_of(serial)
    return make(f"def {name}(m, r):\n{_WORK.format(serial)}", name)


def first_line_of(serial):
    return 2 + _FEW_LINES + serial % SPREAD


def lined(serial):
    """Creates a function that differs only in its lines, and in constants that profilers ignore."""
    code = _LINED[serial % SPREAD].__code__
    table = bytes(bytearray(code.co_linetable))
    code = _LINED[0].__code__.replace(co_linetable=table, co_consts=code.co_consts)
    return types.FunctionType(code, {})


_LINED = [
    make("def f(m, r):" + "\n" * (first_line_of(one) - 1) + _WORK.format(LINED + one), "f")
    for one in range(SPREAD)
]


def expected(mark):
    """Returns the function that stores a mark, and the first and last line of its body."""
    serial = mark % LINED
    if mark < LINED:
        return name_of(serial), 2, 4
    first = first_line_of(serial)
    return "f", first, first + 2


def work(make_next, serial, reports, ready, stop):
    m, r = array.array("Q", [0, 0]), range(10_000)
    reports.append([threading.get_native_id(), m.buffer_info()[0], []])
    ready.wait()
    while not stop.is_set():
        serial += 2
        function = make_next(serial)
        function(m, r)
        m[0] = 0
        del function


def main():
    reports, ready, stop = [], threading.Barrier(5), threading.Event()
    threads = [
        threading.Thread(target=work, args=(make_next, serial, reports, ready, stop))
        for make_next in (named, lined)
        for serial in (1, 2)
    ]
    for thread in threads:
        thread.start()
    while len(reports) < len(threads):
        stop.wait(0.01)
    print(json.dumps({"pid": os.getpid(), "threads": reports}), flush=True)
    ready.wait()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
