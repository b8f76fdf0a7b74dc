"""Runs the chains from chains.py in threads, each in a subinterpreter, until standard input ends.

``python subinterpreters.py SEED STYLES`` prints the same line as program.py.
"""
# ruff: noqa: T201 - a command

import json
import os
import sys
import threading

import chains

try:
    import _interpreters as interpreters
except ImportError:  # before CPython 3.13
    import _xxsubinterpreters as interpreters

FOLDER = os.path.dirname(os.path.abspath(__file__))
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import subinterpreters
subinterpreters.work({seed}, {styles!r}, {thread}, {report})
"""


def work(seed, styles, thread, report):
    """Reports a thread to a descriptor as program.py does, and runs its chains forever."""
    import array

    import program

    functions = chains.Chains(seed, styles)
    names = {}
    exec(compile(functions.source, "chains.py", "exec"), names)
    m, n = array.array("Q", [0, 0]), program.Things()
    below = list(program.functions_below(sys._getframe()))
    os.write(report, json.dumps([threading.get_native_id(), m.buffer_info()[0], below]).encode())
    while True:
        for root in functions.roots[thread]:
            names[root](m, n)


def start(thread):
    end, report = os.pipe()
    script = SCRIPT.format(
        folder=FOLDER, seed=sys.argv[1], styles=sys.argv[2].split(","), thread=thread, report=report
    )
    arguments = interpreters.create(), script
    threading.Thread(target=interpreters.run_string, args=arguments, daemon=True).start()
    return json.loads(os.read(end, 4096))


def main():
    threads = [start(thread) for thread in range(chains.THREADS)]
    print(json.dumps({"pid": os.getpid(), "threads": threads}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
