"""Receives OTLP profiles of any sender, over gRPC and HTTP, for the store of ``view``.

Requests are decoded one at a time. Those that would wait for longer are refused with the time after
which to try again; senders that follow the OTLP specification do so.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.json_format import MessageToJson
from google.rpc import code_pb2, error_details_pb2, status_pb2
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    DESCRIPTOR,
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
from otel_kprofiler.serving import HttpServer
from otel_kprofiler.text import describe_count
from otel_kprofiler.viewing.store import Added

PATH: Final = "/v1development/profiles"
MAX_BYTES: Final = 8 << 20
"""Largest request, unpacked; senders keep below the 4 MiB that gRPC allows by default."""

_SERVICE: Final = DESCRIPTOR.services_by_name["ProfilesService"].full_name
_METHOD: Final = f"/{_SERVICE}/Export"
_ONLY_PROFILES: Final = "only profiles are received here"
_WAIT_S: Final = 5.0
_RETRY_S: Final = 5
_THREADS: Final = 4
_MOST_CALLS: Final = 32
_TIMEOUT_S: Final = 30.0
_SILENCE_S: Final = 10.0
_STOP_S: Final = 2.0
_MOST_DIGITS: Final = 18
_PART_BYTES: Final = 1 << 16
_MOST_SKIPPED: Final = 1 << 26
_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_TYPES: Final = {_PROTOBUF, "application/protobuf", _JSON}
_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib: gzip's header, or its own
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.so_reuseport", 0),  # so that a port in use is an error
)


@dataclass(slots=True)
class Counts:
    """What was received.

    Attributes:
        requests: accepted, at least in part.
        refused: not accepted.
        kept: samples that were added.
        outdated: samples that were too old to be added.
        repeated: samples that had been received before.
    """

    requests: int = 0
    refused: int = 0
    kept: int = 0
    outdated: int = 0
    repeated: int = 0


def find_version_problem(values: Sequence[str]) -> str:
    """Why the schema of a request is not known here; empty if it is.

    Args:
        values: all values of its header ``otlp-profiles-development-version``.
    """
    if list(values) in ([], [DEVELOPMENT_VERSION]):
        return ""
    shown = ", ".join(values)[:40]
    known = f"only version {DEVELOPMENT_VERSION} is known here"
    return f"{DEVELOPMENT_VERSION_HEADER} is {shown!r}; {known}"


class OverloadedError(KProfilerError):
    """A request cannot be taken now."""


class Intake:
    """Decodes requests and passes on their samples, one request at a time.

    Args:
        add: takes the samples of a request.

    Attributes:
        counts: of all requests so far.
    """

    def __init__(self, add: Callable[[Sequence[Window]], Added]) -> None:
        self.counts = Counts()
        self._add = add
        self._lock = threading.Lock()

    def take(
        self, body: bytes, is_wanted: Callable[[], bool] = lambda: True
    ) -> ExportProfilesServiceResponse:
        """Add the samples of a request.

        Args:
            body: the request.
            is_wanted: whether the sender still waits; otherwise it sends the request again.

        Raises:
            PayloadError: nothing of it can be read.
            OverloadedError: try again later.
        """
        if not self._lock.acquire(timeout=_WAIT_S):
            self.counts.refused += 1
            raise OverloadedError("other requests take too long")
        try:
            if not is_wanted():
                raise OverloadedError("the sender has given up")
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
    """Success, or what of it is none."""
    said = [problem.message for problem in problems[:1]]
    rejected = sum(one.count for one in problems if isinstance(one, DamagedProfilesError))
    if added.outdated:
        count = describe_count(added.outdated, "sample")
        said.append(f"{count} not kept: older than what is kept, or from the future")
        if not added.kept + added.repeated:
            rejected += sum(len(window.profiles) for window in windows)
    response = ExportProfilesServiceResponse()
    if said:
        response.partial_success.rejected_profiles = rejected
        response.partial_success.error_message = "; ".join(said)
    return response


class GrpcReceiver:
    """Receives over gRPC, in plain text, until it is closed.

    Args:
        endpoint: ``host:port`` to listen on, port 0 for a free one.
        intake: takes what is received.

    Attributes:
        port: that it listens on.

    Raises:
        HostError: the endpoint cannot be listened on.
    """

    def __init__(self, endpoint: str, intake: Intake) -> None:
        self._threads = ThreadPoolExecutor(_THREADS)
        self._server = grpc.server(
            self._threads,
            [_Methods(intake)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        try:
            self.port = self._server.add_insecure_port(endpoint)
        except RuntimeError as error:
            raise _cannot_listen(endpoint, "--listen") from error
        self._server.start()

    def close(self) -> None:
        """Stop listening, once the calls that run have ended."""
        self._server.stop(_STOP_S).wait()
        self._threads.shutdown()


def _cannot_listen(endpoint: str, option: str) -> HostError:
    return HostError(
        f"cannot listen on {endpoint} for profiles",
        hint=f"stop what listens there, such as a Collector, or choose another with {option}",
    )


class _Methods(grpc.GenericRpcHandler):
    """``ProfilesService/Export``, and the reason for everything else."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        is_known = handler_call_details.method == _METHOD
        return grpc.unary_unary_rpc_method_handler(self._export if is_known else _refuse)

    def _export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        values = [
            value.decode(errors="replace") if isinstance(value, bytes) else value
            for key, value in context.invocation_metadata()
            if key == DEVELOPMENT_VERSION_HEADER
        ]
        if problem := find_version_problem(values):
            self._intake.counts.refused += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        try:
            return self._intake.take(body, context.is_active).SerializeToString()
        except PayloadError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.with_fix())
        except OverloadedError as error:
            info = error_details_pb2.RetryInfo()
            info.retry_delay.seconds = _RETRY_S
            status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=error.message)
            status.details.add().Pack(info)
            context.set_trailing_metadata(
                (("grpc-status-details-bin", status.SerializeToString()),)
            )
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)


