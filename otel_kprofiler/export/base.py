"""What every exporter is: OpenTelemetry's names and life cycle, over bytes and counts.

An exporter knows nothing of stacks. It is given a :class:`~otel_kprofiler.model.Batch` in the
form and below the size limit that it states, and answers how many of the batch's samples
arrived and why the others did not.
"""

from __future__ import annotations

import abc
import enum
from typing import NamedTuple

from otel_kprofiler.model import AttributeForm, Batch, Encoding, Form, LossCause, Losses


class ExportOutcome(enum.Enum):
    """What became of one call of :meth:`ProfileExporter.export`."""

    SUCCESS = 0
    FAILURE = 1


class ExportResult(NamedTuple):
    """Outcome of one export; ``exported`` plus all of ``lost`` is the batch's sample count.

    Attributes:
        outcome: SUCCESS also when the receiver took a part of the batch only.
        exported: samples that are known to have arrived, never more.
        lost: the other samples of the batch, by cause.
        message: for people; empty if there is nothing to say.
        error_type: short, of few distinct values (``UNAVAILABLE``, ``503``); empty on success.
    """

    outcome: ExportOutcome
    exported: int
    lost: Losses
    message: str = ""
    error_type: str = ""

    @classmethod
    def success(cls, batch: Batch) -> ExportResult:
        """The whole batch arrived."""
        return cls(ExportOutcome.SUCCESS, batch.sample_count, {})

    @classmethod
    def failure(
        cls, batch: Batch, cause: LossCause, message: str, error_type: str = ""
    ) -> ExportResult:
        """Nothing of the batch arrived; ``error_type`` defaults to the cause's name."""
        lost = {cause: batch.sample_count}
        return cls(ExportOutcome.FAILURE, 0, lost, message, error_type or cause.value)


class ProfileExporter(abc.ABC):
    """Sends batches to one receiver.

    ``export`` is called by one thread at a time; the other methods may be called by any
    thread, also while an ``export`` is under way.

    Attributes:
        name: component id for logs and metrics, such as ``otlp_grpc/backup``.
        form: how batches for this exporter must be encoded.
        max_bytes: largest payload that this exporter sends, before compression; None if any.
        attributes: how resource and scope attributes are written in batches for this exporter.
    """

    name: str
    form: Form
    max_bytes: int | None
    attributes: AttributeForm = AttributeForm.INLINE

    @property
    def encoding(self) -> Encoding:
        """How windows must be encoded for this exporter."""
        return Encoding(self.form, self.max_bytes, self.attributes)

    @abc.abstractmethod
    def export(self, batch: Batch) -> ExportResult:
        """Send a batch; blocks until it arrived or is given up, retries included.

        Failures of the receiver or of the way to it are results, not exceptions. After
        ``shutdown`` the result is a failure with the cause ``SHUTDOWN``.
        """

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait until nothing is under way; False if that takes longer than the timeout."""
        return True

    def find_trouble(self) -> str:
        """Why the receiver cannot be reached at present, in words; empty when it can be."""
        return ""

    @abc.abstractmethod
    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Release everything; idempotent.

        Ends a wait between two attempts at once; an attempt under way may take up to the
        timeout, and is then broken off.
        """
