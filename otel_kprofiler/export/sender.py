"""The base class of exporters that send to OTLP receivers."""

import abc
import contextlib
import logging
import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from otel_kprofiler.export.base import ExportResult, Part, ProfileExporter, sum_results
from otel_kprofiler.export.client import ClientSettings, Signal
from otel_kprofiler.export.request_size import RequestSize
from otel_kprofiler.export.retry import Answer, Verdict, attempt_until_settled
from otel_kprofiler.export.tls_files import TlsFiles, find_fix
from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.model import Batch, LossCause, SampleCounts
from otel_kprofiler.redact import Secrets
from otel_kprofiler.text import describe_count
from otel_kprofiler.version import __version__

MAX_RESPONSE_BYTES = 4 * 1024 * 1024
"""Maximum size of a response, in bytes (OTLP specification, "Response size limits")."""
_NO_TLS = (
    "the receiver does not use TLS on this port: set tls: {insecure: true}"
    " (OTEL_EXPORTER_OTLP_INSECURE=true), or write its address with http://"
)

_ERRNO = re.compile(r"\[Errno -?\d+\] ")
"""Matches the prefix that Python adds to system error messages."""

_log = logging.getLogger(__name__)


def user_agent() -> str:
    """Returns the user agent: product, then exporter, as the OTLP specification requires."""
    from opentelemetry.proto.version import __version__ as otlp_version  # noqa: PLC0415

    return f"otel-kprofiler/{__version__} OTel-OTLP-Exporter-Python/{otlp_version}"


