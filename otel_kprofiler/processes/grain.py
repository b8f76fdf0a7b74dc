"""Merges the Resources of several processes before encoding, at the configured granularity."""

import enum
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from otel_kprofiler.model import (
    NO_WAITS,
    Attributes,
    AttributeValue,
    Profile,
    Resource,
    ResourceSamples,
    WaitTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import KERNEL_THREAD, USER_UNIT
from otel_kprofiler.processes.self_profiled import SELF_PROFILED

_SERVICE: Final = (
    "deployment.environment.name",
    "service.name",
    "service.namespace",
    "service.version",
)
_CONTAINER: Final = ("container.", "k8s.", "systemd.", USER_UNIT)
_EXECUTABLE: Final = "process.executable."
_EXECUTABLE_NAME: Final = "process.executable.name"
_EXECUTABLE_PATH: Final = "process.executable.path"
_NUMBERED: Final = re.compile(r"[/:].*", re.DOTALL)
"""The variable suffix of kernel thread names, as in ``kworker/0:1H``."""


class Grain(enum.Enum):
    """The unit that a Resource describes, from finest to coarsest."""

    PROCESS = "process"
    EXECUTABLE = "executable"
    """An executable run by a service in a container or systemd unit."""
    CONTAINER = "container"
    """A service in a container, or in a systemd unit outside containers."""
    SERVICE = "service"
    HOST = "host"

    def select(self, attributes: Attributes, common: Collection[str]) -> dict[str, AttributeValue]:
        """Returns the process attributes that are kept at this granularity or are in ``common``."""
        prefixes, names = _KEPT[self]
        selected = {
            key: value
            for key, value in attributes.items()
            if key in common or key in names or key.startswith(prefixes) or key == SELF_PROFILED
        }
        if self is Grain.EXECUTABLE and _EXECUTABLE_PATH not in selected:
            name = selected.get(_EXECUTABLE_NAME)
            if isinstance(name, str):
                selected[_EXECUTABLE_NAME] = _NUMBERED.sub("", name)
        return selected


_KEPT: Final[dict[Grain, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    Grain.PROCESS: (("",), ()),
    Grain.EXECUTABLE: ((*_CONTAINER, _EXECUTABLE), (*_SERVICE, KERNEL_THREAD)),
    Grain.CONTAINER: (_CONTAINER, _SERVICE),
    Grain.SERVICE: ((), _SERVICE),
    Grain.HOST: ((), ()),
}
"""The prefixes and names of the attributes that a Resource keeps, by granularity."""


def merge_resources(window: Window, grain: Grain, common: Collection[str]) -> Window:
    """Merges a window's Resources that have equal attributes at ``grain``.

    The samples are unchanged. ``window`` must contain a Resource for each process. ``common``
    contains the names of the attributes that all Resources have.
    """
    if grain is Grain.PROCESS:
        return window
    merged: dict[tuple[object, ...], Resource] = {}
    coarse: dict[Resource, Resource] = {}
    for profile in window.profiles:
        for resource, *_ in profile.resources:
            if resource in coarse:
                continue
            selected = grain.select(resource.attributes, common)
            types = tuple(type(value) for _, value in sorted(selected.items()))  # 1 equals True
            key = (resource.schema_url, frozenset(selected.items()), types)
            coarse[resource] = merged.setdefault(key, Resource(selected, resource.schema_url))
    profiles = [_merge(profile, coarse) for profile in window.profiles]
    return replace(window, profiles=profiles)


def _merge(profile: Profile, coarse: dict[Resource, Resource]) -> Profile:
    groups: dict[Resource, list[WindowSample]] = {}
    waits: dict[Resource, WaitTotals] = {}
    for resource, samples, totals in profile.resources:
        groups.setdefault(coarse[resource], []).extend(samples)
        if totals:
            waits[coarse[resource]] = waits.get(coarse[resource], NO_WAITS).plus(totals)
    resources = [
        ResourceSamples(resource, samples, waits.get(resource))
        for resource, samples in groups.items()
    ]
    return replace(profile, resources=resources)
