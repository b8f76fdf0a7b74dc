"""Compares stacks from many programs with the reference, and prints a table.

``python -m tests.truth [--stacks N] [NAME…]`` exits with 1 if a frame is wrong, or if too many
stacks are truncated.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from otel_kprofiler.model import StackEnd
from tests.truth import dumps
from tests.truth.compare import Report, Verdict
from tests.truth.measure import measure
from tests.truth.programs import PROGRAMS, Program, find_missing

_STACKS = 1600
_ROW = "{:<24}{:>8}{:>10}{:>7}{:>12}{:>12}  {}"


def show(program: str, report: Report) -> None:
    total = report.total
    cut = ", ".join(f"{n} {end.name.lower()}" for end, n in report.ends.items() if end)
    print(
        _ROW.format(
            program,
            total,
            report.frames,
            len(report.wrong),
            f"{report.ends[StackEnd.COMPLETE] / total:.2%}",
            f"{report.verdicts[Verdict.EQUAL] / total:.2%}",
            cut,
        ),
        flush=True,
    )


def is_good(program: Program, report: Report) -> bool:
    return not report.wrong and report.ends[StackEnd.COMPLETE] >= program.share * report.total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stacks", type=int, default=_STACKS, help="of each program")
    parser.add_argument("names", nargs="*", help="parts of program names; default: all")
    options = parser.parse_args()
    print(_ROW.format("program", "stacks", "frames", "wrong", "complete", "all equal", "cut off"))
    good, reports = True, []
    with tempfile.TemporaryDirectory() as made:
        built = dumps.build(Path(made))
        for program in PROGRAMS:
            if options.names and not any(name in program.name for name in options.names):
                continue
            if missing := find_missing(program):
                print(f"{program.name}: {missing}")
                continue
            reports.append(measure(program, built, Path(made), options.stacks))
            show(program.name, reports[-1])
            print("\n\n".join(reports[-1].wrong[:3]), end="")
            good &= is_good(program, reports[-1])
    if len(reports) > 1:
        total = reports[0]
        for report in reports[1:]:
            total = total.plus(report)
        show("all", total)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
