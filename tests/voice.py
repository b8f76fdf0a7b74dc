"""Counts words and phrases that the house style avoids, as far as a program can detect them.

``python -m tests.voice`` prints the counts, and every occurrence of kinds that are not allowed at
all. The exit status is 1 if the count of any kind exceeds its allowance. ``--list`` prints all
occurrences. After removing violations, lower the allowance; never raise it.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("otel_kprofiler", "tests", "benchmarks", "examples")
EXEMPT = {
    "CHANGELOG.md": "describes released versions",
    "tests/voice.py": "has the words themselves",
    "tests/unit/test_voice.py": "likewise",
}
OPENING = re.compile(r"(What|Of|Likewise|Whether)\b")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
COMMENT_OPENING = re.compile(r"^[ \t]*/\*[\s*]*((What|Of|Likewise|Whether)\b.*)", re.MULTILINE)
VAGUE_NAMES = frozenset({"before", "found", "known", "one", "own"})
PHRASES = {
    "in vain": re.compile(r"\bin\s+vain\b"),
    "all the same": re.compile(r"\ball\s+the\s+same\b"),
    "is nothing for": re.compile(r"\bis\s+nothing\s+for\b"),
    "as it is": re.compile(r"\bstays? as (it is|they are)\b"),
    "of which": re.compile(r"\b(as|by|of) which(?=[.,;:)])"),
    "tell": re.compile(r"(?<!\.)\b(tells?|telling|told)\b(?!\()", re.IGNORECASE),
    "meanwhile": re.compile(r"meanwhile", re.IGNORECASE),
    "equals that of": re.compile(r"equals?[_\s]+th(at|ose)[_\s](of|in)(?![a-z])"),
    "boot time": re.compile(r"\bboot[ -]times?\b", re.IGNORECASE),
    "None without": re.compile(r"\bNone\s+without\b"),
    "for ever": re.compile(r"\bfor\s+ever\b", re.IGNORECASE),
    "be had": re.compile(r"\bbe\s+had\b"),
    "go on": re.compile(r"\b(goes?|going)\s+on(?=[.,;:)]|\s+(after|behind|in|with)\b)"),
    "stand still": re.compile(r"\bstands?\s+still\b"),
    "anew": re.compile(r"\banew\b"),
}
ALLOWED = {
    "CONTRIBUTING.md": {"tell": 1},
    "benchmarks": {"name": 36},
    "otel_kprofiler": {"name": 19},
    "tests": {"name": 450},
}
"""The number of allowed occurrences by directory and kind. Unlisted kinds are not allowed."""


class Place(NamedTuple):
    """A phrase to change; ``kind`` is a key in ``PHRASES``, ``opening`` or ``name``."""

    path: str
    line: int
    kind: str
    text: str


def find_places(path: str, text: str) -> Iterator[Place]:
    if path.endswith((".c", ".h")):
        text = keep_comments(text)
        for match in COMMENT_OPENING.finditer(text):
            yield Place(path, text.count("\n", 0, match.start(1)) + 1, "opening", match[1])
    for kind, pattern in PHRASES.items():
        for match in pattern.finditer(text):
            yield Place(path, text.count("\n", 0, match.start()) + 1, kind, match[0])
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(words))) if OPENING.match(words):
                    yield Place(path, node.lineno, "opening", words.partition("\n")[0])
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VAGUE_NAMES:
                    yield Place(path, node.lineno, "name", name)


def keep_comments(text: str) -> str:
    comments, end = [], 0
    for match in COMMENT.finditer(text):
        comments += ["\n" * text.count("\n", end, match.start()), match[0]]
        end = match.end()
    return "".join(comments)


def find_all() -> list[Place]:
    files = [path for name in SOURCES for path in sorted((ROOT / name).rglob("*.py"))]
    files += [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    files += sorted((ROOT / "otel_kprofiler").rglob("*.[ch]"))
    places: list[Place] = []
    for file in files:
        path = str(file.relative_to(ROOT))
        if path not in EXEMPT and "/data/" not in path:
            places += find_places(path, file.read_text())
    return places


def exceeds(places: list[Place], allowed: dict[str, dict[str, int]]) -> list[str]:
    """Returns a line for each disallowed occurrence, and for each kind above its allowance."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for place in places:
        counts[place.path.partition("/")[0]][place.kind] += 1
    lines = []
    for directory, kinds in sorted(counts.items()):
        for kind, count in sorted(kinds.items()):
            limit = allowed.get(directory, {}).get(kind, 0)
            if limit == 0:
                lines += [
                    f"{place.path}:{place.line}: {place.kind}: {place.text}"
                    for place in places
                    if place.kind == kind and place.path.partition("/")[0] == directory
                ]
            elif count > limit:
                lines.append(f"{directory}: {count} of kind '{kind}', {limit} allowed")
    return lines


def main() -> None:
    places = find_all()
    if "--list" in sys.argv:
        print(*(f"{one.path}:{one.line}: {one.kind}: {one.text}" for one in places), sep="\n")
        return
    counts = Counter(place.kind for place in places)
    lines = exceeds(places, ALLOWED)
    verdict = "above" if lines else "within"
    shown = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    print(f"house style: {verdict} the allowances ({shown})")
    if lines:
        print(*lines, "See 'House style' in CONTRIBUTING.md.", sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
