"""Defines the exporter interface, modeled on OpenTelemetry's exporters."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from otel_kprofiler.model import (
    AttributeForm,
    Batch,
    Encoding,
    Form,
    LossCause,
    Losses,
    SampleCounts,
    UnnamedFrames,
    sum_losses,
)


class ExportOutcome(enum.Enum):
    """Outcome of one call to :meth:`ProfileExporter.export`."""

    SUCCESS = 0
    FAILURE = 1


class KindResult(NamedTuple):
    """Outcome of an export for the samples of one kind; ``exported`` is a lower bound."""

    exported: int
    lost: Losses


class ExportResult(NamedTuple):
    """Outcome of an export, which accounts for each sample in the batch.

    Attributes:
        outcome: SUCCESS even if the receiver accepted only part of the batch.
        kinds: outcome for the samples of each kind, by the kind's name.
        message: text from the receiver, or a description of the failure; may be empty.
        error_type: the ``error.type`` metric attribute, a short value of low cardinality
            (``UNAVAILABLE``, ``503``); empty on success.
    """

    outcome: ExportOutcome
    kinds: Mapping[str, KindResult]
    message: str = ""
    error_type: str = ""

    @property
    def exported(self) -> int:
        """Returns a lower bound on the number of delivered samples of all kinds."""
        return sum(kind.exported for kind in self.kinds.values())

    @property
    def lost(self) -> Losses:
        """Returns the number of lost samples of all kinds, by cause."""
        return sum_losses(kind.lost for kind in self.kinds.values())

    def counts(self) -> SampleCounts:
        """Returns the number of samples that the result accounts for, by kind."""
        return SampleCounts(
            {name: kind.exported + sum(kind.lost.values()) for name, kind in self.kinds.items()}
        )

    @classmethod
    def success(
        cls, batch: Batch, message: str = "", *, rejected: Mapping[str, int] | None = None
    ) -> ExportResult:
        """Returns the result for a delivered batch; ``rejected`` counts samples by kind."""
        kinds = {}
        for kind, samples in batch.sample_counts.items():
            refused = rejected.get(kind, 0) if rejected else 0
            lost = {LossCause.REJECTED: refused} if refused else {}
            kinds[kind] = KindResult(samples - refused, lost)
        return cls(ExportOutcome.SUCCESS, kinds, message)

    @classmethod
    def failure(
        cls, batch: Batch, cause: LossCause, message: str, error_type: str = ""
    ) -> ExportResult:
        """Returns the result for a lost batch; ``error_type`` defaults to the cause's name."""
        kinds = {kind: KindResult(0, {cause: count}) for kind, count in batch.sample_counts.items()}
        return cls(ExportOutcome.FAILURE, kinds, message, error_type or cause.value)


class Part(NamedTuple):
    """A batch or part of a batch that was sent as one request, and the outcome of the request."""

    batch: Batch
    result: ExportResult


def sum_results(parts: Sequence[Part]) -> ExportResult:
    """Combines the results for a batch's parts; requires at least one part.

    The outcome is success if any part succeeded. The message and the error type are those of the
    first part that lost samples.
    """
    results = [part.result for part in parts]
    if len(results) == 1:
        return results[0]
    kinds: dict[str, KindResult] = {}
    for name, result_of_kind in chain.from_iterable(result.kinds.items() for result in results):
        merged = kinds.get(name, KindResult(0, {}))
        kinds[name] = KindResult(
            merged.exported + result_of_kind.exported,
            sum_losses([merged.lost, result_of_kind.lost]),
        )
    failed = next((result for result in results if result.lost), results[0])
    if all(result.outcome is ExportOutcome.FAILURE for result in results):
        return failed._replace(kinds=kinds)
    return ExportResult(ExportOutcome.SUCCESS, kinds, failed.message)


def is_wholly_lost(result: ExportResult) -> bool:
    """Returns whether it is certain that no sample arrived.

    Returns False if a batch with several sample kinds was partially accepted, because the response
    does not state the kinds of the rejected samples.
    """
    is_exact = result.outcome is ExportOutcome.FAILURE or len(result.kinds) == 1
    return is_exact and bool(result.lost) and not result.exported


class ProfileExporter(abc.ABC):
    """Sends batches to one receiver.

    Only one thread at a time may call ``export``. All methods except ``export`` are thread-safe,
    even during an ``export``.

    Attributes:
        name: component id for logs and metrics, such as ``otlp_grpc/backup``.
        form: whether batches for this exporter must be protobuf or JSON.
        max_bytes: maximum size of an uncompressed payload in bytes; None for no limit. The exporter
            lowers this limit when the receiver rejects smaller requests as too large.
        attributes: how batches for this exporter represent resource and scope attributes.
        unnamed_frames: how batches for this exporter represent frames without a function name.
    """

    name: str
    form: Form
    max_bytes: int | None
    attributes: AttributeForm = AttributeForm.INLINE
    unnamed_frames: UnnamedFrames = UnnamedFrames.ADDRESSES

    @property
    def destination(self) -> str:
        """Returns the receiver's address or path for display, without secrets; may be empty."""
        return ""

    @property
    def encoding(self) -> Encoding:
        """Returns the encoding of windows for this exporter."""
        return Encoding(self.form, self.max_bytes, self.attributes, self.unnamed_frames)

    @abc.abstractmethod
    def export(self, batch: Batch) -> ExportResult:
        """Send a batch, and return when it has arrived or all retries have failed.

        Receiver and network failures are returned, not raised. After ``shutdown``, the result is a
        failure with the cause ``SHUTDOWN``.
        """

    def export_parts(self, batch: Batch) -> Sequence[Part]:
        """Export a batch, and split it if the receiver requires smaller requests."""
        return [Part(batch, self.export(batch))]

    def hurry(self) -> None:
        """Make an export that waits before a retry try now, unless the receiver set the wait."""
        return

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait for a running export. Return False on timeout."""
        return True

    def find_outage(self) -> str:
        """Returns why the receiver is currently unreachable; empty if it is reachable."""
        return ""

    @abc.abstractmethod
    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Release all resources; idempotent.

        A wait between attempts ends immediately. A running attempt is aborted after the timeout.
        """
