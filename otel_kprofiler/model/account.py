"""Counts the samples that were taken, exported and lost (by cause)."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class LossCause(enum.Enum):
    """Reason why a sample did not reach a receiver."""

    RING_FULL = "ring_full"
    """The ring buffer between kernel and user space was full."""
    QUEUE_FULL = "queue_full"
    """The sending queue was full and the oldest batch was dropped."""
    SPOOL_FULL = "spool_full"
    """The spool on disk was full, and its oldest segment was dropped."""
    SPOOL_AGED = "spool_aged"
    """The sample was in the spool for longer than ``max_age``."""
    SPOOL_DAMAGED = "spool_damaged"
    """The sample's data in the spool is unreadable."""
    REJECTED = "rejected"
    """The receiver rejected the data with a non-retryable error."""
    RETRIES_EXHAUSTED = "retries_exhausted"
    """The receiver remained unreachable until retries were exhausted."""
    TOO_LARGE = "too_large"
    """A single sample exceeds the exporter's size limit."""
    WRITE_FAILED = "write_failed"
    """An output file could not be written, for example because the disk is full."""
    NOT_OFFERED = "not_offered"
    """The window closed while the exporter was not configured, for example before a reload."""
    SELF_PROFILED = "self_profiled"
    """The sample's process profiles itself, and the configuration excludes its samples."""
    SHUTDOWN = "shutdown"
    """The shutdown timeout expired before delivery."""
    INTERNAL = "internal"
    """A defect in the profiler, logged with its traceback."""


Losses = Mapping[LossCause, int]
"""Number of lost samples by cause; causes without losses are absent."""

SampleCounts = Counter[str]


def sum_losses(losses: Iterable[Losses]) -> dict[LossCause, int]:
    """Returns the sum of loss counts, by cause."""
    total: Counter[LossCause] = Counter()
    for counts in losses:
        total.update(counts)
    return dict(total)


_NONE: Final[Losses] = MappingProxyType({})


class StreamTotals(NamedTuple):
    """Cumulative counts from the start of a sampler to the end of a window.

    Attributes:
        stream_id: random id, generated each time a sampler starts.
        samples: samples in all windows so far, including this window.
        taken: samples that the BPF program took, including samples lost in the kernel or not yet in
            a closed window.
        lost: number of samples lost so far, by cause. In a window encoded for a receiver, samples
            lost in transit to that receiver are included.
        earlier_samples: number of samples from earlier streams that were in this receiver's spool.
        earlier_lost: how many of the ``earlier_samples`` have been lost so far, by cause.
        unknown_since_unix_ns: if the previous run was killed, the Unix time since which its number
            of samples is unknown; otherwise 0.
        missed: samples that the kernel skipped, for example on a CPU that was running another BPF
            program; not in ``taken``.
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
    """Outcomes of the samples passed to an exporter.

    Attributes:
        name: the exporter's id in the configuration, such as ``otlp_grpc``.
        pending: samples in flight, or in the spool for the next run.
        not_offered: samples from windows closed while the exporter was not configured.
        carried: samples from earlier runs that were in the spool at startup.
        carried_lost: the number of samples in ``lost`` that were recorded by earlier runs.
        unknown_since_unix_ns: as in :class:`StreamTotals`.
        kinds: outcomes by sample kind; empty if this object is for a single kind.
        earlier_samples: samples of a single kind that earlier runs left in the spool.
        earlier_lost: number of ``earlier_samples`` lost so far, in any run.
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
        """Returns an ``ExporterAccount`` with the counts summed over all kinds."""
        of_kind = kinds.values()
        return cls(
            name=name,
            exported=sum(account.exported for account in of_kind),
            lost=sum_losses(account.lost for account in of_kind),
            pending=sum(account.pending for account in of_kind),
            not_offered=sum(account.not_offered for account in of_kind),
            carried=sum(account.carried for account in of_kind),
            carried_lost=sum_losses(account.carried_lost for account in of_kind),
            unknown_since_unix_ns=max(
                [account.unknown_since_unix_ns for account in of_kind], default=0
            ),
            kinds=kinds,
        )

    def add_not_offered(self, samples: Mapping[str, int]) -> ExporterAccount:
        """Returns the account with ``samples``, counted by kind, added to ``not_offered``."""
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
        """Returns a kind's counts, which are 0 if the exporter had no samples of the kind."""
        return self.kinds.get(kind, ExporterAccount(self.name))

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as JSON-compatible values, without the counts of each kind."""
        return {
            "exported": self.exported,
            "lost": _plain(self.lost),
            "pending": self.pending,
            "not_offered": self.not_offered,
            "carried": self.carried,
            "unknown_since_unix_ns": self.unknown_since_unix_ns,
        }


class Account(NamedTuple):
    """Outcomes of all samples that the BPF program took. No count is derived by subtraction.

    Attributes:
        taken: samples counted by the BPF program.
        received: samples read from the ring.
        lost: samples lost between kernel and user space, by cause.
        waiting: samples received, but not yet in a closed window.
        earlier: samples from earlier runs, included in the exporters' counts.
        missed: samples that the kernel skipped, not included in ``taken``; see ``SamplerCounts``.
        kinds: outcomes by sample kind; empty if this object is for a single kind.
        truncated: received samples with an incomplete user stack, by reason.
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
        """Combines the sampler's and the exporters' counts into one account of all sample kinds.

        ``sampled`` contains the counts of each kind up to the last closed window. The accounts in
        ``exporters`` are included in the result, and may contain additional kinds. ``earlier``
        contains the number of samples from earlier runs, by kind.
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
            taken=sum(account.taken for account in of_kind),
            received=sum(account.received for account in of_kind),
            lost=sum_losses(account.lost for account in of_kind),
            waiting=sum(account.waiting for account in of_kind),
            exporters=exporters,
            earlier=sum(account.earlier for account in of_kind),
            missed=sum(account.missed for account in of_kind),
            kinds=kinds,
            truncated=sum((Counter(account.truncated) for account in of_kind), Counter()),
        )

    def gaps(self) -> list[str]:
        """Returns a sentence for each discrepancy; empty if all samples are accounted for.

        Kinds are checked separately, so that a surplus in one cannot hide a deficit in another.
        """
        if self.kinds:
            return [
                f"{kind}: {gap}" for kind, account in self.kinds.items() for gap in account.gaps()
            ]
        sentences = []
        if self.taken != self.received + sum(self.lost.values()):
            sentences.append(
                f"the kernel took {self.taken} samples, but {self.received} were received and "
                f"{sum(self.lost.values())} were counted as lost"
            )
        for exporter in self.exporters:
            seen = exporter.exported + sum(exporter.lost.values()) + exporter.pending
            seen += exporter.not_offered
            carried = exporter.carried + self.earlier
            if seen + self.waiting != self.received + carried:
                sentences.append(
                    f"{self.received} samples were received and {carried} carried over,"
                    f" but exporter {exporter.name} accounts for {seen} and {self.waiting} are in"
                    " an open window"
                )
        return sentences

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as JSON-serializable values."""
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
        kinds = {kind: account.as_dict() for kind, account in self.kinds.items()}
        return {**values, "kinds": kinds} if kinds else values


def _plain(losses: Losses) -> dict[str, int]:
    return {cause.value: count for cause, count in losses.items()}
