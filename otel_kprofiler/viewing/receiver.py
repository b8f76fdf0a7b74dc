"""Receives OTLP profiles from any sender over HTTP, and decodes them for the ``view`` store.

Requests are decoded one at a time. Requests that would wait too long are rejected with a retry
delay, as the OTLP specification allows.
"""

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from google.protobuf.json_format import MessageToJson
from google.rpc import status_pb2
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceResponse,
)

from otel_kprofiler.errors import HostError, KProfilerError, PayloadError
from otel_kprofiler.model import Window
from otel_kprofiler.otlp import (
    DEVELOPMENT_VERSION,
    DEVELOPMENT_VERSION_HEADER,
    DamagedProfilesError,
    decode_windows,
    refuse_many_messages,
    refuse_negative_values,
)
from otel_kprofiler.serving import HttpHandler, HttpServer
from otel_kprofiler.text import describe_count
from otel_kprofiler.viewing.store import Added

PATH: Final = "/v1development/profiles"
MAX_BYTES: Final = 8 << 20
"""Maximum size of an uncompressed request, in bytes. Senders stay below gRPC's default, 4 MiB."""

ONLY_PROFILES: Final = "only profiles are received here"
_WAIT_S: Final = 5.0
RETRY_S: Final = 5
_TIMEOUT_S: Final = 30.0
_SILENCE_S: Final = 10.0
_MOST_DIGITS: Final = 18
_PART_BYTES: Final = 1 << 16
_MOST_SKIPPED: Final = 1 << 26
_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_TYPES: Final = {_PROTOBUF, "application/protobuf", _JSON}
_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's wbits by content encoding


@dataclass(slots=True)
class Counts:
    """Counts of received requests and samples.

    ``requests`` counts requests that were at least partially accepted. ``outdated`` counts samples
    that were too old to be added, and ``repeated`` counts samples that had been received before.
    """

    requests: int = 0
    refused: int = 0
    kept: int = 0
    outdated: int = 0
    repeated: int = 0


def find_version_problem(values: Sequence[str]) -> str:
    """Returns why the schema version of a request is unsupported; empty if it is supported.

    ``values`` are all values of the request's ``otlp-profiles-development-version`` header.
    """
    if list(values) in ([], [DEVELOPMENT_VERSION]):
        return ""
    shown = ", ".join(values)[:40]
    supported = f"only version {DEVELOPMENT_VERSION} is supported"
    return f"{DEVELOPMENT_VERSION_HEADER} is {shown!r}; {supported}"


class OverloadedError(KProfilerError):
    """Raised if a request cannot currently be accepted."""


class Intake:
    """Decodes requests one at a time, and passes their samples to ``add``."""

    def __init__(self, add: Callable[[Sequence[Window]], Added]) -> None:
        self.counts = Counts()
        self._add = add
        self._lock = threading.Lock()

    def take(
        self, read: Callable[[], bytes], is_wanted: Callable[[], bool] = lambda: True
    ) -> ExportProfilesServiceResponse:
        """Add the samples in a request.

        Args:
            read: returns the decompressed request; called only when it is the request's turn.
            is_wanted: returns whether the sender is still waiting. A sender that has stopped
                waiting will resend the request.

        Raises:
            PayloadError: no part of the request can be read.
            OverloadedError: the receiver is overloaded, so the client must resend the request
                later.
        """
        if not self._lock.acquire(timeout=_WAIT_S):
            self.counts.refused += 1
            raise OverloadedError("other requests are taking too long")
        try:
            if not is_wanted():
                raise OverloadedError("the sender is no longer waiting")
            body = read()
            refuse_many_messages(body)
            problems: list[PayloadError] = []
            windows = decode_windows(body, on_damage=problems.append)
            if problems and not windows:
                raise problems[0]
            refuse_negative_values(windows)
            added = self._add(windows)
        except PayloadError:
            self.counts.refused += 1
            raise
        except KProfilerError as error:
            self.counts.refused += 1
            raise OverloadedError(error.with_fix()) from error
        finally:
            self._lock.release()
        self.counts.requests += 1
        self.counts.kept += added.kept
        self.counts.outdated += added.outdated
        self.counts.repeated += added.repeated
        return _response(windows, problems, added)


