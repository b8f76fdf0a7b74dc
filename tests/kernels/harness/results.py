"""Reads pytest's JUnit XML and writes the table of kernels and features."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Result(NamedTuple):
    """The result of a test in one boot. ``feature`` is the statement that the test verifies."""

    test: str
    feature: str
    outcome: str
    message: str
    seconds: float


class Column(NamedTuple):
    """A column in the table: the results from one boot of one kernel."""

    title: str
    results: Sequence[Result]


def parse_junit(text: str) -> list[Result]:
    """Returns the results in execution order, or raises ``xml.etree.ElementTree.ParseError``."""
    return [_result(case) for case in ET.fromstring(text).iter("testcase")]


def read_junit(path: Path) -> list[Result]:
    """Returns the results in a file, or no results if the guest did not write it."""
    return parse_junit(path.read_text()) if path.exists() else []


def _result(case: ET.Element) -> Result:
    outcome, message = PASSED, ""
    for tag, meaning in (("skipped", SKIPPED), ("failure", FAILED), ("error", FAILED)):
        result = case.find(tag)
        if result is not None:
            outcome, message = meaning, result.get("message", "")
    name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.kernels.")
    features = [
        str(item.get("value")) for item in case.iter("property") if item.get("name") == "feature"
    ]
    return Result(
        name, features[0] if features else name, outcome, message, float(case.get("time", 0))
    )


_CELLS: Mapping[str, str] = {PASSED: "yes", FAILED: "**no**", SKIPPED: "not tried"}


def render_table(columns: Sequence[Column]) -> str:
    """Returns a Markdown page with a row per feature, a column per boot, and reasons for skips."""
    features: dict[str, list[str]] = {}
    notes: dict[str, int] = {}
    for number, column in enumerate(columns):
        for result in column.results:
            cells = features.setdefault(result.feature, [""] * len(columns))
            cell = _CELLS[result.outcome]
            if result.outcome == SKIPPED:
                cell += f" [{notes.setdefault(result.message, len(notes) + 1)}]"
            # Tests with the same feature share a cell, which shows the worst outcome.
            if cells[number] in ("", _CELLS[PASSED]) or result.outcome == FAILED:
                cells[number] = cell
    lines = [
        "# Kernels",
        "",
        "`make test-kernels` generates this page: the features that work in virtual machines that",
        "boot these kernels (software emulation, x86-64).",
        "",
        "| Feature | " + " | ".join(column.title for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(f"| {feature} | " + " | ".join(cells) + " |" for feature, cells in features.items()),
    ]
    if notes:
        lines += ["", *(f"[{number}] {message}  " for message, number in notes.items())]
    return "\n".join(lines) + "\n"
