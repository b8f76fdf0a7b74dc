"""Detects processes that profile themselves, so that no CPU time is counted twice.

Self-profiling processes publish :data:`TARGET` in their process context. Any process can publish
this attribute, so it is trusted only if the process has open BPF maps. Where unprivileged BPF is
disabled, creating a map requires the privileges that a profiler needs.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from otel_kprofiler.host import HostFiles
from otel_kprofiler.model import (
    ON_CPU,
    Attributes,
    LossCause,
    Profile,
    Resource,
    SampleCounts,
    Window,
)

TARGET: Final = "otel_kprofiler.target"
"""Attribute in process contexts: the sampled target, which includes the publishing process."""
SELF_PROFILED: Final = "otel_kprofiler.self_profiled"
"""Resource attribute: whether the process samples its own on-CPU time."""
_BPF_MAP: Final = "anon_inode:bpf-map"


def profiles_itself(files: HostFiles, pid: int, extra: Attributes) -> bool:
    """Returns whether a process has a BPF map open and publishes that it samples itself.

    ``extra`` contains the attributes in the process context that are outside the Resource. Raises
    ``OSError`` if the process's descriptors cannot be read.
    """
    if not extra.get(TARGET):
        return False
    for name in files.list_dir(f"/proc/{pid}/fd"):
        try:
            if files.read_link(f"/proc/{pid}/fd/{name}") == _BPF_MAP:
                return True
        except FileNotFoundError:
            continue  # the descriptor has been closed
    return False


def is_self_profiled(resource: Resource) -> bool:
    """Returns whether a Resource belongs to a process that samples itself."""
    return resource.attributes.get(SELF_PROFILED) is True


def leave_out_self_profiled(
    window: Window, others: Collection[Resource] = ()
) -> tuple[Window, SampleCounts]:
    """Removes on-CPU samples of processes that sample themselves, and counts the samples as lost.

    The window must contain a Resource for each process. ``others`` are the Resources of processes
    that sampled themselves during part of the window. Returns the window, and the number of
    excluded samples of each kind.
    """
    left = SampleCounts()
    profiles = [
        _leave_out(profile, others, left) if profile.kind is ON_CPU else profile
        for profile in window.profiles
    ]
    return (replace(window, profiles=profiles), left) if left else (window, left)


def _leave_out(profile: Profile, others: Collection[Resource], left: SampleCounts) -> Profile:
    kept, count = [], 0
    for group in profile.resources:
        if is_self_profiled(group.resource) or group.resource in others:
            count += sum(len(sample.timestamps_unix_ns) for sample in group.samples)
        else:
            kept.append(group)
    if not count:
        return profile
    left[profile.kind.name] += count
    totals = profile.totals
    if totals:
        earlier = totals.lost.get(LossCause.SELF_PROFILED, 0)
        totals = totals._replace(
            samples=totals.samples - count,
            lost={**totals.lost, LossCause.SELF_PROFILED: earlier + count},
        )
    lost = {**profile.lost, LossCause.SELF_PROFILED: count}
    return replace(profile, resources=kept, lost=lost, totals=totals)
