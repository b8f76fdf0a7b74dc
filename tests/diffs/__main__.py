"""Tabulates the results of ``diff`` on identical loads, and on loads with a known difference.

usage: python -m tests.diffs [--rate HZ] [--keep DIRECTORY] [PAIRS] [SECONDS]

The compared loads run at the same time, because other work that preempted or interrupted only one
load would appear as a difference.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.live.programs import holds_sampler

SOURCE = Path(__file__).with_name("calls.c")
EQUAL = (20, 20, 20, 20, 20)
PLANTED = (24, 19, 19, 19, 19)
PLANTED_CALL = "read"
COMMAND = [sys.executable, "-m", "otel_kprofiler"]
MOST_FALSE, PAIRS = 2, 20
"""At most ``MOST_FALSE`` of ``PAIRS`` identical pairs may show a change (5 % significance)."""


def record(program, path, begin, *, shares, seconds, rate):
    """Records a run of the load, from its first system call to its end, and returns ``path``."""
    words = [program, str(seconds), *map(str, shares)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as load:
        options = ["-F", str(rate), "-d", "1h", "-p", str(load.pid), "--force", "-o", str(path)]
        with subprocess.Popen(
            [*COMMAND, "record", *options], stderr=subprocess.PIPE, text=True
        ) as recording:
            while not holds_sampler(recording.pid):
                if recording.poll() is not None:
                    begin.abort()
                    raise RuntimeError(recording.communicate()[1])
                time.sleep(0.05)
            begin.wait()
            load.stdin.close()
            _, errors = recording.communicate()
    if load.returncode or recording.returncode:
        raise RuntimeError(f"{words} exited with {load.returncode}: {errors}")
    return path


def record_all(program, folder, runs, **options):
    begin = threading.Barrier(len(runs))
    with ThreadPoolExecutor(len(runs)) as pool:
        started = [
            pool.submit(record, program, folder / f"{name}.otlp", begin, shares=shares, **options)
            for name, shares in runs.items()
        ]
        return [one.result() for one in started]


def compare(before, after, by):
    words = [*COMMAND, "diff", "--by", by, "--json", str(before), str(after)]
    (kind,) = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)["kinds"]
    return kind


def changed(kind):
    return [
        f"{group['name']} {group['self']['before']:.2%} -> {group['self']['after']:.2%}"
        f" (total {group['total']['before']:.2%} -> {group['total']['after']:.2%})"
        for group in kind["groups"]
        if group["changed"]
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=999)
    parser.add_argument("--keep", help="directory to keep the recordings in")
    parser.add_argument("pairs", nargs="?", type=int, default=PAIRS)
    parser.add_argument("seconds", nargs="?", type=float, default=21.0, help="CPU time per run")
    options = parser.parse_args()
    false, result = 0, 0
    print(f"pair {'samples':>23} {'functions changed':>18} {'first of planted':>17}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        program = folder / "calls"
        command = ["gcc", "-O1", "-Wall", "-Werror", "-pthread", SOURCE, "-o", program]
        subprocess.run(command, check=True)
        for pair in range(options.pairs):
            runs = {"before": EQUAL, "after": EQUAL, "planted": PLANTED}
            before, after, planted = record_all(
                program,
                folder,
                {f"{pair}-{name}": shares for name, shares in runs.items()},
                seconds=options.seconds,
                rate=options.rate,
            )
            equal = compare(before, after, "function")
            calls = compare(before, planted, "syscall")
            counts = [equal["before"], equal["after"], calls["after"]]
            first = calls["groups"][0]
            mistakes = changed(equal)
            false += bool(mistakes)
            result += first["changed"] and first["name"] == PLANTED_CALL
            print(
                f"{pair:4} {' '.join(format(count['samples'], '7,') for count in counts)}"
                f" {len(mistakes):8} of {len(equal['groups']):6} {first['name']:>10}"
                f" {first['self']['change']:+.2%}",
                *mistakes, flush=True,
            )  # fmt: skip
    print(f"{false} of {options.pairs} equal pairs show a change; planted first in {result}")
    return 1 if false * PAIRS > MOST_FALSE * options.pairs or result < options.pairs else 0


if __name__ == "__main__":
    sys.exit(main())
