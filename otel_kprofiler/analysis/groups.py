"""Samples grouped by what their frames are (functions, lines, modules) or by whose they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from os.path import basename
from typing import Final, NamedTuple

from otel_kprofiler.analysis.kernel_entry import find_entry
from otel_kprofiler.analysis.samples import Samples, Thread
from otel_kprofiler.formats import Entry, process_id, process_name, stack_entries
from otel_kprofiler.model import KERNEL_SIDE, AttributeValue, SpanLink, Stack


class Key(NamedTuple):
    """What a group is called.

    Attributes:
        name: such as that of a function.
        place: where it is: its module or file, the process of a thread; may be empty.
    """

    name: str
    place: str = ""


class Group(NamedTuple):
    """Samples that have a key in common; weights are in the unit of the kind's ``measure``.

    Attributes:
        key: what they have in common.
        own: weight of the samples that belong to this group and no other; those of all groups
            together are the weight of all samples.
        total: weight of all samples that the key occurs in, each of them once.
        kernel: the part of ``own`` that ran in the kernel.
        samples: number of samples of ``own``.
    """

    key: Key
    own: int
    total: int
    kernel: int
    samples: int


class Occurrence(NamedTuple):
    """What a stack counts for: its own group, and all that it occurs in."""

    own: Key
    all: Iterable[Key]


class Weighed(NamedTuple):
    """A row of samples: index of its stack, weight, and number of samples."""

    stack: int
    weight: int
    samples: int


NO_STACK: Final = Key("[no stack]")
NO_LINE: Final = Key("[no line]")
NO_SPAN: Final = Key("[no span]")
NONE: Final = "-"
"""Shown for samples without the attribute that they are grouped by."""


def by_function(samples: Samples) -> list[Group]:
    """Functions; a sample belongs to the innermost one."""
    return _by_frames(samples, lambda entries: [function_key(entry) for entry in entries])


def by_module(samples: Samples) -> list[Group]:
    """Modules and files of code; a sample belongs to that of its innermost frame."""
    return _by_frames(samples, lambda entries: [Key(place_of(entry)) for entry in entries])


def by_line(samples: Samples) -> list[Group]:
    """Lines of source code; a sample belongs to the innermost one that is known.

    A line of an interpreted language comes before those of native code, so that the time of the
    kernel and of native libraries is that of the line that called them. The lines with most time
    in the kernel come first.
    """
    groups = collect(samples, line_occurrence)
    return sorted(groups, key=lambda group: (-group.kernel, -group.own, -group.total, group.key))


def by_syscall(samples: Samples) -> list[Group]:
    """System calls, interrupts, and other ways into the kernel; or user mode."""
    entries = [Key(find_entry(stack)) for stack in samples.tables.stacks]
    return _by_column(samples, samples.stacks, entries)


def by_process(samples: Samples) -> list[Group]:
    """Processes by name and id."""
    return _by_thread(samples, _process_key(samples))


def by_comm(samples: Samples) -> list[Group]:
    """Names of threads."""
    return _by_thread(samples, lambda thread: Key(thread.name or NONE))


def by_thread(samples: Samples) -> list[Group]:
    """Threads by name and id, with their process."""
    process = _process_key(samples)
    return _by_thread(
        samples, lambda thread: Key(f"{thread.name} ({thread.tid})", process(thread).name)
    )


def by_cpu(samples: Samples) -> list[Group]:
    """Logical CPUs."""
    keys = [Key(str(cpu)) for cpu in samples.tables.cpus]
    return _by_column(samples, samples.cpus, keys)


def by_attribute(samples: Samples, names: Sequence[str]) -> list[Group]:
    """Values of the first of these attributes that a resource has."""

    def key(thread: Thread) -> Key:
        attributes = samples.tables.resources[thread.resource].attributes
        found = [attributes[name] for name in names if name in attributes]
        return Key(_text(found[0]) if found else NONE)

    return _by_thread(samples, key)


def by_service(samples: Samples) -> list[Group]:
    """Services by name."""
    return by_attribute(samples, SERVICE)


def by_container(samples: Samples) -> list[Group]:
    """Containers by name or id."""
    return by_attribute(samples, CONTAINER)


def by_span(samples: Samples) -> list[Group]:
    """Spans by their ids, with their traces."""
    return _by_column(samples, samples.links, list(map(span_key, samples.tables.links)))


def by_kind(samples: Samples) -> list[Group]:
    """Kinds of samples."""
    origins = [Key(origin.profile.kind.name) for origin in samples.tables.origins]
    return _by_column(samples, samples.origins, origins)


SERVICE: Final = ("service.name",)
CONTAINER: Final = ("container.name", "k8s.container.name", "container.id")
GROUPINGS: Final[dict[str, Callable[[Samples], list[Group]]]] = {
    "function": by_function,
    "line": by_line,
    "module": by_module,
    "syscall": by_syscall,
    "process": by_process,
    "thread": by_thread,
    "comm": by_comm,
    "container": by_container,
    "cpu": by_cpu,
    "span": by_span,
    "service": by_service,
    "kind": by_kind,
}
"""By the names that ``report --by`` takes."""


def find_grouping(name: str) -> Callable[[Samples], list[Group]]:
    """The one of ``GROUPINGS`` with a name, or that by the attribute of this name."""
    return GROUPINGS.get(name) or partial(by_attribute, names=[name])


def place_of(entry: Entry) -> str:
    """Module of an entry, or the file of code without modules; else its side in brackets."""
    return entry.module or f"[{entry.side.name}]"


def function_key(entry: Entry) -> Key:
    """The function of an entry; frames of a module without names are one, by the reason."""
    if entry.reason and not entry.name.startswith(("[truncated", "[no ", "fun_")):
        return Key(f"[{entry.reason}]", place_of(entry))
    return Key(entry.name, place_of(entry))


def line_key(entry: Entry) -> Key:
    """The line of an entry as ``function (file:line)``."""
    return Key(f"{entry.name} ({basename(entry.file)}:{entry.line})", entry.file)


def span_key(link: SpanLink | None) -> Key:
    """A span by its id, with its trace."""
    return Key(link.span_id.hex(), link.trace_id.hex()) if link else NO_SPAN


def is_in_kernel(stack: Stack) -> bool:
    """Whether a sample with this stack ran in the kernel."""
    return any(side.kind is KERNEL_SIDE and side.frames for side in stack.sides)


def line_occurrence(stack: Stack) -> Occurrence:
    """What a stack counts for in :func:`by_line`."""
    entries = [entry for entry in stack_entries(stack) if entry.line]
    if not entries:
        return Occurrence(NO_LINE, [NO_LINE])
    interpreted = [one for one in entries if one.side.has_files]
    return Occurrence(line_key((interpreted or entries)[-1]), {line_key(one) for one in entries})


def _by_frames(samples: Samples, keys: Callable[[Sequence[Entry]], list[Key]]) -> list[Group]:
    def frames(stack: Stack) -> Occurrence:
        found = keys(stack_entries(stack)) or [NO_STACK]
        return Occurrence(found[-1], set(found))

    return collect(samples, frames)


class _Sums:
    """Weights by key, to which samples are added."""

    def __init__(self) -> None:
        self._own: Counter[Key] = Counter()
        self._total: Counter[Key] = Counter()
        self._kernel: Counter[Key] = Counter()
        self._samples: Counter[Key] = Counter()

    def add(self, frames: Occurrence, weight: int, count: int, *, kernel: bool) -> None:
        self._own[frames.own] += weight
        self._samples[frames.own] += count
        if kernel:
            self._kernel[frames.own] += weight
        for key in frames.all:
            self._total[key] += weight

    def groups(self) -> list[Group]:
        found = [
            Group(key, self._own[key], total, self._kernel[key], self._samples[key])
            for key, total in self._total.items()
        ]
        return sorted(found, key=lambda group: (-group.own, -group.total, group.key))


def collect(samples: Samples, frames: Callable[[Stack], Occurrence | None]) -> list[Group]:
    """Groups of samples by their stacks, those with most of their own first.

    Args:
        samples: what to group.
        frames: what a stack counts for; None to leave it out.
    """
    rows = zip(samples.stacks, samples.weights(), samples.counts(), strict=True)
    return group_stacks(samples.tables.stacks, starmap(Weighed, rows), frames)


def group_stacks(
    stacks: Sequence[Stack],
    rows: Iterable[Weighed],
    frames: Callable[[Stack], Occurrence | None],
) -> list[Group]:
    """Likewise for rows of a table of stacks."""
    weights, counts = Counter[int](), Counter[int]()
    for number, weight, count in rows:
        weights[number] += weight
        counts[number] += count
    sums = _Sums()
    for number, weight in weights.items():
        found = frames(stacks[number])
        if found is not None:
            sums.add(found, weight, counts[number], kernel=is_in_kernel(stacks[number]))
    return sums.groups()


def _by_column(samples: Samples, column: Iterable[int], keys: Sequence[Key]) -> list[Group]:
    kernel = [is_in_kernel(stack) for stack in samples.tables.stacks]
    weights: defaultdict[tuple[int, bool], list[int]] = defaultdict(lambda: [0, 0])
    rows = zip(column, samples.stacks, samples.weights(), samples.counts(), strict=True)
    for number, stack, weight, count in rows:
        sums = weights[number, kernel[stack]]
        sums[0] += weight
        sums[1] += count
    found = _Sums()
    for (number, in_kernel), (weight, count) in weights.items():
        key = keys[number]
        found.add(Occurrence(key, (key,)), weight, count, kernel=in_kernel)
    return found.groups()


def _by_thread(samples: Samples, key: Callable[[Thread], Key]) -> list[Group]:
    return _by_column(samples, samples.threads, [key(one) for one in samples.tables.threads])


def _process_key(samples: Samples) -> Callable[[Thread], Key]:
    def key(thread: Thread) -> Key:
        resource = samples.tables.resources[thread.resource]
        pid = process_id(resource)
        name = process_name(resource, thread.name)
        return Key(name if pid is None else f"{name} ({pid})")

    return key


def _text(value: AttributeValue) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
