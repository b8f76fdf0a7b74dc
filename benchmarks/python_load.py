"""Runs twenty Python processes with different functions and deep stacks for a fixed time.

``python -m benchmarks.python_load SECONDS``.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable

PROCESSES = 20
FUNCTIONS = 30
DEPTH = 20


def make_functions(process: int) -> list[Callable[[int], None]]:
    """Returns functions that call each other in a ring until the innermost call does the work."""
    results: dict[str, Callable[[int], None]] = {}
    lines = ["import json, os"]
    for at in range(FUNCTIONS):
        lines += [
            f"def step_{process}_{at}(depth):",
            "    if depth:",
            f"        return step_{process}_{(at + 1) % FUNCTIONS}(depth - 1)",
            "    json.loads(json.dumps(list(range(500))))",
            "    os.listdir('/')",
        ]
    exec(compile("\n".join(lines), f"load_{process}.py", "exec"), results)
    return [results[f"step_{process}_{at}"] for at in range(FUNCTIONS)]


def work(process: int, seconds: float) -> None:
    """Calls the functions for the given time, or until the parent exits."""
    until, parent = time.monotonic() + seconds, os.getppid()
    functions = make_functions(process)
    while time.monotonic() < until and os.getppid() == parent:
        for function in functions:
            function(DEPTH)


def main() -> None:
    """Runs all processes, or only the work of the process with the given number."""
    seconds, *numbers = sys.argv[1:]
    if numbers:
        work(int(numbers[0]), float(seconds))
        return
    command = [sys.executable, "-m", "benchmarks.python_load", seconds]
    started = [subprocess.Popen([*command, str(at)]) for at in range(PROCESSES)]
    for process in started:
        process.wait()


if __name__ == "__main__":
    main()