def _refuse(_body: bytes, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, _ONLY_PROFILES)


class HttpReceiver:
    """Receives over HTTP until it is closed; see :class:`GrpcReceiver`."""

    def __init__(self, endpoint: str, intake: Intake) -> None:
        try:
            self._server = _Server(endpoint, intake)
        except OSError as error:
            raise _cannot_listen(endpoint, "--listen-http") from error
        self.port = self._server.port

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class _Server(HttpServer):
    def __init__(self, endpoint: str, intake: Intake) -> None:
        self.intake = intake
        super().__init__(endpoint, _Handler, name="OTLP", timeout_s=_TIMEOUT_S)


class _Refused(Exception):  # noqa: N818 - an answer
    """A request that is answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENCE_S
    server_version = "otel-kprofiler"
    sys_version = ""

    def do_POST(self) -> None:
        try:
            response = self.server.intake.take(self._read_body())
        except _Refused as error:
            self.send_error(error.status, str(error))
        except PayloadError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, error.with_fix())
        except OverloadedError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, error.message)
        else:
            self._send(HTTPStatus.OK, response)

    def _read_body(self) -> bytes:
        headers = self.headers
        length = headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "there is no Content-Length")
        if len(length) > _MOST_DIGITS or int(length) > MAX_BYTES:
            # A client that is still sending would miss the answer.
            left = int(length[:_MOST_DIGITS])
            for _ in range(min(left, _MOST_SKIPPED) // _PART_BYTES):
                self.rfile.read(_PART_BYTES)
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large())
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(HTTPStatus.BAD_REQUEST, "the end of the request is missing")
        if "Origin" in headers or "Sec-Fetch-Site" in headers:
            raise _Refused(HTTPStatus.FORBIDDEN, "browsers cannot send profiles")
        if self.path != PATH:
            raise _Refused(HTTPStatus.NOT_FOUND, f"{_ONLY_PROFILES}, at {PATH}")
        if self._media_type() not in _TYPES:
            text = f"the content type must be {_PROTOBUF} or {_JSON}"
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        if problem := find_version_problem(headers.get_all(DEVELOPMENT_VERSION_HEADER, [])):
            self.server.intake.counts.refused += 1
            raise _Refused(HTTPStatus.BAD_REQUEST, problem)
        return _unpack(body, headers.get("Content-Encoding", "identity").strip().lower())

    def _media_type(self) -> str:
        headers = getattr(self, "headers", None)
        return headers.get_content_type() if headers else ""

    def _send(self, status: int, message: Any) -> None:
        is_json = self._media_type() == _JSON
        body = MessageToJson(message).encode() if is_json else message.SerializeToString()
        self.send_response(status)
        self.send_header("Content-Type", _JSON if is_json else _PROTOBUF)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", str(_RETRY_S))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the reason as ``google.rpc.Status``."""
        if code == HTTPStatus.NOT_IMPLEMENTED:  # a method without a function here
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, _ONLY_PROFILES
        self.close_connection = True
        self._send(code, status_pb2.Status(message=message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Do not log requests, which come every few seconds."""


def _too_large() -> str:
    return f"the request is larger than {MAX_BYTES >> 20} MiB"


def _unpack(body: bytes, encoding: str) -> bytes:
    if encoding in {"identity", ""}:
        return body
    if encoding not in _WINDOWS:
        text = "the content encoding must be gzip, deflate or identity"
        raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
    unpacker = zlib.decompressobj(_WINDOWS[encoding])
    try:
        found = unpacker.decompress(body, MAX_BYTES + 1)
    except zlib.error as error:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"damaged {encoding}: {error}") from error
    if len(found) > MAX_BYTES:
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large())
    if not unpacker.eof:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"the end of the {encoding} is missing")
    return found
