"""Runs the scenarios and writes the table, as described in the package's docstring."""

# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults.table import report
from tests.faults.table.batches import Batches
from tests.faults.table.run import ROOT
from tests.faults.table.scenario import Scenario, load

ROWS = Path(tempfile.gettempdir()) / "kprofiler-faults.jsonl"


def _commit() -> str:
    command = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _until(end_s: float, scenarios: Iterable[Scenario]) -> Iterator[Scenario]:
    for scenario in scenarios:
        if time.monotonic() > end_s:
            return
        yield scenario


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.table", description="Make the table of faults, as root."
    )
    parser.add_argument("words", nargs="*", help="words in scenarios' kinds or names")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file for the results (JSON lines)")
    parser.add_argument("--fresh", action="store_true", help="also run scenarios that have rows")
    parser.add_argument("--together", type=int, default=5, help="concurrent agents (%(default)s)")
    parser.add_argument("--seconds", type=float, help="no scenario starts later than this")
    parser.add_argument("--list", action="store_true", help="print the scenarios and exit")
    parser.add_argument("--write", action="store_true", help="write the results into docs")
    options = parser.parse_args()
    scenarios = load()
    chosen = [
        scenario for scenario in scenarios
        if not options.words or any(word in scenario.key for word in options.words)
    ]  # fmt: skip
    if not chosen:
        parser.error(f"no scenario has {' or '.join(options.words)} in its kind or name")
    if options.list:
        print("\n".join(scenario.key for scenario in chosen))
        return 0
    if os.geteuid() != 0:
        parser.error("faults need root")
    rows = report.read(options.rows)
    todo = [one for one in chosen if options.fresh or one.key not in rows]
    total, batches, commit = len(todo), Batches(options.together), _commit()
    if options.seconds is not None:
        todo = _until(time.monotonic() + options.seconds, todo)
    try:
        for done, row in enumerate(batches.run(todo), 1):
            row["commit"] = commit
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            rows[report.key(row)] = row
            print(f"{done}/{total} {report.line(row)}", flush=True)
    finally:
        batches.close()
    shown = [rows[scenario.key] for scenario in chosen if scenario.key in rows]
    if options.write:
        ran = {scenario.key: rows[scenario.key] for scenario in chosen if scenario.key in rows}
        report.write(ran, [scenario.key for scenario in scenarios])
    bad = [row for row in shown if report.failures(row)]
    for row in bad:
        print(f"{report.key(row)}: {'; '.join(report.failures(row))}")
    print(f"{len(shown)} faults, {len(bad)} of them failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
