"""Compares the BPF program's stacks with those from the reference unwinder."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from otel_kprofiler.model import StackEnd
from tests.truth.dumps import StackDump
from tests.truth.reference import Dump, Maps, Truth, unwind


class Verdict(enum.Enum):
    """The outcome of comparing a stack with the reference, up to the end of the reference."""

    EQUAL = "the whole stack"
    SHORT = "the beginning of it"
    UNPROVEN = "no frame contradicts the reference, which ends before the stack does"
    WRONG = "a frame that is not there"


class Report(NamedTuple):
    """The results of many comparisons, counted by verdict and by the reason why each stack ends."""

    verdicts: Counter[Verdict]
    ends: Counter[StackEnd]
    wrong: list[str]
    frames: int

    @property
    def total(self) -> int:
        return self.verdicts.total()

    def plus(self, other: Report) -> Report:
        return Report(
            self.verdicts + other.verdicts,
            self.ends + other.ends,
            self.wrong + other.wrong,
            self.frames + other.frames,
        )

    def describe(self) -> str:
        ends = ", ".join(f"{count} {end.name.lower()}" for end, count in self.ends.items())
        return f"{len(self.wrong)} wrong of {self.total}: {ends}"


def judge(dump: StackDump, truth: Truth) -> Verdict:
    result, true = list(dump.stack.addresses), truth.frames
    common = min(len(result), len(true))
    if result[:common] != true[:common]:
        return Verdict.WRONG
    if truth.complete:
        if len(result) > len(true):
            return Verdict.WRONG
        if dump.stack.end is StackEnd.COMPLETE:
            return Verdict.EQUAL if len(result) == len(true) else Verdict.WRONG
        return Verdict.SHORT
    return Verdict.UNPROVEN


def compare(dumps: Iterable[StackDump], maps: Maps) -> Report:
    verdicts: Counter[Verdict] = Counter()
    ends: Counter[StackEnd] = Counter()
    wrong, frames = [], 0
    for dump in dumps:
        truth = unwind(maps, Dump(dump.registers, dump.stacks, dump.goroutine))
        verdict = judge(dump, truth)
        verdicts[verdict] += 1
        ends[dump.stack.end] += 1
        frames += len(dump.stack.addresses)
        if verdict is Verdict.WRONG:
            wrong.append(_show(dump, truth, maps))
    return Report(verdicts, ends, wrong, frames)


def _show(dump: StackDump, truth: Truth, maps: Maps) -> str:
    stack = dump.stack
    lines = [f"ends as {stack.end.name}, the reference with: {truth.end}"]
    for at in range(max(len(stack.addresses), len(truth.frames))):
        result = stack.addresses[at] if at < len(stack.addresses) else None
        true = truth.frames[at] if at < len(truth.frames) else None
        source = stack.sources[at].name if result is not None else ""
        sides = (maps.describe(pc) if pc is not None else "-" for pc in (result, true))
        lines.append(f"{'  ' if result == true else '! '}{' | '.join(sides)} {source}")
    return "\n".join(lines)
