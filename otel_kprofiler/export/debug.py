"""The debug exporter, which prints a summary of each batch."""

import datetime as dt
import enum
import sys
from typing import TextIO

from otel_kprofiler.errors import describe_error
from otel_kprofiler.export.base import ExportResult, ProfileExporter
from otel_kprofiler.model import Batch, Form, LossCause


class Verbosity(enum.Enum):
    """The level of detail that the debug exporter prints."""

    BASIC = "basic"
    """Prints the numbers of profiles, samples and bytes."""
    NORMAL = "normal"
    """Also prints the batch's time interval, and the bytes per sample."""
    DETAILED = "detailed"
    """Also prints the number of samples in each profile, by kind."""


class DebugExporter(ProfileExporter):
    """Prints a summary of each batch on one line, by default to standard output."""

    form = Form.PROTOBUF
    max_bytes = None

    def __init__(
        self,
        *,
        verbosity: Verbosity = Verbosity.BASIC,
        out: TextIO | None = None,
        name: str = "debug",
    ) -> None:
        self.name = name
        self._verbosity = verbosity
        self._out = out
        self._closed = False

    def export(self, batch: Batch) -> ExportResult:
        """Print the batch's summary. Failures have the cause ``WRITE_FAILED``."""
        if self._closed:
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "already shut down")
        profiles, total = batch.profiles, batch.sample_count
        parts = [f"profiles: {len(profiles)}, samples: {total}, bytes: {len(batch.payload)}"]
        if self._verbosity is not Verbosity.BASIC:
            seconds = (batch.end_unix_ns - batch.start_unix_ns) / 1e9
            start = dt.datetime.fromtimestamp(batch.start_unix_ns / 1e9, dt.UTC)
            per_sample = len(batch.payload) / max(total, 1)
            parts.append(f"start: {start.isoformat(timespec='milliseconds')}")
            parts.append(f"seconds: {seconds:.3f}, bytes per sample: {per_sample:.1f}")
        if self._verbosity is Verbosity.DETAILED:
            for kind in batch.sample_counts:
                counts = [str(profile.samples) for profile in profiles if profile.kind == kind]
                parts.append(f"{kind} samples by profile: {' '.join(counts)}")
        try:
            print(f"{self.name}: {', '.join(parts)}", file=self._out or sys.stdout, flush=True)
        except (OSError, ValueError) as error:
            return ExportResult.failure(batch, LossCause.WRITE_FAILED, describe_error(error))
        return ExportResult.success(batch)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Stop printing."""
        self._closed = True
