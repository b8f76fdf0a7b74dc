"""``python -m benchmarks.compare BASE [TOPIC ...]``: compares this checkout with another commit.

First compares the payloads that the two commits encode from one recording. Then alternates between
the two commits for each topic, so that other load on the machine affects both commits equally.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.__main__ import TOPICS
from otel_kprofiler.otlp.conventions import STREAM_ID

CHECKOUT = Path(__file__).parents[1]
RECORD_SECONDS = 6

ROWS = """
import importlib, json, sys
rows = importlib.import_module(f"benchmarks.bench_{sys.argv[1]}").rows(sys.argv[2] == "quick")
print(json.dumps([(row.what, row.measured, row.ratio) for row in rows]))
"""
ENCODE = """
import sys
from benchmarks.bench_otlp import mixed_load_window
from otel_kprofiler.model import Form
from otel_kprofiler.otlp import encode_window
for form in Form:
    encoded = encode_window(mixed_load_window(user=True), form=form, new_id=bytes)
    sys.stdout.buffer.write(encoded.batches[0].payload)
"""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Side(NamedTuple):
    """One of the two source trees to compare."""

    name: str
    tree: Path

    def run(self, *arguments: str) -> bytes:
        """Runs Python with the packages of this source tree, and returns its standard output."""
        environment = {**os.environ, "PYTHONPATH": str(self.tree)}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.tree, env=environment, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        return done.stdout


class RowKey(NamedTuple):
    """A row's name without its numbers, which may vary, and its index among rows with this name."""

    kind: str
    number: int


Figures = dict[RowKey, list[tuple[str, list[float]]]]
"""Maps each row to a (name, values) pair for each run. The last value in each run is the ratio."""


@contextlib.contextmanager
def open_sides(base: str) -> Iterator[tuple[Side, Side]]:
    """Checks out the commit in a separate work tree, and yields that tree and this checkout."""
    with tempfile.TemporaryDirectory(prefix="compare-") as directory:
        tree = Path(directory) / "base"
        git = ["git", "-C", str(CHECKOUT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), base], check=True)
        try:
            yield Side(base, tree), Side("here", CHECKOUT)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(side: Side, topic: str, quick: bool) -> Iterator[tuple[RowKey, str, list[float]]]:
    output = side.run("-c", ROWS, topic, "quick" if quick else "")
    same: Counter[str] = Counter()
    for what, measured, ratio in json.loads(output.splitlines()[-1]):
        kind = NUMBER.sub("#", what)
        same[kind] += 1
        numbers = [float(number) for number in NUMBER.findall(measured)]
        yield RowKey(kind, same[kind]), what, numbers + ([] if ratio is None else [ratio])


def ratio_text(numbers: list[tuple[float, float]]) -> str:
    """Formats the ratio of this checkout to the base for each pair of numbers."""
    return ", ".join(f"{here / base:.3f}" if base else "-" for base, here in numbers)


def print_topic(base: Figures, here: Figures) -> None:
    """Prints one line per row: both medians, and the ratios of the medians and of the minima."""
    for key in dict.fromkeys([*base, *here]):
        what, _ = (here.get(key) or base[key])[-1]
        if key not in base or key not in here:
            print(f"  {what}: only {'here' if key in here else 'in the base'}")
            continue
        columns = [
            list(zip(*[numbers for _, numbers in side[key]], strict=False)) for side in (base, here)
        ]
        medians, least = (
            list(zip(*[[pick(runs) for runs in side] for side in columns], strict=False))
            for pick in (statistics.median, min)
        )
        shown = "; ".join(f"{before:.4g} -> {after:.4g}" for before, after in medians)
        print(f"  {what}: {shown}  median x {ratio_text(medians)}  least x {ratio_text(least)}")


def compare_topic(sides: tuple[Side, Side], topic: str, runs: int, quick: bool) -> None:
    """Measures both checkouts alternately, and reverses their order in each run."""
    figures: tuple[Figures, Figures] = (defaultdict(list), defaultdict(list))
    for number in range(runs):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            print(f"{topic} {number + 1}/{runs} {sides[index].name} …", file=sys.stderr, flush=True)
            for key, what, numbers in measure(sides[index], topic, quick):
                figures[index][key].append((what, numbers))
    print(f"{topic}:")
    print_topic(*figures)
    sys.stdout.flush()


def replay(side: Side, recording: Path, directory: Path) -> bytes:
    """Returns the requests that a commit encodes from a recording, as JSON without random ids."""
    output = directory / f"{side.name}.json"
    side.run("-m", "otel_kprofiler", "record", "--replay", str(recording), "-f", "otlp-json",
             "-o", str(output))  # fmt: skip
    return b"".join(map(without_ids, output.read_bytes().splitlines()))


def without_ids(request: bytes) -> bytes:
    """Returns a JSON request without the random ids of its profiles and stream."""
    result = json.loads(request)
    for resource in result["resourceProfiles"]:
        for scope in resource["scopeProfiles"]:
            for profile in scope["profiles"]:
                del profile["profileId"]
    strings = result["dictionary"]["stringTable"]
    for attribute in result["dictionary"]["attributeTable"]:
        if strings[attribute.get("keyStrindex", 0)] == STREAM_ID:
            del attribute["value"]
    return json.dumps(result).encode()


def compare_payloads(sides: tuple[Side, Side]) -> bool:
    """Returns whether both commits encode the benchmark's window and a recording identically."""
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        directory = Path(name)
        recording = directory / "base.raw"
        load = [sys.executable, "-m", "benchmarks.mixed_load", str(RECORD_SECONDS)]
        sides[0].run("-m", "otel_kprofiler", "record", "--stacks", "both", "--raw", str(recording),
                     "-o", str(directory / "base.folded"), "--", *load)  # fmt: skip
        payloads = {"fixture, protobuf and JSON": [side.run("-c", ENCODE) for side in sides]}
        print("payloads:")
        try:
            payloads["recording"] = [replay(side, recording, directory) for side in sides]
        except subprocess.CalledProcessError:
            print("  recording: not compared, since one side cannot replay it")
    for what, (base, here) in payloads.items():
        digests = [hashlib.sha256(payload).hexdigest()[:12] for payload in (base, here)]
        verdict = "equal" if base == here else f"DIFFERENT: sha256 {' -> '.join(digests)}"
        print(f"  {what}: {len(base)} -> {len(here)} bytes, {verdict}")
    sys.stdout.flush()
    return all(base == here for base, here in payloads.values())


def main() -> None:
    """Compares the two commits. Exits with status 1 if payloads differ or a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}")
    parser.add_argument("--runs", type=int, default=5, help="runs per topic and side; default 5")
    parser.add_argument("--quick", action="store_true", help="run the benchmarks with --quick")
    given = parser.parse_args()
    unknown = sorted(set(given.topics) - set(TOPICS))
    if unknown:
        parser.error(f"unknown topics: {', '.join(unknown)}; topics are {', '.join(TOPICS)}")
    with open_sides(given.base) as sides:
        complete = compare_payloads(sides)
        for topic in given.topics or TOPICS:
            try:
                compare_topic(sides, topic, given.runs, given.quick)
            except subprocess.CalledProcessError as error:
                print(f"{topic}: failed: {error}", flush=True)
                complete = False
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
