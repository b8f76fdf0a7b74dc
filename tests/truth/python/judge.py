"""Compares sampled stacks with the code that was actually running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from otel_kprofiler.model import Frame, Unresolved
from tests.truth.python import churn
from tests.truth.python.chains import END, Chains

_EXAMPLES = 3
_OF_ALL_LINES = ("futex", "sched", "brk", "madvise", "mmap", "munmap")
"""Substrings in the names of system calls that switch threads or allocate memory."""


class Seen(NamedTuple):
    """A sample whose frames are leaf first. ``mark`` is 0 before the thread's first chain."""

    mark: int
    frames: tuple[Frame, ...]
    kernel: tuple[str, ...]


class Report:
    """Counts of a program's samples, by outcome.

    Attributes:
        right: samples that match the running code exactly.
        frameless: samples without Python frames, from threads that might not have had Python
            frames. Must equal the sampler's own count, ``no_frame`` in ``outcomes``.
        absent: samples without Python frames, from threads that did have Python frames.
        unknown: samples with a frame whose code object was not described.
        styles: correct samples, by the call style of their functions.
        in_system_calls: correct samples taken in a system call by the innermost function.
    """

    def __init__(self) -> None:
        self.outcomes: Mapping[str, int] = {}
        self.right = self.frameless = self.absent = self.unknown = self.in_system_calls = 0
        self.wrong: Counter[str] = Counter()
        self.examples: list[str] = []
        self.styles: Counter[str] = Counter()

    @property
    def total(self) -> int:
        shown = self.right + self.unknown + self.wrong.total()
        return shown + self.frameless + self.absent

    def add_wrong(self, why: str, seen: Seen) -> None:
        self.wrong[why] += 1
        if len(self.examples) < _EXAMPLES:
            top = [(frame.function, frame.lines[0].line) for frame in seen.frames[:4]]
            self.examples.append(f"  {why}: {top}, mark {seen.mark}, {seen.kernel[:3]}")

    def describe(self) -> str:
        total = max(self.total, 1)
        line = (
            f"{self.total} samples: {self.wrong.total()} wrong, {self.absent / total:.2%} absent, "
            f"{self.frameless} frameless, {self.unknown} not described, "
            f"{self.in_system_calls} in system calls"
        )
        return "\n".join(
            (line, *(f"  {why}: {n}" for why, n in self.wrong.items()), *self.examples)
        )


class ChurnJudge:
    """Judges the samples from churn.py. Ignores samples taken before a function stored its mark."""

    def __init__(self) -> None:
        self.report = Report()

    def take(self, seen: Seen) -> None:
        if not seen.mark:
            return
        report, (name, first, last) = self.report, churn.expected(seen.mark)
        if not seen.frames:
            report.absent += 1
        elif seen.frames[0].unresolved is Unresolved.CODE_UNKNOWN:
            report.unknown += 1
        elif seen.frames[0].function == "work":
            report.right += 1  # `work` has not reset the mark yet
        elif seen.frames[0].function != name:
            report.add_wrong("another function", seen)
        elif not first <= seen.frames[0].lines[0].line <= last:
            report.add_wrong("another line", seen)
        else:
            report.right += 1


class Judge:
    """Compares the sampled stacks of a program's threads with its call chains.

    ``below``: qualified names of the callers common to all chains, innermost first.
    """

    def __init__(self, chains: Chains, below: list[str]) -> None:
        self._chains = chains
        self.below = below
        self.report = Report()

    def take(self, seen: Seen) -> None:
        """Adds a sample. Samples before the first chain are ignored."""
        if not seen.mark:
            return
        report = self.report
        if not seen.frames and seen.mark in self._chains.frameless:
            report.frameless += 1
        elif not seen.frames:
            report.absent += 1
        elif any(frame.unresolved is Unresolved.CODE_UNKNOWN for frame in seen.frames):
            report.unknown += 1
        elif why := self._find_fault(seen):
            report.add_wrong(why, seen)
        else:
            report.right += 1
            for frame in seen.frames:
                style = self._chains.styles.get(frame.function)
                if style:
                    report.styles[style] += 1

    def _find_fault(self, seen: Seen) -> str:
        """Returns why a stack does not match the running code, or an empty string if it matches."""
        places = [(frame.function, frame.lines[0].line) for frame in seen.frames]
        if places[0][0] in self._chains.callers:
            if seen.frames[0].lines[0].file != "chains.py":
                return "file"
            if fault := self._judge_top(places[0], seen):
                return fault
        return self._judge_callers(places)

    def _judge_callers(self, places: list[tuple[str, int]]) -> str:
        callers = self._chains.callers
        at = 0
        while at < len(places) and places[at][0] in callers:
            below = callers[places[at][0]]
            at += 1
            if below == END:
                return "" if at == len(places) else "more than a greenlet has"
            if below is not None and places[at : at + 1] != [below]:
                return "another caller" if at < len(places) else "cut off"
            if below is None:
                break
        rest = [name for name, _ in places[at:]]
        if rest == self.below:
            return ""
        # Other standard library functions may run before and after a call chain.
        return "root" if at or rest[-len(self.below) + 1 :] != self.below[1:] else ""

    def _judge_top(self, top: tuple[str, int], seen: Seen) -> str:
        if not top[1]:
            return ""  # an instruction added by the compiler
        if top not in self._chains.tops:
            return "a line without code"
        marks = self._chains.tops[top]
        if marks is not None and seen.mark not in marks:
            return "not what ran"
        entered = [name for name in seen.kernel if name.startswith("__x64_sys_")]
        if not entered:
            return ""
        expected, result = self._chains.system_calls.get(top, ""), entered[-1]
        if expected and expected in result:
            self.report.in_system_calls += 1
        elif not any(one in result for one in _OF_ALL_LINES):
            known = filter(None, self._chains.system_calls.values())
            if expected or any(one in result for one in known):
                return "another system call"
        return ""
