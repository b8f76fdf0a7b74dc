"""Mutates the Python frame reader, and checks that the comparison detects each mutation.

``python -m tests.truth.python.mutations [NAME…]`` exits with 1 if a mutation is not detected.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from otel_kprofiler.errors import SamplerError
from tests.interpreters import Python, find_pythons
from tests.truth.python.judge import Report
from tests.truth.python.measure import build, churning, measure, running
from tests.truth.sources import Mutation, copy_sources

_SAMPLES = 2000
_MAX_ABSENT = 0.05
_WORD = "return put_word(w, word | find_code(w, l, code));"
_NO_FRAMES = "	w->window_at = NO_WINDOW_AT;\n	w->head.frames = 0;"
_OWNER = "	owner = frame_byte_at(frame, l->frame_owner);"
_WITHOUT_VERSION = "	if (!bpf_probe_read_user(content, 16,"
_CHANGES = {
    "python_frames.bpf.h": {
        "top: left out": (
            _NO_FRAMES,
            f"{_NO_FRAMES}\n	READ_USER(w->frame, w->frame + l->frame_previous);",
        ),
        "middle: one left out": ("w->seen++;", "if (++w->seen == 4) return GO_ON;"),
        "middle: one twice": (_WORD, f"put_word(w, word | find_code(w, l, code)); {_WORD}"),
        "root: left out": (_OWNER, f"{_OWNER}\n	if (!w->frame) return PYTHON_COMPLETE;"),
        "line: that of a later instruction": (
            "- code - l->code_bytes) >> 1",
            "- code - l->code_bytes + 40) >> 1",
        ),
        "frames that are not shown: shown": ("owner != OWNED_BY_GENERATOR &&", "0 &&", "3.13"),
        "shims: taken for frames": ("owner >= l->entry_owner", "0", "3.12"),
        "C entries: not marked as roots": ("	w->rooted = 1;\n", "", "3.12"),
        "generators: at the instruction of their caller": (
            "& ~3ULL; /* the low bits are a tag",
            "+ 64; /* the low bits are a tag",
        ),
    },
    "python_thread.bpf.h": {
        "threads: the first of the list": ("	if (is_own(w, l)) {", "	if (1) {"),
        "threads: of other ids": ("w->native &&\n", "w->native + 1 &&\n"),
    },
    "python_code.bpf.h": {
        "nothing": ("", ""),
        "type of code objects: another": (
            "w->code[TYPE_WORD] == w->process.code_type",
            "w->code[TYPE_WORD] == w->process.code_type + 8",
        ),
        "descriptions: first line of none": (
            "d->first_line = code_half(w, l->code_first_line);",
            "d->first_line = 1;",
        ),
        "descriptions: file for name": (
            "code_word(w, l->code_name), d->text",
            "code_word(w, l->code_file), d->text",
        ),
        "line tables: pieces at the same place": ("TABLE_CONTENT_AT + at", "at"),
        "new codes: never described": (
            "i < w->new_codes; i++",
            "i < 1 && w->new_codes > 99; i++",
        ),
    },
}
"""The text to replace, the new text and any minimum version, by source file and mutation."""
_OF_CHURN = {
    "nothing: functions that come and go": ("", ""),
    "codes: by their address alone": ("known->check == (check ^ id * SPREAD) &&", ""),
    "codes: without their contents, which 3.11 has no version of": (
        _WITHOUT_VERSION,
        f"	return sum;\n{_WITHOUT_VERSION}",
    ),
}
"""Changes to ``python_code.bpf.h`` that are detectable with short-lived functions."""
MUTATIONS = (
    *[
        Mutation(name, file, *change)
        for file, changes in _CHANGES.items()
        for name, change in changes.items()
    ],
    *[
        Mutation(name, "python_code.bpf.h", *change, churn=True)
        for name, change in _OF_CHURN.items()
    ],
)


def run(folder: Path, mutation: Mutation, python: Python) -> Report | str:
    """Runs the comparison with a mutation; returns the verifier's message if the load fails."""
    built = build(folder, copy_sources(folder, mutation))
    start = churning if mutation.churn else running
    with start(python) as target:
        try:
            (report,) = measure(built, [target], _SAMPLES, timeout_s=15)
        except SamplerError as error:
            return f"rejected by the verifier: {error}"
    return report


def is_true(report: Report | str, churn: bool) -> bool:
    """Returns whether no stack is wrong and, unless ``churn`` is set, few stacks are missing."""
    if isinstance(report, str) or report.wrong or report.total < _SAMPLES // 2:
        return False
    return churn or report.absent + report.unknown <= _MAX_ABSENT * report.total


def main(names: list[str]) -> int:
    unnoticed = 0
    pythons = {python.minor: python for python in reversed(find_pythons())}
    with tempfile.TemporaryDirectory() as made:
        for mutation in MUTATIONS:
            if names and not any(name in mutation.name for name in names):
                continue
            python = pythons.get(mutation.minor)
            if python is None:
                print(f"skipped   {mutation.name}: no CPython {mutation.minor} here")
                continue
            report = run(Path(made), mutation, python)
            noticed = not is_true(report, mutation.churn)
            is_good = noticed is (mutation.old != mutation.new)
            unnoticed += not is_good
            print("good" if is_good else "BAD ", "noticed" if noticed else "unnoticed", end=" ")
            print(mutation.name, flush=True)
            print("   ", report if isinstance(report, str) else report.describe().splitlines()[0])
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
