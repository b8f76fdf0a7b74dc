"""Connects ``record --export`` and ``send`` to receivers, and checks that they accept profiles."""

from typing import Final

from otel_kprofiler.errors import ExportError, KProfilerError
from otel_kprofiler.export import (
    Answer,
    OtlpSender,
    Verdict,
    exporter_from_environment,
    speaks_no_tls,
)
from otel_kprofiler.otlp import encode_empty
from otel_kprofiler.redact import redact_address

_PROBE_S: Final = 5.0
_OTHER_SCHEMES: Final = {"grpc": "http", "grpcs": "https", "http": "grpc", "https": "grpcs"}
_HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS=authorization=…"
_DENIED: Final = frozenset({"401", "403", "407", "UNAUTHENTICATED", "PERMISSION_DENIED"})
_NO_PROFILES: Final = (
    "correct the address, or enable profiles in the receiver: an OpenTelemetry Collector needs "
    "an otlp receiver in a profiles pipeline and --feature-gates=service.profilesSupport"
)
_LATER: Final = "try again later; or `record -o FILE.otlp` now and `send FILE.otlp URL` later"
_CERTIFICATE: Final = (
    "set OTEL_EXPORTER_OTLP_CERTIFICATE to the certificate to trust; without TLS, use grpc:// or "
    "http://"
)
_FIXES: Final = {
    **dict.fromkeys(("404", "405", "UNIMPLEMENTED"), _NO_PROFILES),
    **dict.fromkeys(("429", "502", "503", "504", "RESOURCE_EXHAUSTED"), _LATER),
    "SSLError": _CERTIFICATE,
}
"""Suggested fixes, by response status, except for statuses that indicate denied access."""
_START: Final = (
    "start the receiver, or correct the address; OTLP usually uses port 4317 for grpc:// and "
    "4318 for http://"
)


def open_receiver(address: str) -> OtlpSender:
    """Opens an exporter for a receiver, after checking that the receiver accepts profiles.

    :func:`otel_kprofiler.export.exporter_from_environment` describes the format of the address.
    Raises ``ConfigError`` if the address or an environment variable is invalid, and ``ExportError``
    if the receiver cannot be reached or does not accept profiles.
    """
    answer = _ask(address)
    if not _is_taken(answer):
        shown = redact_address(address)
        raise ExportError(
            f"cannot send profiles to {shown}: {answer.reason}", hint=_find_fix(address, answer)
        )
    return exporter_from_environment(address)


def _ask(address: str) -> Answer:
    """Sends a request without samples over a new connection, and returns the response."""
    exporter = exporter_from_environment(address)
    try:
        return exporter.send_once(encode_empty(exporter.form), _PROBE_S)
    finally:
        exporter.shutdown(0)


def _is_taken(answer: Answer) -> bool:
    # Some receivers reject requests without samples.
    return answer.verdict is Verdict.ACCEPTED or answer.status == "INVALID_ARGUMENT"


def _find_fix(address: str, answer: Answer) -> str:
    if answer.status in _DENIED:
        return f"set the credentials that the receiver requires in the environment: {_HEADERS}"
    scheme, _, rest = address.partition("://")
    other = f"{_OTHER_SCHEMES[scheme]}://{rest}"
    try:
        speaks_other = _is_taken(_ask(other))
    except KProfilerError:  # the server does not speak this protocol
        speaks_other = False
    if speaks_other:
        return f"the receiver speaks the other OTLP protocol: use {redact_address(other)}"
    if speaks_no_tls(answer.message):
        return f"the receiver does not use TLS: use {scheme.removesuffix('s')}://{redact_address(rest)}"
    return _FIXES.get(answer.status, _START)
