"""Interprets the status and the body of responses from OTLP/HTTP receivers.

The status alone determines whether a request was accepted. If the body of the response to an
accepted request cannot be read, a partial success goes unnoticed.
"""

import email.utils
import json
import re
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from otel_kprofiler.export.inflate import inflate
from otel_kprofiler.export.partial_success import PartialSuccess, parse_partial_success
from otel_kprofiler.export.retry import Answer, Verdict
from otel_kprofiler.export.sender import MAX_RESPONSE_BYTES
from otel_kprofiler.model import Form

RETRYABLE: Final = frozenset({429, 502, 503, 504})
"""The HTTP statuses that the OTLP specification calls retryable."""
CONTENT_TYPES: Final = {Form.PROTOBUF: "application/x-protobuf", Form.JSON: "application/json"}
_FORMS: Final = {
    "application/x-protobuf": Form.PROTOBUF,
    "application/protobuf": Form.PROTOBUF,
    "application/vnd.google.protobuf": Form.PROTOBUF,
    "application/json": Form.JSON,
    "text/json": Form.JSON,
}
"""Forms, keyed by content type, including unofficial content types."""
_TOO_LARGE: Final = re.compile(
    r"(body|entity|payload|request|message) (is )?too large|larger than max"
)
"""Matches error messages about oversized requests in responses whose status is not 413. A Collector
responds with status 400 and the error message of Go's ``http.MaxBytesReader``."""


class Body(NamedTuple):
    """The body of a response; empty, with a ``problem``, if it could not be received or decoded."""

    content: bytes
    problem: str = ""


def is_delivered(status: int) -> bool:
    """Returns whether a status means that the request was accepted (RFC 9110, section 15.3)."""
    return 200 <= status < 300


def parse_response(status: int, headers: Mapping[str, str], body: Body, form: Form) -> Answer:
    """Interprets an HTTP response; a body of unknown content type is first parsed as ``form``."""
    name = str(status)
    content, problem = _decode(headers, body)
    if is_delivered(status):
        return _delivered(name, headers, Body(content, problem), form)
    if status in RETRYABLE:
        delay = parse_retry_after(headers.get("Retry-After", ""), time.time())
        return Answer(Verdict.RETRY, name, _explanation(headers, content), delay_s=delay)
    message = _explanation(headers, content)
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or _TOO_LARGE.search(message):
        return Answer(Verdict.TOO_LARGE, name, message)
    if 300 <= status < 400:
        message = "redirects are not followed; set the endpoint to the final address"
    return Answer(Verdict.REFUSED, name, message)


def _decode(headers: Mapping[str, str], body: Body) -> Body:
    """Some servers apply a content encoding that the client did not request."""
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if body.problem or not body.content or encoding in {"", "identity"}:
        return body
    try:
        return Body(inflate(body.content, encoding, MAX_RESPONSE_BYTES))
    except ValueError as error:
        return Body(b"", str(error))


def _delivered(name: str, headers: Mapping[str, str], body: Body, form: Form) -> Answer:
    if not body.content:
        return Answer(Verdict.ACCEPTED, name, unreadable=body.problem)
    kind = _content_type(headers)
    forms = [_FORMS[kind]] if kind in _FORMS else [form, *(set(Form) - {form})]
    for tried in forms:
        try:
            partial = _PARSERS[tried](body.content)
        except ValueError:
            continue
        return Answer(Verdict.ACCEPTED, name, partial.message, partial.rejected)
    shown = f" of the type {kind[:80]}" if kind else " without a type"
    problem = f"its {len(body.content)} bytes{shown} are not an ExportProfilesServiceResponse"
    return Answer(Verdict.ACCEPTED, name, unreadable=problem)


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def parse_partial_success_json(content: bytes) -> PartialSuccess:
    """Parses an ``ExportProfilesServiceResponse`` in JSON; raises ``ValueError`` if malformed."""
    try:
        partial = json.loads(content).get("partialSuccess") or {}
        # OTLP/JSON encodes 64-bit integers as strings, but receivers must also accept numbers.
        rejected = int(partial.get("rejectedProfiles") or 0)
        return PartialSuccess(rejected, str(partial.get("errorMessage") or ""))
    except (AttributeError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError("not an ExportProfilesServiceResponse") from error


_PARSERS: Final[Mapping[Form, Callable[[bytes], PartialSuccess]]] = {
    Form.PROTOBUF: parse_partial_success,
    Form.JSON: parse_partial_success_json,
}


def _explanation(headers: Mapping[str, str], content: bytes) -> str:
    """Returns the message from a ``google.rpc.Status``, protobuf or JSON, or a plain-text body."""
    kind = _content_type(headers)
    form = _FORMS.get(kind)
    if form is Form.PROTOBUF:
        from google.protobuf.message import DecodeError  # noqa: PLC0415
        from google.rpc import status_pb2  # noqa: PLC0415

        try:
            return str(status_pb2.Status.FromString(content).message)
        except DecodeError:
            return ""
    if form is Form.JSON:
        try:
            return str(json.loads(content).get("message", ""))
        except (ValueError, AttributeError, RecursionError):
            return ""
    return content[:500].decode(errors="replace") if kind == "text/plain" else ""


def parse_retry_after(value: str, now_unix_s: float) -> float | None:
    """Returns the ``Retry-After`` delay in seconds (RFC 9110 section 10.2.3); None if invalid.

    ``value`` is a number of seconds, or an HTTP date. A date in the past yields 0.
    """
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value).timestamp()
    except (OverflowError, ValueError):
        return None
    return max(0.0, moment - now_unix_s)
