"""Reports which filter matches no sample, and which values it could match."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Final

from otel_kprofiler.analysis import CONTAINER, SERVICE, Filter, Samples, endpoints
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import module_names, process_name, stack_entries
from otel_kprofiler.text import escape_controls

_MOST: Final = 6
_CLOSE: Final = 0.6

_Values = Iterator[tuple[str, int]]


def check_matches(chosen: Filter, *sources: Samples) -> None:
    """Raise ``KProfilerError`` if the filter matches no sample, although there are samples."""
    filled = [source for source in sources if source.count]
    if not filled or any(chosen.apply(source).count for source in filled):
        return
    given = [field.name for field in fields(chosen) if getattr(chosen, field.name)]
    for name in given:
        wanted = tuple(map(str, getattr(chosen, name)))
        alone = replace(Filter(), **{name: getattr(chosen, name)})
        if not any(alone.apply(source).count for source in filled):
            option = OPTIONS[name]
            shown = " or ".join(f"{option} {escape_controls(value)}" for value in wanted)
            raise KProfilerError(
                f"no sample matches {shown}", hint=_describe_values(name, wanted, filled)
            )
    options = ", ".join(OPTIONS[name] for name in given)
    raise KProfilerError(
        f"no sample matches all of {options}, although each option matches some samples",
        hint="omit one of them",
    )


def check_function(option: str, function: str, samples: Samples) -> None:
    """Raise ``KProfilerError`` if there are samples, but none of their stacks has the function."""
    if samples.count and not Filter(functions=(function,)).apply(samples).count:
        raise KProfilerError(
            f"no sample matches {option} {escape_controls(function)}",
            hint=_describe_values("functions", [function], [samples]),
        )


def _describe_values(name: str, wanted: Iterable[str], sources: Iterable[Samples]) -> str:
    counts = Counter[str]()
    for source in sources:
        for value, count in _VALUES[name](source, tuple(wanted)):
            counts[value] += count
    counts.pop("", None)
    if not counts:
        return f"no sample has a value for {OPTIONS[name]} to match"
    close = [match for value in wanted for match in get_close_matches(value, counts, cutoff=_CLOSE)]
    common = sorted(counts, key=lambda value: (-counts[value], value))
    shown = list(dict.fromkeys([*close, *common]))[:_MOST]
    more = f", and {len(counts) - len(shown):,} more" if len(counts) > len(shown) else ""
    return f"existing values: {', '.join(map(escape_controls, shown))}{more}"


def _of_threads(samples: Samples, find: Callable[[int], Iterable[str]]) -> _Values:
    """Yields each value that ``find`` returns for a thread, with the thread's sample count."""
    rows = Counter[int]()
    for thread, count in zip(samples.threads, samples.counts(), strict=True):
        rows[thread] += count
    for thread, count in rows.items():
        for value in find(thread):
            yield value, count


def _processes(samples: Samples, _: tuple[str, ...]) -> _Values:
    tables = samples.tables

    def find(at: int) -> Iterable[str]:
        thread = tables.threads[at]
        return {process_name(tables.resources[thread.resource], thread.name), thread.name}

    return _of_threads(samples, find)


def _attributes(samples: Samples, names: Iterable[str], prefix: str = "") -> _Values:
    tables = samples.tables

    def find(at: int) -> Iterable[str]:
        thread = tables.threads[at]
        attributes = {**dict(thread.labels), **tables.resources[thread.resource].attributes}
        return {f"{prefix}{attributes[name]}" for name in names if name in attributes}

    return _of_threads(samples, find)


def _named_attributes(samples: Samples, wanted: tuple[str, ...]) -> _Values:
    for name in dict.fromkeys(pair.partition("=")[0] for pair in wanted):
        yield from _attributes(samples, [name], f"{name}=")


def _of_stacks(samples: Samples, find: Callable[[int], Iterable[str]]) -> _Values:
    for stack, count in zip(samples.stacks, samples.counts(), strict=True):
        for value in find(stack):
            yield value, count


def _modules(samples: Samples, _: tuple[str, ...]) -> _Values:
    stacks = samples.tables.stacks
    modules = [{name for frame in stack.frames for name in module_names(frame)} for stack in stacks]
    return _of_stacks(samples, modules.__getitem__)


def _functions(samples: Samples, _: tuple[str, ...]) -> _Values:
    functions = [{entry.name for entry in stack_entries(stack)} for stack in samples.tables.stacks]
    return _of_stacks(samples, functions.__getitem__)


def _column(column: Iterable[int], values: list[str], samples: Samples) -> _Values:
    for at, count in zip(column, samples.counts(), strict=True):
        yield values[at], count


_VALUES: Final[dict[str, Callable[[Samples, tuple[str, ...]], _Values]]] = {
    "processes": _processes,
    "threads": lambda samples, _: _of_threads(
        samples, lambda at: [samples.tables.threads[at].name]
    ),
    "containers": lambda samples, _: _attributes(samples, CONTAINER),
    "services": lambda samples, _: _attributes(samples, SERVICE),
    "attributes": _named_attributes,
    "cpus": lambda samples, _: _column(samples.cpus, list(map(str, samples.tables.cpus)), samples),
    "modules": _modules,
    "functions": _functions,
    "spans": lambda samples, _: _column(
        samples.links,
        [link.span_id.hex() if link else "" for link in samples.tables.links],
        samples,
    ),
    "endpoints": lambda samples, _: _column(
        samples.links, endpoints(samples.tables.links), samples
    ),
    "kinds": lambda samples, _: _column(
        samples.origins, [origin.profile.kind.name for origin in samples.tables.origins], samples
    ),
}
"""Functions that count samples by value, one for each field of :class:`Filter`."""

OPTIONS: Final = {
    "processes": "--process",
    "threads": "--thread",
    "containers": "--container",
    "services": "--service",
    "attributes": "--attribute",
    "cpus": "--cpus",
    "modules": "--module",
    "functions": "--function",
    "spans": "--span",
    "endpoints": "--endpoint",
    "kinds": "--kind",
}
"""Names of the options that set the fields of :class:`Filter`."""
