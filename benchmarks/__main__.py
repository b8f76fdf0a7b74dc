"""``python -m benchmarks [TOPIC ...] [--quick]``: runs benchmarks and prints one table."""

import argparse
import importlib
import pkgutil
import sys

import benchmarks
from benchmarks.rows import Row

TOPICS = [
    module.name.removeprefix("bench_")
    for module in pkgutil.iter_modules(benchmarks.__path__)
    if module.name.startswith("bench_")
]


def print_rows(rows: list[Row]) -> None:
    """Prints one line per measurement, with the reference value, the ratio and the goal."""
    table = [("what", "measured", "beside", "ratio", "goal")]
    table += [
        (r.what, r.measured, r.beside, "" if r.ratio is None else f"{r.ratio:.3g}x", r.goal)
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}")
    parser.add_argument("--quick", action="store_true", help="shorter and less exact runs")
    given = parser.parse_args()
    unknown = sorted(set(given.topics) - set(TOPICS))
    if unknown:
        parser.error(f"unknown topics: {', '.join(unknown)}; topics are {', '.join(TOPICS)}")
    rows: list[Row] = []
    for topic in given.topics or TOPICS:
        print(f"measuring {topic} …", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.bench_{topic}").rows(given.quick)
    print_rows(rows)


if __name__ == "__main__":
    main()
