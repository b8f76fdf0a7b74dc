"""Where samples are lost, and how many."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class LossCause(enum.Enum):
    """Why a sample that was taken did not reach a receiver (closed list)."""

    RING_FULL = "ring_full"
    """The ring buffer between kernel and user space was full."""
    QUEUE_FULL = "queue_full"
    """The sending queue was full and the oldest batch was dropped."""
    SPOOL_FULL = "spool_full"
    """The spool on disk was full and its oldest segment was dropped."""
    SPOOL_AGED = "spool_aged"
    """It waited in the spool for longer than ``max_age``."""
    SPOOL_DAMAGED = "spool_damaged"
    """It was in the spool, but cannot be read any more."""
    REJECTED = "rejected"
    """The receiver refused the data, and said that it must not be sent again."""
    RETRIES_EXHAUSTED = "retries_exhausted"
    """The receiver could not be reached for as long as the retry policy allows."""
    TOO_LARGE = "too_large"
    """One sample alone is larger than the size limit of the exporter."""
    WRITE_FAILED = "write_failed"
    """An output file could not be written, such as for want of space."""
    NOT_OFFERED = "not_offered"
    """Its window was closed while the exporter was not configured, such as before a reload."""
    SHUTDOWN = "shutdown"
    """The time for shutting down ended before the data was delivered."""
    INTERNAL = "internal"
    """A defect of the profiler itself; it is logged with its traceback."""


Losses = Mapping[LossCause, int]
"""Number of lost samples by cause; causes without losses are absent."""


class StreamTotals(NamedTuple):
    """Counts since a sampler was started, as they stood when a window was closed.

    Attributes:
        stream_id: random; one per start of a sampler.
        samples: samples in all windows so far, this one included.
        taken: samples that the kernel program took; ``samples`` and what was lost in the
            kernel, and those that wait for their window.
        lost: samples that were lost so far, by cause: in the kernel, and, once a window is
            encoded for one receiver, on the way to that.
        earlier_lost: likewise, of samples of earlier streams that waited for this receiver.
        unknown_since_unix_ns: when not 0, the run before was killed, and what it took after
            this time has left no trace.
        missed: samples that the kernel did not take, such as on a CPU that was inside another
            BPF program; not in ``taken``.
    """

    stream_id: str
    samples: int
    taken: int
    lost: Losses
    earlier_lost: Losses = MappingProxyType({})
    unknown_since_unix_ns: int = 0
    missed: int = 0


class ExporterAccount(NamedTuple):
    """What became of the samples that were handed to one exporter.

    Attributes:
        name: of the exporter.
        exported: samples that the receiver accepted.
        lost: samples that did not reach it, by cause.
        pending: samples that are still on their way, or wait in the spool for the next run.
        not_offered: samples of windows that were closed while there was no such exporter.
        carried: samples of earlier runs that were in the spool at the start.
        carried_lost: that part of ``lost`` which is of earlier runs.
        unknown_since_unix_ns: when not 0, the run before was killed, and what it had taken
            after this time is unknown.
    """

    name: str
    exported: int
    lost: Losses
    pending: int
    not_offered: int = 0
    carried: int = 0
    carried_lost: Losses = MappingProxyType({})
    unknown_since_unix_ns: int = 0


class Account(NamedTuple):
    """Where every sample that the kernel program took has gone; no figure is a difference.

    Attributes:
        taken: counted by the kernel program.
        received: counted when read from the ring.
        lost: lost between kernel and user space, by cause.
        waiting: read, but not yet in a closed window.
        exporters: one entry for each exporter.
        earlier: samples of profilers that ran before, which the exporters' counts include.
        missed: samples that the kernel did not take; not in ``taken``, see ``SamplerCounts``.
    """

    taken: int
    received: int
    lost: Losses
    waiting: int
    exporters: tuple[ExporterAccount, ...]
    earlier: int = 0
    missed: int = 0

    def gaps(self) -> list[str]:
        """Sentences about samples whose whereabouts are unknown; empty when all is accounted."""
        found = []
        if self.taken != self.received + sum(self.lost.values()):
            found.append(
                f"the kernel took {self.taken} samples, but {self.received} were received and "
                f"{sum(self.lost.values())} were counted as lost"
            )
        for exporter in self.exporters:
            seen = exporter.exported + sum(exporter.lost.values()) + exporter.pending
            seen += exporter.not_offered
            carried = exporter.carried + self.earlier
            if seen + self.waiting != self.received + carried:
                found.append(
                    f"{self.received} samples were received and {carried} carried over,"
                    f" but exporter {exporter.name} accounts for {seen} and {self.waiting} wait"
                    " for their window"
                )
        return found

    def as_dict(self) -> dict[str, object]:
        """The account as plain values for JSON."""
        return {
            "missed": self.missed,
            "taken": self.taken,
            "received": self.received,
            "lost": {cause.value: count for cause, count in self.lost.items()},
            "waiting": self.waiting,
            "earlier": self.earlier,
            "exporters": {
                exporter.name: {
                    "exported": exporter.exported,
                    "lost": {cause.value: count for cause, count in exporter.lost.items()},
                    "pending": exporter.pending,
                    "not_offered": exporter.not_offered,
                    "carried": exporter.carried,
                    "unknown_since_unix_ns": exporter.unknown_since_unix_ns,
                }
                for exporter in self.exporters
            },
            "gaps": self.gaps(),
        }
