"""``record --export``: windows go to a receiver while the recording lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from otel_kprofiler.delivery import Reporter
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import ExportQueue, exporter_from_environment
from otel_kprofiler.model import ExporterAccount, Window
from otel_kprofiler.pipeline import FIRST_WINDOW_NS, WindowSchedule
from otel_kprofiler.redact import redact_address

SCHEDULE: Final = WindowSchedule(5_000_000_000, first_ns=FIRST_WINDOW_NS)
"""Windows are as long as the agent's."""
_TIMEOUT_MILLIS: Final = 10_000


@contextmanager
def _grpc_silenced() -> Iterator[None]:
    """Keep gRPC, if it is imported meanwhile, from writing lines of its own; it reads this once.

    What it would say comes with the status of a call, too.
    """
    if "GRPC_VERBOSITY" in os.environ:
        yield
        return
    os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        yield
    finally:
        del os.environ["GRPC_VERBOSITY"]  # nothing of it for a command that is recorded


class Sending:
    """The receiver of a recording; call it with each window.

    What is on its way when the context is left has ten seconds to arrive.

    Args:
        address: as for :func:`otel_kprofiler.export.exporter_from_environment`.
    """

    def __init__(self, address: str) -> None:
        self.address = redact_address(address)
        with _grpc_silenced():
            exporter = exporter_from_environment(address)
        self._reporter = Reporter([ExportQueue(exporter)])

    def __call__(self, window: Window) -> None:
        """Send a window; never blocks."""
        self._reporter(window)

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """What has become of the samples."""
        return self._reporter.accounts()

    def check(self) -> None:
        """Raise ``ExportError`` if no sample arrived, though there were some."""
        (account,) = self.accounts()
        if account.lost and not account.exported:
            causes = ", ".join(cause.value for cause in account.lost)
            raise ExportError(
                f"no sample arrived at {self.address}: {causes}",
                hint="see the warning above; an OpenTelemetry Collector needs an otlp receiver in "
                "a profiles pipeline and --feature-gates=service.profilesSupport",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reporter.shutdown(0 if error else _TIMEOUT_MILLIS)
