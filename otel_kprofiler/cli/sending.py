"""``record --export``: send windows to a receiver during the recording."""

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.cli.unsent import UnsentFile
from otel_kprofiler.delivery import Reporter
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import ExportQueue, ExportResult, OtlpSender
from otel_kprofiler.model import ExporterAccount, LossCause, Window
from otel_kprofiler.pipeline import FIRST_WINDOW_NS, WindowSchedule
from otel_kprofiler.redact import redact_address

SCHEDULE: Final = WindowSchedule(5_000_000_000, first_ns=FIRST_WINDOW_NS)
"""The agent's default window schedule."""
_TIMEOUT_MILLIS: Final = 10_000


_CHANGES: Final = {
    LossCause.TOO_LARGE: "raise the receiver's request size limit (a Collector's otlp receiver: "
    "max_recv_msg_size_mib for gRPC, max_request_body_size for HTTP; nginx: client_max_body_size)",
    LossCause.REJECTED: "see the receiver's log for why it rejects the samples",
    LossCause.RETRIES_EXHAUSTED: "wait until the receiver responds again",
}


def find_change(causes: Iterable[LossCause]) -> str:
    """Returns what the user should change before resending the lost samples; may be empty."""
    return "; ".join(_CHANGES[cause] for cause in _CHANGES if cause in set(causes))


def describe_failure(result: ExportResult) -> str:
    """Returns the error from the receiver or from the network."""
    if result.message and result.error_type:
        return f"{result.message} ({result.error_type})"
    return result.message or result.error_type


class Sending:
    """Sends windows to a receiver; call the object with each window.

    Windows that the receiver does not accept are saved in a file named after the output's path,
    ``beside``. Exiting the context waits up to ten seconds for pending exports.
    """

    def __init__(self, address: str, exporter: OtlpSender, beside: str) -> None:
        self.address = redact_address(address)
        self._unsent = UnsentFile(beside, exporter.form)
        self._said = ""
        queue = ExportQueue(exporter, on_export=self._listen, on_lost=self._unsent.add)
        self._reporter = Reporter([queue])

    def __call__(self, window: Window) -> None:
        """Send a window; never blocks."""
        self._reporter(window)

    def _listen(self, result: ExportResult, _seconds: float) -> None:
        if result.lost:
            self._said = describe_failure(result)

    def accounts(self) -> tuple[ExporterAccount, ...]:
        """Returns the exporter's sample counts; samples saved to a file count as lost."""
        return self._reporter.accounts()

    @property
    def kept(self) -> Counter[LossCause]:
        """Returns the number of unsent samples that were saved to a file, by cause."""
        return self._unsent.kept

    def check(self) -> None:
        """Raise ``ExportError`` if samples did not arrive."""
        (account,) = self.accounts()
        lost = sum(account.lost.values())
        if not lost:
            return
        causes = ", ".join(cause.value for cause in account.lost)
        what = f"{lost:,} of {describe_count(lost + account.exported, 'sample')}"
        message = f"{what} did not reach {self.address}: {self._said or causes}"
        if self._unsent.problem:
            message += f"; they could not be kept ({self._unsent.problem})"
        raise ExportError(message, hint=self._find_fix(lost))

    def _find_fix(self, lost: int) -> str:
        kept = self.kept.total()
        if not kept:
            return "see the warning above and the receiver's log"
        which = "they are" if kept == lost else f"{kept:,} of them are"
        change = find_change(self.kept)
        return f"{which} in {self._unsent.path}: {f'{change}, then ' * bool(change)}{self._command}"

    @property
    def _command(self) -> str:
        return f"otel-kprofiler send {self._unsent.path} {self.address}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reporter.shutdown(0 if error else _TIMEOUT_MILLIS)
        self._unsent.close()
        if error and self._unsent.path:
            say(
                f"{self._unsent.path} holds the samples that the receiver has not accepted; "
                f"next: {self._command}",
                err=True,
            )
