"""Rows of the table as JSON lines and as Markdown."""

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
    """The key of the row's scenario."""
    return f"{row['kind']}: {row['name']}"


def read(path: Path) -> dict[str, dict]:
    """The last row of each scenario."""
    if not path.exists():
        return {}
    return {key(row): row for row in map(json.loads, path.read_text().splitlines())}


def failures(row: dict) -> list[str]:
    """Yields what the row shows and must not show."""
    found = list(row["problems"])
    if row["difference"]:
        found.append(f"{row['difference']} samples without an account")
    if row["others_kept"] is not None:
        if row["others_kept"] < 1 - MAY_MISS:
            found.append(f"others have {row['others_kept']:.1%} of their samples")
        if row["others_named"] < 1 - MAY_MISS:
            found.append(f"{row['others_named']:.1%} of others' samples have names")
    return found


def _lost(lost: dict[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(lost.items())) or "0"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def line(row: dict) -> str:
    """A row for the terminal."""
    return (
        f"{key(row)}: taken {row['taken']}, arrived {row['arrived']}, lost {_lost(row['lost'])}, "
        f"left {row['left']}, difference {row['difference']}, others {_share(row['others_kept'])}, "
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
                row["difference"], _share(row["others_kept"]), f"{row['rss_mb']:.0f}",
                f"{row.get('cpu', 0):.1f}",
            )
            for row in of_kind
        ]  # fmt: skip
        lines.append("")
    return "\n".join(lines).rstrip()


def _summary(rows: list[dict]) -> str:
    head = ("kind", "scenarios", *_HEAD)
    lines = [_cells(*head), _cells("---", *["---:"] * (len(head) - 1))]
    for kind, found in groupby(rows, lambda row: row["kind"]):
        of_kind = list(found)
        lost = sum((Counter(row["lost"]) for row in of_kind), Counter())
        kept = [row["others_kept"] for row in of_kind if row["others_kept"] is not None]
        lines.append(
            _cells(
                f"[{kind}](faults.md#{kind.lower().replace(' ', '-')})", len(of_kind),
                *(sum(row[name] for row in of_kind) for name in ("taken", "arrived", "left")),
                _lost(lost), sum(row["difference"] for row in of_kind),
                _share(min(kept, default=None)),
                f"{max(row['rss_mb'] for row in of_kind):.0f}",
                f"{max(row.get('cpu', 0) for row in of_kind):.1f}",
            )
        )  # fmt: skip
    return "\n".join(lines)


def write(rows: list[dict]) -> None:
    """Write both pages, each kind where its first row is."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    rows = sorted(rows, key=lambda row: kinds.index(row["kind"]))
    for name, text in (("faults.md", _detail(rows)), ("reliability.md", _summary(rows))):
        page = DOCS / name
        before = page.read_text()
        after = re.sub(
            f"(?s){BEGIN}.*{END}", lambda _, text=text: f"{BEGIN}\n\n{text}\n\n{END}", before
        )
        page.write_text(after)
