"""Compares Python stacks of every installed interpreter with the code that ran, and prints a table.

``python -m tests.truth.python [--samples N] [VERSION…]`` exits with 1 if a stack is wrong, or if
more than 2 % of the stacks are missing.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import argparse
import functools
import sys

from tests.interpreters import find_missing, find_pythons
from tests.truth.python.chains import GREENLET, STYLES
from tests.truth.python.judge import Report
from tests.truth.python.measure import building, churning, measure, running

MAX_ABSENT = 0.02


def is_good(report: Report, samples: int) -> bool:
    missing = report.absent + report.unknown
    missing += max(0, report.frameless - report.outcomes.get("no_frame", 0))
    return not report.wrong and report.total >= samples and missing <= MAX_ABSENT * report.total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000, help="samples per interpreter")
    parser.add_argument("--churn", action="store_true", help="run short-lived functions")
    parser.add_argument(
        "--greenlets", action="store_true", help="also run greenlets if they can be imported"
    )
    parser.add_argument("versions", nargs="*", help="such as 3.12; default: all")
    options = parser.parse_args()
    good = True
    run = churning if options.churn else running
    if options.greenlets:
        run = functools.partial(running, styles=(*STYLES, GREENLET))
    print("missing here:", ", ".join(find_missing()) or "none")
    with building() as built:
        for python in find_pythons():
            if options.versions and not python.version.startswith(tuple(options.versions)):
                continue
            if options.greenlets and python.run("-c", "import greenlet").returncode:
                print(f"{python.version} ({python.command}): cannot import greenlet")
                continue
            with run(python) as target:
                (report,) = measure(built, [target], options.samples, timeout_s=600)
            print(f"{python.version} ({python.command}): {report.describe()}")
            print(f"  {dict(report.styles)}\n  {dict(report.outcomes)}", flush=True)
            good &= is_good(report, options.samples) or (options.churn and not report.wrong)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
