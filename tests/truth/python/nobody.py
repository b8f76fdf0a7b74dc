"""Runs as the calling user, samples other users' programs, and prints the results.

Usage: python -m tests.truth.python.nobody OBJECT SAMPLES. Standard input contains one line of JSON
per program: its pid, marks by thread, seed, call styles, and the functions that call its chains.
"""
# ruff: noqa: T201 - a command

import json
import sys
from pathlib import Path

from tests.truth.python.chains import Chains
from tests.truth.python.judge import Judge
from tests.truth.python.measure import Target, measure


def main():
    targets = []
    for line in sys.stdin:
        pid, threads, seed, styles, below = json.loads(line)
        threads = {int(tid): at for tid, at in threads.items()}
        targets.append(Target(None, threads, Judge(Chains(seed, styles), below), pid))
    for report in measure(Path(sys.argv[1]), targets, int(sys.argv[2]), timeout_s=240):
        rest = [report.total, report.wrong.total(), report.absent + report.unknown]
        print(json.dumps([*rest, report.describe()]))


if __name__ == "__main__":
    main()
