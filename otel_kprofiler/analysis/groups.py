"""Groups samples by function, process, wait cause, waker and the other keys of ``report --by``."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, Final, NamedTuple

from otel_kprofiler.analysis.occurrences import NO_LINE, OF_STACKS, Key, Occurrence, only
from otel_kprofiler.analysis.samples import Samples, Tables, Thread
from otel_kprofiler.formats import process_id, process_name
from otel_kprofiler.model import (
    KERNEL_SIDE,
    LOCK_HOLDER_ID,
    LOCK_HOLDER_NAME,
    LOCK_TYPE,
    AttributeValue,
    SpanLink,
    Stack,
    WindowWait,
)
from otel_kprofiler.otlp import LOCAL_ROOT, WAIT_CAUSE, WAIT_STATE


class Group(NamedTuple):
    """Samples that share a key. Weights are in the unit of the kind's ``measure``.

    Attributes:
        own: self weight. The self weights of all groups add up to the total weight of the samples.
        total: weight of all samples in which the key occurs; each sample counts once.
        kernel: self weight of the samples taken in the kernel.
        samples: number of samples whose weights add up to ``own``.
    """

    key: Key
    own: int
    total: int
    kernel: int
    samples: int


class Weighed(NamedTuple):
    """Samples with the same stack: index of the stack, total weight, and number of samples."""

    stack: int
    weight: int
    samples: int


NO_SPAN: Final = Key("[no span]")
NONE: Final = "-"
"""Name of the group of samples that lack the grouping attribute."""
LABEL: Final = "label:"
"""Prefix that marks a name as a label, not an attribute."""


class Assignment(NamedTuple):
    """Assigns rows to groups: ``find`` maps each number in ``column`` to the groups of its row."""

    column: Sequence[int]
    find: Callable[[int], Occurrence]


def _threads(samples: Samples, key: Callable[[Thread], Key]) -> Assignment:
    threads = samples.tables.threads
    return Assignment(samples.threads, lambda at: only(key(threads[at])))


def _by_process(samples: Samples) -> Assignment:
    return _threads(samples, _process_key(samples))


def _by_comm(samples: Samples) -> Assignment:
    return _threads(samples, lambda thread: Key(thread.name or NONE))


def _by_thread(samples: Samples) -> Assignment:
    process = _process_key(samples)
    return _threads(
        samples, lambda thread: Key(f"{thread.name} ({thread.tid})", process(thread).name)
    )


def _by_attribute(samples: Samples, names: Sequence[str]) -> Assignment:
    """Groups by the first of ``names`` that is a Resource attribute or a label on the sample."""

    def key(thread: Thread) -> Key:
        labels = dict(thread.labels)
        attributes = {
            **labels,
            **samples.tables.resources[thread.resource].attributes,
            **{LABEL + name: value for name, value in labels.items()},
        }
        values = [attributes[name] for name in names if name in attributes]
        return Key(_text(values[0]) if values else NONE)

    return _threads(samples, key)


def _by_holder(samples: Samples) -> Assignment:
    def key(thread: Thread) -> Key:
        labels = dict(thread.labels)
        if LOCK_HOLDER_ID not in labels:
            return Key(NONE)
        return Key(f"{labels.get(LOCK_HOLDER_NAME, '')} ({labels[LOCK_HOLDER_ID]})")

    return _threads(samples, key)


def _by_cpu(samples: Samples) -> Assignment:
    cpus = samples.tables.cpus
    return Assignment(samples.cpus, lambda at: only(Key(str(cpus[at]))))


def _by_span(samples: Samples) -> Assignment:
    links = samples.tables.links
    return Assignment(samples.links, lambda at: only(span_key(links[at])))


def _by_endpoint(samples: Samples) -> Assignment:
    names = endpoints(samples.tables.links)
    return Assignment(samples.links, lambda at: only(Key(names[at] or NONE)))


def _by_kind(samples: Samples) -> Assignment:
    origins = samples.tables.origins
    return Assignment(samples.origins, lambda at: only(Key(origins[at].profile.kind.name)))


def _by_wait(samples: Samples, key: Callable[[WindowWait], str]) -> Assignment:
    waits = samples.tables.waits

    def find(at: int) -> Occurrence:
        wait = waits[at]
        return only(Key(key(wait) if wait else NONE))

    return Assignment(samples.waits, find)


def _cause(wait: WindowWait) -> str:
    return wait.cause.label if wait.cause else NONE


def _state(wait: WindowWait) -> str:
    return wait.state.label


def _waker(wait: WindowWait) -> str:
    return f"{wait.waker.name} ({wait.waker.tid})" if wait.waker else NONE


SERVICE: Final = ("service.name",)
CONTAINER: Final = ("container.name", "k8s.container.name", "container.id")
_OF_COLUMNS: Final[dict[str, Callable[[Samples], Assignment]]] = {
    "process": _by_process,
    "thread": _by_thread,
    "comm": _by_comm,
    "container": partial(_by_attribute, names=CONTAINER),
    "cpu": _by_cpu,
    "span": _by_span,
    "endpoint": _by_endpoint,
    LOCAL_ROOT: _by_endpoint,
    "service": partial(_by_attribute, names=SERVICE),
    "kind": _by_kind,
    "cause": partial(_by_wait, key=_cause),
    "state": partial(_by_wait, key=_state),
    WAIT_CAUSE: partial(_by_wait, key=_cause),
    WAIT_STATE: partial(_by_wait, key=_state),
    "waker": partial(_by_wait, key=_waker),
    "lock": partial(_by_attribute, names=(LOCK_TYPE,)),
    "holder": _by_holder,
}


def assign(samples: Samples, by: str) -> Assignment:
    """Groups samples by ``by``: a name in ``GROUPINGS`` or the name of an attribute."""
    of_stacks = OF_STACKS.get(by)
    if of_stacks:
        stacks, of_stack = samples.tables.stacks, of_stacks()
        return Assignment(samples.stacks, lambda at: of_stack(stacks[at]))
    return _OF_COLUMNS.get(by, partial(_by_attribute, names=[by]))(samples)


def group_samples(samples: Samples, by: str) -> list[Group]:
    """Groups samples by key ``by``.

    Lines are sorted by total weight, other groups by self weight.
    """
    of_stacks = OF_STACKS.get(by)
    if of_stacks:
        groups = collect(samples, of_stacks())
    else:
        groups = _collect_column(samples, assign(samples, by))
    return sort_groups(groups, "total") if by == "line" else groups


SORTS: Final[dict[str, Callable[[Group], Any]]] = {
    "self": lambda group: (-group.own, -group.total),
    "total": lambda group: (-group.total, -group.own),
    "kernel": lambda group: (-group.kernel, -group.own),
    "samples": lambda group: (-group.samples, -group.total),
    "name": lambda group: group.key.name,
}


def sort_groups(groups: Iterable[Group], order: str) -> list[Group]:
    """Sorts groups by an order in ``SORTS``. Groups without a line come last."""
    sort = SORTS[order]
    return sorted(groups, key=lambda group: (group.key == NO_LINE, sort(group), group.key))


GROUPINGS: Final[dict[str, Callable[[Samples], list[Group]]]] = {
    name: partial(group_samples, by=name)
    for name in (
        "function", "line", "module", "syscall", "bpf", "process", "thread", "comm", "container",
        "cpu", "span", "endpoint", "service", "kind", "cause", "state",
        "waker", "lock", "holder",
    )
}  # fmt: skip
"""Groupings by their names in ``report --by``."""


WAIT_GROUPINGS: Final = frozenset({"cause", "state", "waker", WAIT_CAUSE, WAIT_STATE})
LOCK_GROUPINGS: Final = frozenset({"lock", "holder", LOCK_TYPE})


def select_group(samples: Samples, by: str, key: Key) -> Samples:
    """Returns the samples that count towards a group."""
    column, find = assign(samples, by)
    wanted = {at for at in set(column) if key in find(at).all}
    return samples.select([at in wanted for at in column])


def merge_groups(parts: Iterable[Iterable[Group]]) -> list[Group]:
    """Merges groups from disjoint sets of samples."""
    sums = _Sums()
    for groups in parts:
        for group in groups:
            sums.add_group(group)
    return sums.groups()


def span_key(link: SpanLink | None) -> Key:
    """Returns the key of a span: its id as ``name``, and its trace id as ``place``."""
    return Key(link.span_id.hex(), link.trace_id.hex()) if link else NO_SPAN


def endpoints(links: Sequence[SpanLink | None]) -> list[str]:
    """Returns the local root name of each linked span; empty if no link to the span has a name."""
    names = {link[:2]: link.local_root for link in links if link and link.local_root}
    return [names.get(link[:2], "") if link else "" for link in links]


def is_in_kernel(tables: Tables, stack: int) -> bool:
    """Returns whether samples with the stack ran in the kernel, given the stack's index."""
    if tables.in_kernel is not None:
        return tables.in_kernel[stack]
    return any(side.kind is KERNEL_SIDE and side.frames for side in tables.stacks[stack].sides)


