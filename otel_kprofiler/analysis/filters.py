"""Filters that select the samples for a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache

from otel_kprofiler.analysis.groups import CONTAINER, SERVICE, endpoints
from otel_kprofiler.analysis.samples import Samples, Thread
from otel_kprofiler.formats import (
    module_names,
    plain_module,
    process_id,
    process_name,
    stack_entries,
)
from otel_kprofiler.model import Resource, SpanLink, Stack
from otel_kprofiler.text import escape_surrogates


@dataclass(frozen=True, slots=True)
class Filter:
    r"""Conditions on samples: a sample must match at least one value of each nonempty field.

    Names may be patterns with ``*``, ``?`` and ``[…]``. As in profiles, bytes that are not valid
    UTF-8 are escaped, for example as ``\xff``.

    Attributes:
        processes: process ids, or names of executables, of scripts run by an interpreter, or of
            threads.
        threads: thread names (``comm``) or ids.
        containers: container names, or prefixes of container ids.
        cpus: numbers of logical CPUs.
        modules: names of loaded or built-in kernel modules with a frame in the stack; ``-`` and
            ``_`` are treated as the same character.
        functions: function names in the stack.
        spans: hexadecimal prefixes of span ids or trace ids.
        endpoints: local root span names.
        attributes: Resource attributes or sample labels, as ``NAME=VALUE``.
    """

    processes: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            escaped = (
                escape_surrogates(value) if isinstance(value, str) else value for value in values
            )
            object.__setattr__(self, field.name, tuple(escaped))

    def with_attributes(self, attributes: Sequence[str]) -> Filter:
        """Returns a copy of the filter with additional ``attributes``."""
        return replace(self, attributes=(*self.attributes, *attributes))

    def apply(self, samples: Samples) -> Samples:
        """Returns the samples that match all conditions."""
        marks = [*self._thread_marks(samples), *self._stack_marks(samples)]
        if self.cpus:
            cpus = [cpu in self.cpus for cpu in samples.tables.cpus]
            marks.append([cpus[cpu] for cpu in samples.cpus])
        if self.spans:
            links = [self._is_wanted_span(link) for link in samples.tables.links]
            marks.append([links[link] for link in samples.links])
        if self.endpoints:
            named = matcher(self.endpoints)
            links = [bool(name) and named(name) for name in endpoints(samples.tables.links)]
            marks.append([links[link] for link in samples.links])
        if self.kinds:
            named = matcher(self.kinds)
            origins = [named(origin.profile.kind.name) for origin in samples.tables.origins]
            marks.append([origins[origin] for origin in samples.origins])
        return samples.select(list(map(all, zip(*marks, strict=True)))) if marks else samples

    def find_processes(self, samples: Samples) -> list[bool] | None:
        """Returns whether each Resource matches; None if the filter has conditions on samples."""
        if replace(self, processes=(), services=(), containers=(), attributes=(), kinds=()) != (
            Filter()
        ):
            return None
        tests = list(self._thread_tests(samples))
        wanted = [
            all(test(Thread(number, 0, "")) for test in tests)
            for number in range(len(samples.tables.resources))
        ]
        for thread in samples.tables.threads:  # a process without a name is named after a thread
            wanted[thread.resource] |= all(test(thread) for test in tests)
        return wanted

    def _thread_tests(self, samples: Samples) -> Iterator[Callable[[Thread], bool]]:
        resources = samples.tables.resources
        if self.processes:
            yield _process_test(samples, self.processes)
        if self.threads:
            named = matcher(self.threads)
            yield lambda thread: named(thread.name) or named(str(thread.tid))
        if self.services:
            yield _attribute_test(resources, SERVICE, matcher(self.services))
        if self.containers:
            named_or_id = matcher([*self.containers, *(f"{name}*" for name in self.containers)])
            yield _attribute_test(resources, CONTAINER, named_or_id)
        for pair in self.attributes:
            name, _, value = pair.partition("=")
            yield _attribute_test(resources, [name], matcher([value]))

    def _thread_marks(self, samples: Samples) -> Iterator[list[bool]]:
        for test in self._thread_tests(samples):
            threads = [test(thread) for thread in samples.tables.threads]
            yield [threads[thread] for thread in samples.threads]

    def _stack_marks(self, samples: Samples) -> Iterator[list[bool]]:
        tests: list[Callable[[Stack], bool]] = []
        if self.modules:
            is_module = matcher([plain_module(name) for name in self.modules])
            tests.append(
                lambda stack: any(
                    is_module(name) for frame in stack.frames for name in module_names(frame)
                )
            )
        if self.functions:
            is_function = matcher(self.functions)
            tests.append(
                lambda stack: any(is_function(entry.name) for entry in stack_entries(stack))
            )
        for test in tests:
            stacks = [test(stack) for stack in samples.tables.stacks]
            yield [stacks[stack] for stack in samples.stacks]

    def _is_wanted_span(self, link: SpanLink | None) -> bool:
        if link is None:
            return False
        ids = link.trace_id.hex(), link.span_id.hex()
        return any(span_id.startswith(span.lower()) for span_id in ids for span in self.spans)


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Returns a predicate that is true for names that match a pattern."""
    wanted = tuple(patterns)
    return cache(
        lambda name: any(name == pattern or fnmatchcase(name, pattern) for pattern in wanted)
    )


def _process_test(samples: Samples, processes: Sequence[str]) -> Callable[[Thread], bool]:
    named = matcher(processes)
    resources, threads = samples.tables.resources, samples.tables.threads
    wanted = [any(map(named, _names_of_process(resource, ""))) for resource in resources]
    for thread in threads:
        if not wanted[thread.resource]:
            names = _names_of_process(resources[thread.resource], thread.name)
            wanted[thread.resource] = any(map(named, names)) or named(thread.name)
    return lambda thread: wanted[thread.resource]


def _names_of_process(resource: Resource, thread_name: str) -> Iterator[str]:
    """Yields the names that select a process: its id, its name and parts of the name."""
    name = process_name(resource, thread_name)
    script, bracket, executable = name.removesuffix(")").partition(" (")
    yield from (name, script, executable) if bracket else (name,)
    if file := resource.attributes.get("process.executable.name"):
        yield str(file)
    if (pid := process_id(resource)) is not None:
        yield str(pid)


def _attribute_test(
    resources: Sequence[Resource], names: Sequence[str], named: Callable[[str], bool]
) -> Callable[[Thread], bool]:
    owners = [
        any(named(str(resource.attributes[name])) for name in names if name in resource.attributes)
        for resource in resources
    ]
    return lambda thread: (
        owners[thread.resource]
        or any(name in names and named(value) for name, value in thread.labels)
    )
