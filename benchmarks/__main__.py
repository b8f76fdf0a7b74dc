"""``python -m benchmarks [TOPIC ...] [--quick]``: measure, and print one table."""

import importlib
import pkgutil
import sys

import benchmarks
from benchmarks.rows import Row


def print_rows(rows: list[Row]) -> None:
    """One line per figure; the last columns are what it is measured beside, and the goal."""
    table = [("what", "measured", "beside", "ratio", "goal")]
    table += [
        (r.what, r.measured, r.beside, "" if r.ratio is None else f"{r.ratio:.2f}x", r.goal)
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def main(arguments: list[str]) -> None:
    """Run the benchmarks named, or all."""
    quick = "--quick" in arguments
    wanted = [argument for argument in arguments if not argument.startswith("-")]
    topics = [
        module.name.removeprefix("bench_")
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if module.name.startswith("bench_")
    ]
    unknown = set(wanted) - set(topics)
    if unknown:
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(topics)}")
    rows: list[Row] = []
    for topic in wanted or topics:
        print(f"measuring {topic} …", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.bench_{topic}").rows(quick)
    print_rows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
