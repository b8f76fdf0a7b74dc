"""Provides one Resource per cgroup, user and program for processes whose details are not read."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.model import COARSE, Attributes, RawSample, Resource
from otel_kprofiler.otlp import PROGRAM
from otel_kprofiler.processes.reader import ProcessReader

MOST_SHARED: Final = 256


@dataclass(slots=True, eq=False)
class _Shared:
    """A Resource. ``located`` contains the attributes derived from the cgroup and the user."""

    sample: RawSample
    program: Attributes
    located: Attributes
    resource: Resource


class SharedResources:
    """Keeps a Resource per combination of cgroup, user and program. Not thread-safe.

    A program is known only if the parent process's attributes have been read. When the number of
    Resources reaches :data:`MOST_SHARED`, all Resources are discarded. ``make`` returns a Resource
    with the given attributes and those common to all Resources.
    """

    def __init__(self, reader: ProcessReader, make: Callable[[Attributes], Resource]) -> None:
        self._reader, self._make = reader, make
        self._shared: dict[tuple[object, ...], _Shared] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def get(self, sample: RawSample) -> Resource:
        """Returns the shared Resource for a sample's process."""
        owner = sample.owner if sample.stack_start else None
        program = self._reader.find_program(sample)
        path = program.get("process.executable.path")
        key = owner, sample.cgroup_id, path, program.get(PROGRAM)
        shared = self._shared.get(key)
        if shared is None:
            if len(self._shared) >= MOST_SHARED:
                self._shared.clear()
            located = self._reader.find(sample)
            kept = sample._replace(collected=(), stacks=())
            resource = self._make({**located, **program, COARSE: True})
            shared = self._shared[key] = _Shared(kept, program, located, resource)
        return shared.resource

    def renew(self, resources: Collection[Resource]) -> dict[Resource, Resource]:
        """Returns replacements for Resources whose cgroups can now be identified."""
        renewed = {}
        for shared in self._shared.values():
            if shared.resource not in resources:
                continue
            located = shared.located
            if "container.id" in located:  # keep the id: the cgroup may have been removed
                located = {**self._reader.name(located), **located}
            else:
                located = self._reader.find(shared.sample)
            if len(located) > len(shared.located):
                old, shared.located = shared.resource, located
                shared.resource = self._make({**located, **shared.program, COARSE: True})
                renewed[old] = shared.resource
        return renewed

    def clear(self) -> None:
        """Forget all Resources, because the common attributes have changed."""
        self._shared.clear()
