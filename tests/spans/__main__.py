"""Compares samples from services with the services' span logs, and prints a table.

usage: python -m tests.spans [--source interpreter|record] [SECONDS] [SCENARIO…]
"""

import argparse
import json
import subprocess
import sys

from tests.spans.observe import NOTHING, SOURCES, Outcome, Truth, compare, sampling
from tests.spans.scenarios import SCENARIOS


def run_here(name, seconds, source):
    truth = Truth(source)
    with sampling(source) as samples:
        more = SCENARIOS[name](truth, seconds)
    misses_first = source == "record" and "uvloop" in name  # later context changes are detected
    return compare(samples, truth, misses_first=misses_first) + (more or NOTHING)


def run(name, seconds, source="interpreter"):
    command = [sys.executable, "-W", "ignore", "-m", "tests.spans", "--here", name, str(seconds)]
    command += ["--source", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr}")
    return Outcome(*json.loads(done.stdout.splitlines()[-1]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--here")
    parser.add_argument("--source", choices=SOURCES, default=SOURCES[0], help="of the spans")
    parser.add_argument("seconds", nargs="?", type=float, default=5.0)
    parser.add_argument("scenario", nargs="*")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(run_here(options.here, options.seconds, options.source)), flush=True)
        return 0
    total = NOTHING
    print(f"{'scenario':20}{'right':>8}{'unlinked':>9}{'outside':>9}{'wrong':>7}{'linked':>9}")
    for name in options.scenario or SCENARIOS:
        outcome = run(name, options.seconds, options.source)
        total += outcome
        show(name, outcome)
    show("all", total)
    return 1 if total.wrong or total.linked_share < 0.99 else 0


def show(name, outcome):
    right, unlinked, outside, wrong = outcome
    share = f"{outcome.linked_share:.2%}"
    print(f"{name:20}{right:8}{unlinked:9}{outside:9}{wrong:7}{share:>9}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
