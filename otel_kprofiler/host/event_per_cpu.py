"""Keeps a perf event open on each CPU, across CPU hotplug."""

import abc
import errno
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.cpus import read_online_cpus

EventT = TypeVar("EventT")


class CpuChanges(NamedTuple):
    """The CPUs whose events :meth:`EventPerCpu.update` opened or closed.

    ``refused`` contains errors from opening events, by CPU. If opening keeps failing on a CPU, only
    the first error is reported.
    """

    opened: list[int]
    closed: list[int]
    refused: dict[int, OSError]


class EventPerCpu(abc.ABC, Generic[EventT]):
    """An event on each online CPU in ``cpus`` (empty: all); not thread-safe.

    If a CPU goes offline, its event remains inactive even after the CPU comes back online.
    """

    def __init__(self, files: HostFiles, cpus: Iterable[int] = ()) -> None:
        self._files = files
        self._wanted = frozenset(cpus)
        self._events: dict[int, EventT] = {}
        self._refused: set[int] = set()

    def update(self) -> CpuChanges:
        """Open events on new CPUs, close events on offline CPUs, and replace dead events.

        Raises ``OSError`` without changing anything if the list of CPUs cannot be read.
        """
        online = read_online_cpus(self._files)
        online = online & self._wanted if self._wanted else online
        closed = sorted(self._events.keys() - online)
        for cpu in sorted(self._events):
            if cpu not in online or self._is_dead(cpu):
                self._close_event(self._events.pop(cpu))
        opened, refused = [], {}
        for cpu in sorted(online - self._events.keys()):
            try:
                self._events[cpu] = self._open_event(cpu)
                opened.append(cpu)
            except OSError as error:
                if error.errno != errno.ENODEV:  # the CPU just went offline
                    refused[cpu] = error
        news = {cpu: error for cpu, error in refused.items() if cpu not in self._refused}
        self._refused = self._refused - set(opened) | refused.keys()
        return CpuChanges(opened, closed, news)

    @abc.abstractmethod
    def _open_event(self, cpu: int) -> EventT:
        """Open an event on a CPU. Raises ``OSError``, with ``ENODEV`` if the CPU is offline."""

    @abc.abstractmethod
    def _is_dead(self, cpu: int) -> bool:
        """Returns whether the event has counted nothing since the last call."""

    @abc.abstractmethod
    def _close_event(self, event: EventT) -> None:
        """Close an event."""