def _response(
    windows: Sequence[Window], problems: Sequence[PayloadError], added: Added
) -> ExportProfilesServiceResponse:
    said = [problem.message for problem in problems[:1]]
    rejected = sum(
        problem.count for problem in problems if isinstance(problem, DamagedProfilesError)
    )
    if added.outdated:
        count = describe_count(added.outdated, "sample")
        said.append(f"{count} not kept: older than the retention period, or from the future")
        if not added.kept + added.repeated:
            rejected += sum(len(window.profiles) for window in windows)
    response = ExportProfilesServiceResponse()
    if said:
        response.partial_success.rejected_profiles = rejected
        response.partial_success.error_message = "; ".join(said)
    return response


def cannot_listen(endpoint: str, option: str) -> HostError:
    """Returns the error for an endpoint that is in use or is not an address of this host."""
    return HostError(
        f"cannot listen on {endpoint} for profiles",
        hint="stop the program that listens there, such as a Collector, or choose another endpoint "
        f"with {option}",
    )


class HttpReceiver:
    """Receives profiles over HTTP until closed; see ``GrpcReceiver``."""

    def __init__(self, endpoint: str, intake: Intake) -> None:
        try:
            self._server = _Server(endpoint, intake)
        except OSError as error:
            raise cannot_listen(endpoint, "--listen-http") from error
        self.port = self._server.port

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class _Server(HttpServer):
    def __init__(self, endpoint: str, intake: Intake) -> None:
        self.intake = intake
        super().__init__(endpoint, _Handler, name="OTLP", timeout_s=_TIMEOUT_S)


class _Refused(Exception):  # noqa: N818 - a response
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(HttpHandler):
    server: _Server
    timeout = _SILENCE_S

    def do_POST(self) -> None:  # noqa: N802 - name of http.server
        try:
            unpack = self._receive()
            response = self.server.intake.take(unpack)
        except _Refused as error:
            self.send_error(error.status, str(error))
        except PayloadError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, error.with_fix())
        except OverloadedError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, error.message)
        else:
            self._send(HTTPStatus.OK, response)

    def _receive(self) -> Callable[[], bytes]:
        headers = self.headers
        length = headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "the request lacks a Content-Length header")
        if len(length) > _MOST_DIGITS or int(length) > MAX_BYTES:
            # Keep reading, because a client that is still sending would not receive the response.
            left = int(length[:_MOST_DIGITS])
            for _ in range(min(left, _MOST_SKIPPED) // _PART_BYTES):
                self.rfile.read(_PART_BYTES)
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large())
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(HTTPStatus.BAD_REQUEST, "the request is truncated")
        self.server.keep(self.connection)
        if "Origin" in headers or "Sec-Fetch-Site" in headers:
            raise _Refused(HTTPStatus.FORBIDDEN, "browsers cannot send profiles")
        if self.path != PATH:
            raise _Refused(HTTPStatus.NOT_FOUND, f"{ONLY_PROFILES}, at {PATH}")
        if self._media_type() not in _TYPES:
            text = f"the content type must be {_PROTOBUF} or {_JSON}"
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        if problem := find_version_problem(headers.get_all(DEVELOPMENT_VERSION_HEADER, [])):
            self.server.intake.counts.refused += 1
            raise _Refused(HTTPStatus.BAD_REQUEST, problem)
        encoding = headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in _WINDOWS and encoding not in {"identity", ""}:
            text = "the content encoding must be gzip, deflate or identity"
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        return partial(_unpack, body, encoding)

    def _media_type(self) -> str:
        headers = getattr(self, "headers", None)
        return headers.get_content_type() if headers else ""

    def _send(self, status: int, message: Any) -> None:
        is_json = self._media_type() == _JSON
        body = MessageToJson(message).encode() if is_json else message.SerializeToString()
        headers: dict[int, dict[str, str]] = {
            HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "POST"},
            HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": str(RETRY_S)},
        }
        self.respond(status, _JSON if is_json else _PROTOBUF, body, headers.get(status))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, ONLY_PROFILES
        self.close_connection = True
        self._send(code, status_pb2.Status(message=message or HTTPStatus(code).phrase))


def _too_large() -> str:
    return f"the request is larger than {MAX_BYTES >> 20} MiB"


def _unpack(body: bytes, encoding: str) -> bytes:
    if encoding not in _WINDOWS:
        return body
    unpacker = zlib.decompressobj(_WINDOWS[encoding])
    try:
        unpacked = unpacker.decompress(body, MAX_BYTES + 1)
    except zlib.error as error:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"damaged {encoding}: {error}") from error
    if len(unpacked) > MAX_BYTES:
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large())
    if not unpacker.eof:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"the {encoding} data is truncated")
    if unpacker.unused_data:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"data follows the end of the {encoding} data")
    return unpacked
