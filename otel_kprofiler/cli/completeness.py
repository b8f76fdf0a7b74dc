"""Reports the fraction of user stacks that are complete, and where most incomplete stacks end."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from otel_kprofiler.analysis import Samples
from otel_kprofiler.formats import process_name, side_remarks
from otel_kprofiler.model import STACK_OK, USER_SIDE, Resource, Side, Stack, Unresolved, Window
from otel_kprofiler.text import describe_count

_MENTIONED_BELOW: Final = 0.99
_NO_FILE: Final = "code without a file"


class _End(NamedTuple):
    """The end of an incomplete stack: the reason, the program, and the outermost frame's file."""

    reason: str
    program: str
    place: str


@dataclass(slots=True)
class Completeness:
    """Counts complete user stacks, and incomplete user stacks by where and why they end."""

    complete: int = 0
    ends: Counter[_End] = field(default_factory=Counter)

    @classmethod
    def of_windows(cls, windows: Iterable[Window]) -> Self:
        """Counts the user stacks of all samples in ``windows``."""
        return cls._of(
            (sample.stack, resource, sample.thread_name, len(sample.timestamps_unix_ns))
            for window in windows
            for resource, sample in window.samples
        )

    @classmethod
    def of_samples(cls, samples: Samples) -> Self:
        """Counts the user stacks in samples of one kind."""
        tables = samples.tables
        rows = zip(samples.stacks, samples.threads, samples.counts(), strict=True)
        return cls._of(
            (tables.stacks[stack], tables.resources[thread.resource], thread.name, count)
            for stack, number, count in rows
            for thread in (tables.threads[number],)
        )

    @classmethod
    def _of(cls, rows: Iterable[tuple[Stack, Resource, str, int]]) -> Self:
        counts = cls()
        for stack, resource, thread_name, count in rows:
            sides = list(_user_sides(stack))
            if not sides:
                continue
            cut = next((side for side in reversed(sides) if side.status != STACK_OK), None)
            if cut is None:
                counts.complete += count
            else:
                program = process_name(resource, thread_name)
                counts.ends[_End(_reason(cut), program, _place(cut))] += count
        return counts

    @property
    def share(self) -> float | None:
        """Returns the fraction of complete user stacks; None if there are no user stacks."""
        total = self.complete + self.ends.total()
        return self.complete / total if total else None

    def remark(self) -> str:
        """Describes where most incomplete stacks occur, and why; empty if there are few."""
        share = self.share
        if share is None or share >= _MENTIONED_BELOW:
            return ""
        reason, of_reason = _count_by("reason", self.ends).most_common(1)[0]
        ends = Counter({end: n for end, n in self.ends.items() if end.reason == reason})
        programs = _count_by("program", ends)
        program, count = programs.most_common(1)[0]
        if 2 * count < of_reason:
            where = f"{len(programs)} programs such as {program}"
            count = of_reason
        else:
            place = next(end.place for end, _ in ends.most_common() if end.program == program)
            where = program if place in program else f"{program}, in {place}"
        total = self.ends.total()
        how_many = f", {count:,} of them" if count < total else ", all" if total > 1 else ""
        stacks = describe_count(total, "incomplete user stack")
        return f"{stacks}{how_many} in {where}: {reason}"


def _count_by(attribute: str, ends: Counter[_End]) -> Counter[str]:
    counts = Counter[str]()
    for end, count in ends.items():
        counts[getattr(end, attribute)] += count
    return counts


def _user_sides(stack: Stack) -> Iterator[Side]:
    """Yields a stack's native user frames, if there are any frames or an error."""
    for side in stack.sides:
        if side.kind is USER_SIDE and (side.frames or side.status > STACK_OK):
            yield side


def _reason(side: Side) -> str:
    return ", ".join(entry.reason for entry in side_remarks(side))


def _place(side: Side) -> str:
    """Returns the file for the outermost frame, whose caller is missing; empty if unknown."""
    if not side.frames:
        return ""
    frame = side.frames[-1]
    if frame.module:
        return frame.module.name
    return _NO_FILE if frame.unresolved is Unresolved.NO_FILE else ""
