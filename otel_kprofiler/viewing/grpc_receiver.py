"""Receives OTLP profiles over gRPC, even while many clients send slowly or not at all.

gRPC assigns a thread to a call before the call's message has arrived. A call whose message never
arrives would block that thread, so calls that wait long for their message are cancelled while other
calls wait for a thread. Senders retry cancelled calls.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import DESCRIPTOR

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.otlp import DEVELOPMENT_VERSION_HEADER
from otel_kprofiler.viewing.receiver import (
    MAX_BYTES,
    ONLY_PROFILES,
    RETRY_S,
    Intake,
    OverloadedError,
    cannot_listen,
    find_version_problem,
)

THREADS: Final = 8
"""Maximum number of calls whose messages are received or decoded at a time."""
MOST_CALLS: Final = 32
"""Maximum number of running and waiting calls. Excess calls are rejected with a retry delay."""

_SERVICE: Final = DESCRIPTOR.services_by_name["ProfilesService"].full_name
_METHOD: Final = f"/{_SERVICE}/Export"
_STOP_S: Final = 2.0
_PATIENCE_S: Final = 0.5
"""Time, in seconds, that a call may wait for its message while other calls need a thread."""
# https://github.com/grpc/grpc/blob/master/include/grpc/impl/channel_arg_names.h
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.so_reuseport", 0),  # makes binding to a port in use an error
    ("grpc.max_allowed_incoming_connections", 256),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_concurrent_streams", 16),
    # A call that is reset immediately still uses memory until it is handled.
    ("grpc.server.max_pending_requests", 64),
    ("grpc.server.max_pending_requests_hard_limit", 128),
)


class GrpcReceiver:
    """Receives profiles over plaintext gRPC until closed.

    ``endpoint`` is the ``host:port`` to listen on. Port 0 selects a free port, which :attr:`port`
    returns. Raises ``HostError`` if the receiver cannot listen on ``endpoint``.
    """

    def __init__(self, endpoint: str, intake: Intake) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="OTLP receiver")
        self._methods = _Methods(intake)
        self._server = grpc.server(self._threads, [self._methods], options=_OPTIONS)
        try:
            self.port = self._server.add_insecure_port(endpoint)
        except RuntimeError as error:
            raise cannot_listen(endpoint, "--listen") from error
        self._server.start()
        self._closed = threading.Event()
        self._patience = threading.Thread(
            target=self._lose_patience, name="OTLP calls", daemon=True
        )
        self._patience.start()

    def _lose_patience(self) -> None:
        while not self._closed.wait(_PATIENCE_S / 2):
            self._methods.cancel_slow()

    def close(self) -> None:
        """Stop listening, and allow running calls a short time to finish."""
        self._server.stop(_STOP_S).wait()
        self._threads.shutdown()
        self._closed.set()
        self._patience.join()


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._lock = threading.Lock()
        self._calls = 0
        self._receiving: dict[grpc.ServicerContext, float] = {}  # start time of each call

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method != _METHOD:
            return grpc.stream_unary_rpc_method_handler(_refuse)
        with self._lock:
            is_busy = self._calls >= MOST_CALLS
            self._calls += not is_busy
        # Handles the call as a stream, so that the handler runs before the message has arrived.
        return grpc.stream_unary_rpc_method_handler(_refuse_busy if is_busy else self._export)

    def cancel_slow(self) -> None:
        """Cancel calls that wait too long for their message while other calls wait for a thread."""
        end = time.monotonic() - _PATIENCE_S
        with self._lock:
            if self._calls <= THREADS:
                return
            slow = [request for request, since in self._receiving.items() if since < end]
        for context in slow:
            context.cancel()

    def _export(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        try:
            with self._until_received(context):
                body = next(messages, None)
            return self._take(body, context)
        finally:
            with self._lock:
                self._calls -= 1

    @contextmanager
    def _until_received(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            self._receiving[context] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._receiving.pop(context, None)

    def _take(self, body: bytes | None, context: grpc.ServicerContext) -> bytes:
        values = [
            value.decode(errors="replace") if isinstance(value, bytes) else value
            for key, value in context.invocation_metadata()
            if key == DEVELOPMENT_VERSION_HEADER
        ]
        if problem := find_version_problem(values):
            self._intake.counts.refused += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        if body is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request has no message")
        try:
            return self._intake.take(lambda: body, context.is_active).SerializeToString()
        except PayloadError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.with_fix())
        except OverloadedError as error:
            _abort_for_now(context, error.message)


def _abort_for_now(context: grpc.ServicerContext, message: str) -> NoReturn:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds = RETRY_S
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=message)
    status.details.add().Pack(info)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def _refuse(_messages: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, ONLY_PROFILES)


def _refuse_busy(_messages: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
    _abort_for_now(context, "too many calls are waiting")


# Calls are rejected in a separate thread, because all other threads may be busy.
_refusals = ThreadPoolExecutor(1, thread_name_prefix="OTLP refusals")
_refuse.experimental_thread_pool = _refusals  # type: ignore[attr-defined]
_refuse_busy.experimental_thread_pool = _refusals  # type: ignore[attr-defined]
