"""Determines which sample fields a report needs, and therefore which samples can be merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.analysis import CONTAINER, LABEL, OF_STACKS, PART, SERVICE, TRACE, Filter
from otel_kprofiler.model import LOCK_HOLDER_ID, LOCK_HOLDER_NAME, LOCK_TYPE
from otel_kprofiler.otlp import (
    LOCAL_ROOT,
    PROGRAM,
    WAIT_CAUSE,
    WAIT_STATE,
    WAKER_NAME,
    WAKER_PID,
    WAKER_TID,
)

_PROCESS: Final = ("process.executable.name", PROGRAM, "process.pid")
_THREAD: Final = ("thread.name", "thread.id")
_CPU: Final = ("cpu.logical_number",)


@dataclass(frozen=True, slots=True)
class Need:
    """The parts of samples that are read from a table.

    Attributes:
        resources: names of the Resource attributes to read; None for all.
        samples: names of the sample attributes to read; None for all.
        stacks: whether to read the stacks, or only a flag that shows whether each stack has kernel
            frames.
        times: whether to read all timestamps of merged samples, or only the first and last.
    """

    resources: frozenset[str] | None = frozenset()
    samples: frozenset[str] | None = frozenset()
    links: bool = False
    stacks: bool = False
    times: bool = False

    def __or__(self, other: Need) -> Need:
        return Need(
            _both(self.resources, other.resources),
            _both(self.samples, other.samples),
            self.links or other.links,
            self.stacks or other.stacks,
            self.times or other.times,
        )

    @classmethod
    def of_attributes(cls, pairs: Iterable[str]) -> Need:
        """Returns a :class:`Need` for only the attributes in ``NAME=VALUE`` filters."""
        return _attributes(*(pair.partition("=")[0] for pair in pairs))


def _both(first: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return None if first is None or other is None else first | other


def _attributes(*names: str) -> Need:
    return Need(frozenset(names), frozenset(names))


ALL: Final = Need(None, None, links=True, stacks=True, times=True)

PAGE: Final = Need(
    frozenset({*_PROCESS, "host.name", "os.version"}),
    frozenset({*_THREAD, *_CPU}),
    stacks=True,
    times=True,
)

_THREADS: Final = Need(samples=frozenset(_THREAD))
_PROCESSES: Final = Need(frozenset(_PROCESS), frozenset({"thread.name"}))
_STACKS: Final = Need(stacks=True)
_SPANS: Final = Need(samples=frozenset({LOCAL_ROOT}), links=True)
_PARTS: Final = _PROCESSES | _THREADS | _SPANS | _STACKS | Need(times=True)
_GROUPINGS: Final = {
    "process": _PROCESSES,
    "thread": _PROCESSES | _THREADS,
    "comm": Need(samples=frozenset({"thread.name"})),
    "container": _attributes(*CONTAINER),
    "cpu": Need(samples=frozenset(_CPU)),
    "span": _SPANS | _STACKS,
    PART: _PARTS,
    TRACE: _PARTS | _attributes(*SERVICE),
    "endpoint": _SPANS,
    LOCAL_ROOT: _SPANS,
    "service": _attributes(*SERVICE),
    "kind": Need(),
    **dict.fromkeys(("cause", "state", WAIT_CAUSE, WAIT_STATE), Need()),
    "lock": _attributes(LOCK_TYPE),
    "holder": _attributes(LOCK_HOLDER_ID, LOCK_HOLDER_NAME),
    "waker": Need(samples=frozenset({WAKER_NAME, WAKER_PID, WAKER_TID})),
    **dict.fromkeys(OF_STACKS, _STACKS),
}
_FILTERS: Final = {
    "processes": _PROCESSES,
    "threads": _THREADS,
    "containers": _attributes(*CONTAINER),
    "services": _attributes(*SERVICE),
    "cpus": Need(samples=frozenset(_CPU)),
    "modules": _STACKS,
    "functions": _STACKS,
    "spans": Need(links=True),
    "endpoints": _SPANS,
    "kinds": Need(),
}


def need_of(chosen: Filter, by: str = "", *, of_stacks: bool = False) -> Need:
    """Returns which parts of the samples a report requires.

    The caller applies the ``chosen`` filter to the samples that were read, so the result includes
    the parts that the filter needs. ``by`` is the name of the grouping; empty if there is none.
    ``of_stacks`` is true if the report selects frames, and therefore needs stacks.
    """
    need = Need(stacks=of_stacks)
    if by:
        need |= _GROUPINGS.get(by) or _attributes(by.removeprefix(LABEL))
    for name, needed in _FILTERS.items():
        if getattr(chosen, name):
            need |= needed
    return need | Need.of_attributes(chosen.attributes)
