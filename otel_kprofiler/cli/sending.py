"""``record --export``: send windows to a receiver during the recording."""

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
"""Windows as long as the agent's."""
_TIMEOUT_MILLIS: Final = 10_000


@contextmanager
def _grpc_silenced() -> Iterator[None]:
    """Silence gRPC, which reads the variable once, on import.

    The status of a call has the same information.
    """
    if "GRPC_VERBOSITY" in os.environ:
        yield
        return
    os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        yield
    finally:
        del os.environ["GRPC_VERBOSITY"]  # a recorded command must not inherit it


class Sending:
    """Sends windows to a receiver; call it with each window.

    Leaving the context waits up to ten seconds for pending exports.

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
        """The account of the exporter."""
        return self._reporter.accounts()

    def check(self) -> None:
        """Raise ``ExportError`` if samples were sent but none arrived."""
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
