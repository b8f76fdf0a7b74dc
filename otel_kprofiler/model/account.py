"""Accounts of samples: how many were taken, exported and lost, and for which ``LossCause``."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


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
    SELF_PROFILED = "self_profiled"
    """Its process samples itself and counts that time, so that it is left out, as configured."""
    SHUTDOWN = "shutdown"
    """The time for shutting down ended before the data was delivered."""
    INTERNAL = "internal"
    """A defect of the profiler itself; it is logged with its traceback."""


Losses = Mapping[LossCause, int]
"""Number of lost samples by cause; causes without losses are absent."""

SampleCounts = Counter[str]
"""Number of samples by the name of their kind."""


def sum_losses(losses: Iterable[Losses]) -> dict[LossCause, int]:
    """The losses of several accounts."""
    total: Counter[LossCause] = Counter()
    for one in losses:
        total.update(one)
    return dict(total)


_NONE: Final[Losses] = MappingProxyType({})


class StreamTotals(NamedTuple):
    """Counts since a sampler was started, as they stood when a window was closed.

    Attributes:
        stream_id: random; one per start of a sampler.
        samples: samples in all windows so far, this one included.
        taken: samples that the kernel program took; ``samples`` and what was lost in the
            kernel, and those that wait for their window.
        lost: samples that were lost so far, by cause: in the kernel, and, once a window is
            encoded for one receiver, on the way to that.
        earlier_samples: samples of all earlier streams that were in this receiver's spool.
        earlier_lost: of these, lost so far, by cause.
        unknown_since_unix_ns: when not 0, the run before was killed, and what it took after
            this time has left no trace.
        missed: samples that the kernel did not take, such as on a CPU that was inside another
            BPF program; not in ``taken``.
    """

    stream_id: str
    samples: int
    taken: int
    lost: Losses
    earlier_lost: Losses = _NONE
    unknown_since_unix_ns: int = 0
    missed: int = 0
    earlier_samples: int = 0


class ExporterAccount(NamedTuple):
    """The outcomes of the samples that were handed to one exporter.

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
        kinds: the account of each kind of samples, by its name; empty in the account of a kind.
        earlier_samples: samples of all earlier runs that were in the spool, of one kind.
        earlier_lost: of these, lost so far, in any run.
    """

    name: str
    exported: int = 0
    lost: Losses = _NONE
    pending: int = 0
    not_offered: int = 0
    carried: int = 0
    carried_lost: Losses = _NONE
    unknown_since_unix_ns: int = 0
    kinds: Mapping[str, ExporterAccount] = MappingProxyType({})
    earlier_samples: int = 0
    earlier_lost: Losses = _NONE

    @classmethod
    def of_kinds(cls, name: str, kinds: Mapping[str, ExporterAccount]) -> ExporterAccount:
        """The sums over all kinds."""
        of_kind = kinds.values()
        return cls(
            name=name,
            exported=sum(one.exported for one in of_kind),
            lost=sum_losses(one.lost for one in of_kind),
            pending=sum(one.pending for one in of_kind),
            not_offered=sum(one.not_offered for one in of_kind),
            carried=sum(one.carried for one in of_kind),
            carried_lost=sum_losses(one.carried_lost for one in of_kind),
            unknown_since_unix_ns=max([one.unknown_since_unix_ns for one in of_kind], default=0),
            kinds=kinds,
        )

    def add_not_offered(self, samples: Mapping[str, int]) -> ExporterAccount:
        """The account with more samples that were not offered, by kind."""
        kinds = {
            kind: self.of_kind(kind)._replace(
                not_offered=self.of_kind(kind).not_offered + samples.get(kind, 0)
            )
            for kind in dict.fromkeys([*self.kinds, *samples])
        }
        return self.of_kinds(self.name, kinds)._replace(
            unknown_since_unix_ns=self.unknown_since_unix_ns
        )

    def of_kind(self, kind: str) -> ExporterAccount:
        """The account of one kind; zeros if the exporter had no such samples."""
        return self.kinds.get(kind, ExporterAccount(self.name))

    def as_dict(self) -> dict[str, object]:
        """The account as plain values for JSON, without its kinds."""
        return {
            "exported": self.exported,
            "lost": _plain(self.lost),
            "pending": self.pending,
            "not_offered": self.not_offered,
            "carried": self.carried,
            "unknown_since_unix_ns": self.unknown_since_unix_ns,
        }


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
        kinds: the account of each kind of samples, by its name; empty in the account of a kind.
        truncated: received samples whose user stack is incomplete, by reason.
    """

    taken: int = 0
    received: int = 0
    lost: Losses = _NONE
    waiting: int = 0
    exporters: tuple[ExporterAccount, ...] = ()
    earlier: int = 0
    missed: int = 0
    kinds: Mapping[str, Account] = MappingProxyType({})
    truncated: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of_kinds(
        cls,
        sampled: Mapping[str, Account],
        exporters: tuple[ExporterAccount, ...],
        earlier: Mapping[str, int] = MappingProxyType({}),
    ) -> Account:
        """The account of all kinds, from what was sampled and what became of it.

        Args:
            sampled: the account of each kind up to the closed windows; its exporters are replaced.
            exporters: with their kinds, which may be others than are sampled at present.
            earlier: samples of profilers that ran before, by kind.
        """
        names = dict.fromkeys([*sampled, *earlier])
        for exporter in exporters:
            names.update(dict.fromkeys(exporter.kinds))
        kinds = {
            name: sampled.get(name, cls())._replace(
                exporters=tuple(exporter.of_kind(name) for exporter in exporters),
                earlier=earlier.get(name, 0),
            )
            for name in names
        }
        of_kind = kinds.values()
        return cls(
            taken=sum(one.taken for one in of_kind),
            received=sum(one.received for one in of_kind),
            lost=sum_losses(one.lost for one in of_kind),
            waiting=sum(one.waiting for one in of_kind),
            exporters=exporters,
            earlier=sum(one.earlier for one in of_kind),
            missed=sum(one.missed for one in of_kind),
            kinds=kinds,
            truncated=sum((Counter(one.truncated) for one in of_kind), Counter()),
        )

    def gaps(self) -> list[str]:
        """Sentences about samples whose whereabouts are unknown; empty when all is accounted.

        Each kind is checked on its own: what one kind lacks, another cannot make up for.
        """
        if self.kinds:
            return [f"{kind}: {gap}" for kind, one in self.kinds.items() for gap in one.gaps()]
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
        values = {
            "missed": self.missed,
            "taken": self.taken,
            "received": self.received,
            "lost": _plain(self.lost),
            "waiting": self.waiting,
            "earlier": self.earlier,
            "truncated": dict(self.truncated),
            "exporters": {exporter.name: exporter.as_dict() for exporter in self.exporters},
            "gaps": self.gaps(),
        }
        kinds = {kind: one.as_dict() for kind, one in self.kinds.items()}
        return {**values, "kinds": kinds} if kinds else values


def _plain(losses: Losses) -> dict[str, int]:
    return {cause.value: count for cause, count in losses.items()}
