"""Counts the samples that pass through a sending queue, by kind and outcome."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from otel_kprofiler.export.base import ExportResult
from otel_kprofiler.model import LossCause, Losses, sum_losses

LossesByKind = Mapping[str, Losses]
"""Losses, keyed by the name of the sample kind."""


def sum_kinds(losses: Iterable[LossesByKind]) -> dict[str, dict[LossCause, int]]:
    """Returns the total losses from several batches, by kind and cause."""
    total: defaultdict[str, list[Losses]] = defaultdict(list)
    for lost in losses:
        for kind, of_kind in lost.items():
            total[kind].append(of_kind)
    return {kind: sum_losses(of_kind) for kind, of_kind in total.items()}


class EarlierCounts(NamedTuple):
    """Number of samples of one kind that earlier runs spooled, and how many were lost, by cause."""

    samples: int
    lost: Losses


class QueueCounts(NamedTuple):
    """Totals for a sending queue since it was opened, in samples unless stated otherwise.

    Attributes:
        accepted: number of samples added to the queue.
        exported: samples that the exporter reported as delivered.
        lost: samples that were not delivered or that the queue dropped, by cause.
        queued: samples that are waiting or being exported.
        batches: number of batches that are waiting or being exported; 0 in counts of a single kind,
            because a batch may contain samples of several kinds.
        queued_bytes: total size of the batches counted by ``batches``, in bytes; 0 in counts of a
            single kind.
        carried: samples that earlier runs left in the spool.
        carried_lost: the samples in ``lost`` that are from earlier runs, by cause.
        kinds: counts by sample kind; empty in the counts of a single kind.
        earlier: counts of all samples that earlier runs spooled, by kind; None in the counts of one
            kind, or if there is no spool.
    """

    accepted: int
    exported: int
    lost: Losses
    queued: int
    batches: int = 0
    queued_bytes: int = 0
    carried: int = 0
    carried_lost: Losses = MappingProxyType({})
    kinds: Mapping[str, QueueCounts] = MappingProxyType({})
    earlier: Mapping[str, EarlierCounts] | None = None


@dataclass(slots=True)
class _Ledger:
    """Sample counts of one kind; see :class:`QueueCounts`."""

    accepted: int = 0
    exported: int = 0
    carried: int = 0
    lost: Counter[LossCause] = field(default_factory=Counter)
    carried_lost: Counter[LossCause] = field(default_factory=Counter)

    def lose(self, losses: Losses, *, carried: bool) -> None:
        self.lost.update(losses)
        if carried:
            self.carried_lost.update(losses)


class Ledgers:
    """The sample counts of a sending queue, by kind. Not thread-safe."""

    def __init__(self, *, is_spooled: bool = False) -> None:
        self._kinds: defaultdict[str, _Ledger] = defaultdict(_Ledger)
        self._earlier: dict[str, EarlierCounts] | None = {} if is_spooled else None

    def begin(self, earlier: Mapping[str, int], lost: LossesByKind) -> None:
        """Set how many samples earlier runs spooled and lost, by kind."""
        self._earlier = {
            kind: EarlierCounts(count, lost.get(kind, {})) for kind, count in earlier.items()
        }

    def accept(self, samples: Mapping[str, int]) -> None:
        """Count samples added to the queue, by kind."""
        for kind, count in samples.items():
            self._kinds[kind].accepted += count

    def carry(self, samples: Mapping[str, int]) -> None:
        """Count, by kind, the samples that earlier runs left in the spool."""
        for kind, count in samples.items():
            self._kinds[kind].carried += count

    def lose(self, samples: Mapping[str, int], cause: LossCause, *, carried: bool = False) -> None:
        """Count lost samples, by kind; ``carried`` marks samples from earlier runs."""
        for kind, count in samples.items():
            self._kinds[kind].lose({cause: count}, carried=carried)

    def conclude(self, result: ExportResult, *, carried: bool = False) -> None:
        """Count an export's outcome.

        ``carried`` states whether the batch is from an earlier run.
        """
        for kind, part in result.kinds.items():
            self._kinds[kind].exported += part.exported
            self._kinds[kind].lose(part.lost, carried=carried)

    def counts(
        self,
        queued: Mapping[str, int] = MappingProxyType({}),
        batches: int = 0,
        queued_bytes: int = 0,
    ) -> QueueCounts:
        """Returns a snapshot of the counts. The arguments describe the queue's current contents."""
        kinds = {
            kind: QueueCounts(
                accepted=kind_counts.accepted,
                exported=kind_counts.exported,
                lost=dict(+kind_counts.lost),
                queued=queued.get(kind, 0),
                carried=kind_counts.carried,
                carried_lost=dict(+kind_counts.carried_lost),
            )
            for kind, kind_counts in self._kinds.items()
        }
        of_kind = kinds.values()
        return QueueCounts(
            accepted=sum(queue.accepted for queue in of_kind),
            exported=sum(queue.exported for queue in of_kind),
            lost=sum_losses(queue.lost for queue in of_kind),
            queued=sum(queue.queued for queue in of_kind),
            batches=batches,
            queued_bytes=queued_bytes,
            carried=sum(queue.carried for queue in of_kind),
            carried_lost=sum_losses(queue.carried_lost for queue in of_kind),
            kinds=kinds,
            earlier=self._earlier,
        )
