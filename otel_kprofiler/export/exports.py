"""Exports batches one after another, and accounts for every sample."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from otel_kprofiler.export.base import ExportResult, Part, ProfileExporter, sum_results
from otel_kprofiler.model import Batch, LossCause, SampleCounts

_TEMPORARY: Final = frozenset({LossCause.RETRIES_EXHAUSTED, LossCause.SHUTDOWN})

_log = logging.getLogger(__name__)

OnExport = Callable[[ExportResult, float], None]
"""Function called with the result of an export and its duration in seconds, including retries."""


def is_temporary(result: ExportResult) -> bool:
    """Returns whether an export failed only temporarily, so that it may be retried."""
    return bool(result.lost) and _TEMPORARY.issuperset(result.lost)


def export_all(
    exporter: ProfileExporter, batches: Sequence[Batch], on_export: OnExport | None
) -> list[Part]:
    """Export batches in order. After a temporary failure, do not send the remaining batches.

    ``on_export`` is called after each export. Its exceptions are logged and ignored.
    """
    parts: list[Part] = []
    for batch in batches:
        last = parts[-1].result if parts else None
        if last and is_temporary(last):
            (cause, *_) = last.lost
            result = ExportResult.failure(batch, cause, last.message, last.error_type)
            parts.append(Part(batch, result))
        else:
            parts += _export(exporter, batch, on_export)
    return parts


def _export(exporter: ProfileExporter, batch: Batch, on_export: OnExport | None) -> Sequence[Part]:
    started = time.monotonic()
    try:
        parts = exporter.export_parts(batch)
        counted = sum((part.result.counts() for part in parts), SampleCounts())
        if counted != (there := batch.sample_counts):
            text = f"the result accounts for {dict(counted)} of {dict(there)} samples"
            raise ValueError(text)  # noqa: TRY301
    except Exception as error:  # noqa: BLE001 -- counted and logged
        _log.exception("%s: the exporter raised an exception", exporter.name)
        message = f"{type(error).__name__}: {error}"
        parts = [Part(batch, ExportResult.failure(batch, LossCause.INTERNAL, message))]
    if on_export:
        try:
            on_export(sum_results(parts), time.monotonic() - started)
        except Exception:  # noqa: BLE001 -- logged; the account does not depend on it
            _log.exception("%s: the on_export callback failed", exporter.name)
    return parts
