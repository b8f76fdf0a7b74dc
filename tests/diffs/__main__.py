"""``diff`` of equal runs, and of runs with a planted difference, as a table.

usage: python -m tests.diffs [--rate HZ] [PAIRS] [SECONDS]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.live.programs import holds_sampler

SOURCE = Path(__file__).with_name("calls.c")
EQUAL = (20, 20, 20, 20, 20)
PLANTED = (24, 19, 19, 19, 19)
PLANTED_CALL = "read"
COMMAND = [sys.executable, "-m", "otel_kprofiler"]
MOST_FALSE, PAIRS = 2, 20
"""At most so many of so many equal pairs may have a change: 5 % each, within what is chance."""


def record(program, path, *, shares, seconds, rate):
    """Record a run of the load, from its first system call to its end."""
    words = [program, str(seconds), *map(str, shares)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as load:
        options = ["-F", str(rate), "-d", "1h", "-p", str(load.pid), "--force", "-o", str(path)]
        with subprocess.Popen(
            [*COMMAND, "record", *options], stderr=subprocess.PIPE, text=True
        ) as recording:
            while not holds_sampler(recording.pid):
                if recording.poll() is not None:
                    raise RuntimeError(recording.communicate()[1])
                time.sleep(0.05)
            load.stdin.close()
            _, errors = recording.communicate()
    if load.returncode or recording.returncode:
        raise RuntimeError(f"{words} ended with {load.returncode}: {errors}")
    return path


def compare(before, after, by):
    """What ``diff`` says of two recordings."""
    words = [*COMMAND, "diff", "--by", by, "--json", str(before), str(after)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    (kind,) = json.loads(done.stdout)["kinds"]
    return kind


def changed(kind):
    """What changed, the first of the table first, with its shares in percent."""
    return [
        f"{group['name']} {group['self']['before']:.2%} -> {group['self']['after']:.2%}"
        f" (total {group['total']['before']:.2%} -> {group['total']['after']:.2%})"
        for group in kind["groups"]
        if group["changed"]
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=999)
    parser.add_argument("--keep", help="a directory for the recordings")
    parser.add_argument("pairs", nargs="?", type=int, default=PAIRS)
    parser.add_argument("seconds", nargs="?", type=float, default=21.0, help="of CPU time of a run")
    options = parser.parse_args()
    false, found = 0, 0
    print(f"pair {'samples':>23} {'functions changed':>18} {'first of planted':>17}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        program = folder / "calls"
        command = ["gcc", "-O1", "-Wall", "-Werror", "-pthread", SOURCE, "-o", program]
        subprocess.run(command, check=True)
        for pair in range(options.pairs):
            before, after, planted = (
                record(
                    program, folder / f"{pair}-{name}.otlp",
                    shares=shares, seconds=options.seconds, rate=options.rate,
                )
                for name, shares in (("before", EQUAL), ("after", EQUAL), ("planted", PLANTED))
            )  # fmt: skip
            equal = compare(before, after, "function")
            calls = compare(before, planted, "syscall")
            counts = [equal["before"], equal["after"], calls["after"]]
            first = calls["groups"][0]
            mistakes = changed(equal)
            false += bool(mistakes)
            found += first["changed"] and first["name"] == PLANTED_CALL
            print(
                f"{pair:4} {' '.join(format(one['samples'], '7,') for one in counts)}"
                f" {len(mistakes):8} of {len(equal['groups']):6} {first['name']:>10}"
                f" {first['self']['change']:+.2%}",
                *mistakes, flush=True,
            )  # fmt: skip
    print(f"{false} of {options.pairs} equal pairs with a change, planted first in {found}")
    return 1 if false * PAIRS > MOST_FALSE * options.pairs or found < options.pairs else 0


if __name__ == "__main__":
    sys.exit(main())