def in_kernel(tables: Tables) -> list[bool]:
    """Returns the result of :func:`is_in_kernel` for each stack."""
    return [is_in_kernel(tables, stack) for stack in range(len(tables.stacks))]


class _Sums:
    def __init__(self) -> None:
        self._sums: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def add(self, frames: Occurrence, weight: int, count: int, *, kernel: bool) -> None:
        self_sums = self._sums[frames.own]
        self_sums[0] += weight
        self_sums[3] += count
        if kernel:
            self_sums[2] += weight
        for key in frames.all:
            self._sums[key][1] += weight

    def add_group(self, group: Group) -> None:
        key, self_weight, total, kernel, samples = group
        sums = self._sums[key]
        sums[0] += self_weight
        sums[1] += total
        sums[2] += kernel
        sums[3] += samples

    def groups(self) -> list[Group]:
        groups = [Group(key, *sums) for key, sums in self._sums.items()]
        return sorted(groups, key=lambda group: (-group.own, -group.total, group.key))


def collect(samples: Samples, frames: Callable[[Stack], Occurrence | None]) -> list[Group]:
    """Groups samples by their stacks, sorted by self weight.

    ``frames`` returns the groups that a stack counts towards; None to skip the stack.
    """
    rows = zip(samples.stacks, samples.weights(), samples.counts(), strict=True)
    return group_stacks(samples.tables, starmap(Weighed, rows), frames)