class OtlpSender(ProfileExporter, abc.ABC):
    """Base class for exporters to OTLP receivers, with retries, loss counting and shutdown.

    **Partial success.** A receiver reports how many *profiles* it rejected, but not which. For n
    rejected profiles, the samples in the n largest profiles of each kind are counted as
    ``rejected``. ``exported`` is therefore a lower bound for each kind. The count is exact if no or
    every profile is rejected, or if the batch has one profile. Rejected profiles are never resent.

    **Size.** A batch rejected for its size is divided until the receiver accepts the parts.
    ``max_bytes`` is lowered to the size of the accepted parts, and later batches are divided to fit
    this limit before sending. Once a minute, a larger request is tried. A single sample rejected
    for its size is counted as ``too_large``. After two consecutive batches without an accepted
    sample, batches are sent undivided for a minute.

    Args:
        endpoint: the receiver's address without credentials, for log messages.
        secrets: strings that are redacted in all messages from receivers and libraries.
    """

    def __init__(
        self,
        name: str,
        settings: ClientSettings,
        *,
        signal: Signal,
        endpoint: str,
        secrets: Secrets,
    ) -> None:
        self.name = name
        self._signal = signal
        self.endpoint = endpoint
        self._secrets = secrets
        self.form = settings.form
        self.max_bytes = settings.max_bytes
        self._limit = settings.max_bytes
        self._size = RequestSize(settings.max_bytes)
        self._logged_bytes: int | None = None  # limit reported by the last warning
        self.attributes = settings.attributes
        self.unnamed_frames = settings.unnamed_frames
        self._timeout_s = settings.timeout_s
        self._retry = settings.retry
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._busy = ProcessLock()
        self._closed = False
        self._warned: set[str] = set()
        self._noted: set[str] = set()  # keys of messages that are logged only once
        self._failures = 0
        self._failing_since = 0.0
        self._outage = ""
        self._tls_files: TlsFiles | None = None  # set by transports that use TLS

    @property
    def destination(self) -> str:
        """Returns the receiver's address, without credentials."""
        return self.endpoint

    @abc.abstractmethod
    def _prepare(self, batch: Batch) -> bytes:
        """Build the request body for a batch. Retries send the same body."""

    @abc.abstractmethod
    def _attempt(self, body: bytes, timeout_s: float) -> Answer:
        """Send a request once. Receiver and network failures are returned, not raised."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Abort a running attempt and release the transport; called once."""

    def export(self, batch: Batch) -> ExportResult:
        """Send a batch, retrying on failure; see :class:`OtlpSender` for how losses are counted."""
        return sum_results(self.export_parts(batch))

    def export_parts(self, batch: Batch) -> Sequence[Part]:
        """Send a batch, splitting it if the receiver accepts only smaller requests."""
        with self._busy, _instrumentation_suppressed():
            return self._send_parts(batch)

    def _send_parts(self, batch: Batch) -> list[Part]:
        pending, parts = deque([batch]), []
        learned, limit = self._size, self._limit
        learned.begin_batch()
        aim = limit if learned.takes_nothing else learned.aim
        message, is_refused = "it exceeds max_message_bytes", False
        # Smallest size known to exceed the receiver's limit or the configured limit.
        refused = math.inf if limit is None else limit + 1
        while pending:
            part = pending.popleft()
            size = len(part.payload)
            if aim is not None and size > aim and (smaller := _divide(part, aim)):
                pending.extendleft(reversed(smaller))
                continue
            if size >= refused:
                text = f"a single sample takes {size} bytes: {message}"
                self._note_once("too large", f"{text}; dropping")
                parts.append(Part(part, ExportResult.failure(part, LossCause.TOO_LARGE, text)))
                continue
            answer, cause = self._send(part)
            if cause is LossCause.TOO_LARGE:
                is_refused, message = True, f"{answer.status}: {answer.message}"
                if learned.takes_nothing:
                    parts.append(Part(part, ExportResult.failure(part, cause, message)))
                    continue
                stated = answer.max_bytes if answer.max_bytes < size else 0
                refused = min(refused, stated + 1 if stated else size)
                aim = learned.refuse(size, stated)
                self._log_limit(size, message)
                pending.appendleft(part)
                continue
            if cause is None:
                learned.accept(size)
                parts.append(Part(part, _accepted(part, answer)))
                continue
            failing = [part]
            if cause is not LossCause.REJECTED:  # the remaining parts would also fail
                failing += pending
                pending.clear()
            parts += [
                Part(left, ExportResult.failure(left, cause, answer.message, answer.status))
                for left in failing
            ]
        refused_parts = [part.result.lost.keys() == {LossCause.TOO_LARGE} for part in parts]
        if is_refused and len(parts) > 1 and all(refused_parts):  # even small parts were rejected
            learned.refuse_all()
        self.max_bytes = learned.encoded
        return parts

    def _send(self, batch: Batch) -> tuple[Answer, LossCause | None]:
        if self._stop.is_set():
            answer = Answer(Verdict.RETRY, LossCause.SHUTDOWN.value, "already shut down")
            return answer, LossCause.SHUTDOWN
        body = self._prepare(batch)
        answer, cause = attempt_until_settled(
            lambda timeout_s: self._note(self._attempt_safely(body, timeout_s)),
            policy=self._retry,
            timeout_s=self._timeout_s,
            stop=self._stop,
            hurry=self._hurry,
        )
        if cause is LossCause.RETRIES_EXHAUSTED:
            self._warn_once(
                "given up", f"{answer.status} until the time limit for retries; giving up"
            )
        return answer, cause

    def _log_limit(self, size: int, why: str) -> None:
        """Log the size limit for later requests, unless the last warning already reported it."""
        learned = self._size.encoded
        if learned != self._logged_bytes:
            self._logged_bytes = learned
            _log.warning(
                "%s (%s): the receiver rejects requests of %d bytes (%s); splitting them, and"
                " limiting later requests to %d bytes",
                self.name, self.endpoint, size, why, learned,
                extra={"subject": f"{self.name} size"},
            )  # fmt: skip

    def send_once(self, request: bytes, timeout_s: float) -> Answer:
        """Send a request once, without counting or logging it.

        ``request`` is a request without samples, serialized in this exporter's ``form``. The
        exporter's timeout per attempt also applies.
        """
        with self._busy, _instrumentation_suppressed():
            body = self._prepare(Batch(request, self.form, (), 0, 0))
            return self._clean(self._attempt_safely(body, min(timeout_s, self._timeout_s)))

    def _attempt_safely(self, body: bytes, timeout_s: float) -> Answer:
        try:
            return self._attempt(body, timeout_s)
        except Exception as error:
            # The traceback will be logged, and library messages may contain URLs with credentials.
            self._secrets.redact_error(error)
            raise

    def _note(self, answer: Answer) -> Answer:
        """Sanitize a response's message, and log it unless a similar message has been logged."""
        answer = self._clean(answer)
        answer = answer._replace(message=self._advise(answer))
        message = answer.message
        self._track_outage(answer)
        if answer.unreadable:
            text = (
                f"accepts data, but its response is unreadable ({answer.unreadable}), so rejected"
                " samples may go unnoticed"
            )
            self._note_once("unreadable", text)
        if answer.verdict is Verdict.TOO_LARGE:
            return answer
        if answer.verdict is not Verdict.ACCEPTED:
            then = "retrying" if answer.verdict is Verdict.RETRY else "dropping"
            self._warn_once(answer.status, f"{answer.reason}; {then}")
        elif message or answer.rejected_profiles > 0:
            self._warn_once("partial", f"rejected {_profiles(answer)}: {message}")
        elif self._warned:
            self._warned.clear()
            _log.info("%s (%s): the receiver is accepting data again", self.name, self.endpoint)
        return answer

    def _advise(self, answer: Answer) -> str:
        """Appends a fix, or the problem with the client's TLS files, to the message if possible."""
        message = advise_plain_text(answer.message)
        is_explained = message != answer.message
        if is_explained or self._tls_files is None or answer.verdict is not Verdict.RETRY:
            return message
        if problem := self._tls_files.find_problem():
            return f"{problem} ({message})"
        fix = find_fix(message)
        return f"{message}: {fix}" if fix else message

    def _clean(self, answer: Answer) -> Answer:
        message = answer.message
        if answer.is_unimplemented:
            missing = self._signal.missing
            message = f"{missing} ({message})" if message else missing
        message, problem = map(self._clean_text, (message, answer.unreadable))
        return answer._replace(message=message, unreadable=problem)

    def _clean_text(self, text: str) -> str:
        text = self._secrets.redact(_ERRNO.sub("", text))[:500]
        return "".join(char if char.isprintable() else " " for char in text)

    def _note_once(self, key: str, text: str) -> None:
        if key not in self._noted:
            self._noted.add(key)
            self._warn(key, text)

    def _track_outage(self, answer: Answer) -> None:
        """A non-retryable response proves that the receiver is reachable."""
        if answer.verdict is not Verdict.RETRY:
            self._failures, self._outage = 0, ""
            return
        now = time.monotonic()
        self._failures += 1
        if self._failures == 1:
            self._failing_since = now
        self._outage = (
            f"{answer.message} ({answer.status}, {describe_count(self._failures, 'attempt')} in "
            f"{now - self._failing_since:.0f} s)"
        ).lstrip()

    def find_outage(self) -> str:
        """Describes the outage (last retryable failure, duration); empty if there is no outage."""
        return self._outage

    def _warn_once(self, key: str, text: str) -> None:
        """Log a warning once per key until data is accepted again, except during shutdown."""
        if key not in self._warned and not self._stop.is_set():
            self._warned.add(key)
            self._warn(key, text)

    def _warn(self, key: str, text: str) -> None:
        subject = {"subject": f"{self.name} {key}"}
        _log.warning("%s (%s): %s (logged once)", self.name, self.endpoint, text, extra=subject)

    def hurry(self) -> None:
        """End a wait before a retry, unless the receiver set the wait. Thread-safe."""
        self._hurry.set()

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Wait for a running export. Return False on timeout."""
        if not self._busy.acquire(max(timeout_millis, 0) / 1000):
            return False
        self._busy.release()
        return True

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """End retries immediately and abort a running attempt after the timeout; idempotent."""
        self._stop.set()
        self._hurry.set()
        self.force_flush(timeout_millis)
        if not self._closed:
            self._closed = True
            self._close()


def speaks_no_tls(message: str) -> bool:
    """Returns whether a TLS handshake failed because the peer responded in plain text.

    OpenSSL mistakes the start of the response for a TLS record with a wrong version.
    """
    return "wrong_version_number" in message.lower().replace(" ", "_")


def advise_plain_text(message: str) -> str:
    """Add the fix to a TLS handshake error that is caused by a receiver without TLS."""
    return f"{_NO_TLS} ({message})" if speaks_no_tls(message) else message


def _divide(batch: Batch, aim: int) -> Sequence[Batch]:
    from otel_kprofiler.otlp import divide_batch  # noqa: PLC0415 - loads protobuf

    return divide_batch(batch, aim)


def _profiles(answer: Answer) -> str:
    return describe_count(answer.rejected_profiles, "profile")


def _accepted(batch: Batch, answer: Answer) -> ExportResult:
    if answer.rejected_profiles <= 0:
        return ExportResult.success(batch, answer.message)
    rejected: SampleCounts = SampleCounts()
    for kind in batch.sample_counts:
        sizes = [profile.samples for profile in batch.profiles if profile.kind == kind]
        rejected[kind] = sum(sorted(sizes, reverse=True)[: answer.rejected_profiles])
    message = f"{_profiles(answer)} rejected: {answer.message}"
    return ExportResult.success(batch, message, rejected=rejected)


@contextlib.contextmanager
def _instrumentation_suppressed() -> Iterator[None]:
    """Keep HTTP instrumentation from creating spans for our exports.

    Does not import the OpenTelemetry API: if no other code has imported it, no spans are created.
    """
    if "opentelemetry.context" not in sys.modules:
        yield
        return
    from opentelemetry import context  # noqa: PLC0415 - waits for a concurrent import

    token = context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, True))  # noqa: SLF001
    try:
        yield
    finally:
        context.detach(token)
