"""Writes the rows of the fault table as JSON lines and as Markdown."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import groupby
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
MAY_MISS = 0.05
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def key(row: dict) -> str:
    return f"{row['kind']}: {row['name']}"


def read(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    return {key(row): row for row in map(json.loads, path.read_text().splitlines())}


def failures(row: dict) -> list[str]:
    results = list(row["problems"])
    if row["difference"]:
        results.append(f"{row['difference']} samples without an account")
    if row["others_kept"] is not None:
        missed = row.get("missed_share", 0.0)
        if row["others_kept"] + missed < 1 - MAY_MISS:
            uncounted = f", and {missed:.1%} are counted as missed" if missed else ""
            results.append(f"others have {row['others_kept']:.1%} of their samples{uncounted}")
        if row["others_named"] < 1 - MAY_MISS:
            results.append(f"{row['others_named']:.1%} of others' samples have names")
    return results


def _lost(lost: dict[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(lost.items())) or "0"


def _others(row: dict) -> str:
    if row["others_kept"] is None:
        return "-"
    missed = row.get("missed_share")
    return f"{row['others_kept']:.1%}" + (f" + {missed:.1%} missed" if missed else "")


def line(row: dict) -> str:
    return (
        f"{key(row)}: taken {row['taken']}, arrived {row['arrived']}, lost {_lost(row['lost'])}, "
        f"left {row['left']}, difference {row['difference']}, others {_others(row)}, "
        f"{row['rss_mb']:.0f} MB, CPU x{row.get('cpu', 0):.1f} "
        f"{'FAILED ' + '; '.join(failures(row)) if failures(row) else ''}"
    )


def _cells(*cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


_HEAD = ("taken", "arrived", "left", "lost", "difference", "others' share", "RSS (MB)", "CPU")


def _detail(rows: list[dict]) -> str:
    lines = []
    for kind, of_kind in groupby(rows, lambda row: row["kind"]):
        lines += [f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += [_cells("scenario", *_HEAD), _cells(*["---"] + ["---:"] * len(_HEAD))]
        lines += [
            _cells(
                row["name"], row["taken"], row["arrived"], row["left"], _lost(row["lost"]),
                row["difference"], _others(row), f"{row['rss_mb']:.0f}",
                f"{row.get('cpu', 0):.1f}",
            )
            for row in of_kind
        ]  # fmt: skip
        lines.append("")
    return "\n".join(lines).rstrip()


def _summary(rows: list[dict]) -> str:
    head = ("kind", "scenarios", *_HEAD)
    lines = [_cells(*head), _cells("---", *["---:"] * (len(head) - 1))]
    for kind, result in groupby(rows, lambda row: row["kind"]):
        of_kind = list(result)
        lost = sum((Counter(row["lost"]) for row in of_kind), Counter())
        kept = [row["others_kept"] for row in of_kind if row["others_kept"] is not None]
        lines.append(
            _cells(
                f"[{kind}](faults.md#{kind.lower().replace(' ', '-')})", len(of_kind),
                *(sum(row[name] for row in of_kind) for name in ("taken", "arrived", "left")),
                _lost(lost), sum(row["difference"] for row in of_kind),
                f"{min(kept):.1%}" if kept else "-",
                f"{max(row['rss_mb'] for row in of_kind):.0f}",
                f"{max(row.get('cpu', 0) for row in of_kind):.1f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def parse(page: str) -> list[dict]:
    """Parses the rows of a page written by :func:`write`. Values are rounded."""
    rows, kind = [], ""
    for text in page[page.index(BEGIN) : page.index(END)].splitlines():
        if text.startswith("## "):
            kind = text[3:]
        cells = text.strip("| ").split(" | ")
        if len(cells) != 1 + len(_HEAD) or cells[0] in {"scenario", "---"}:
            continue
        name, taken, arrived, left, lost, difference, others, rss, cpu = cells
        kept, *missed = (None,) if others == "-" else re.findall(r"([\d.]+)%", others)
        pairs = [loss.split() for loss in lost.split(", ") if loss != "0"]
        rows.append(
            {
                "kind": kind, "name": name, "problems": [],
                "taken": int(taken), "arrived": int(arrived), "left": int(left),
                "lost": {cause: int(count) for count, cause in pairs},
                "difference": int(difference),
                "others_kept": None if kept is None else float(kept) / 100, "others_named": 1.0,
                **({"missed_share": float(missed[0]) / 100} if missed else {}),
                "rss_mb": float(rss), "cpu": float(cpu),
            }
        )  # fmt: skip
    return rows


def write(rows: dict[str, dict], keys: list[str]) -> None:
    """Writes docs/faults.md and its summary, with kinds ordered by their first scenario.

    Keeps the page's existing rows, except those of scenarios that are not in ``keys``.
    """
    kept = {key(row).lower(): row for row in parse((DOCS / "faults.md").read_text())}
    kinds = list(dict.fromkeys(scenario.split(": ")[0] for scenario in keys))
    shown = []
    for scenario in sorted(keys, key=lambda scenario: kinds.index(scenario.split(": ")[0])):
        if scenario in rows:
            shown.append(rows[scenario])
        elif scenario.lower() in kept:
            shown.append({**kept[scenario.lower()], "kind": scenario.split(": ")[0]})
    for name, text in (("faults.md", _detail(shown)), ("reliability.md", _summary(shown))):
        page = DOCS / name
        written = re.sub(
            f"(?s){BEGIN}.*{END}",
            lambda _, text=text: f"{BEGIN}\n\n{text}\n\n{END}",
            page.read_text(),
        )
        page.write_text(written)