def group_stacks(
    tables: Tables, rows: Iterable[Weighed], frames: Callable[[Stack], Occurrence | None]
) -> list[Group]:
    """Groups samples by their stacks, which are given as indices into ``tables.stacks``."""
    weights, counts = Counter[int](), Counter[int]()
    for number, weight, count in rows:
        weights[number] += weight
        counts[number] += count
    sums = _Sums()
    for number, weight in weights.items():
        occurrence = frames(tables.stacks[number])
        if occurrence is not None:
            sums.add(occurrence, weight, counts[number], kernel=is_in_kernel(tables, number))
    return sums.groups()


def _collect_column(samples: Samples, assignment: Assignment) -> list[Group]:
    kernel = in_kernel(samples.tables)
    weights: defaultdict[tuple[int, bool], list[int]] = defaultdict(lambda: [0, 0])
    rows = zip(assignment.column, samples.stacks, samples.weights(), samples.counts(), strict=True)
    for number, stack, weight, count in rows:
        sums = weights[number, kernel[stack]]
        sums[0] += weight
        sums[1] += count
    column = _Sums()
    for (number, is_kernel), (weight, count) in weights.items():
        column.add(assignment.find(number), weight, count, kernel=is_kernel)
    return column.groups()


def _process_key(samples: Samples) -> Callable[[Thread], Key]:
    def key(thread: Thread) -> Key:
        resource = samples.tables.resources[thread.resource]
        pid = process_id(resource)
        name = process_name(resource, thread.name)
        return Key(name if pid is None else f"{name} ({pid})")

    return key


def _text(value: AttributeValue) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
