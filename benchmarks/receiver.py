"""An OTLP profiles receiver for measurements, which keeps all requests in order of arrival."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from otel_kprofiler.export import PROFILES


class Receiver:
    """A gRPC server on a free loopback port. ``requests`` lists (monotonic time, payload) pairs."""

    def __init__(self) -> None:
        self.requests: list[tuple[float, bytes]] = []
        self._arrived = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((_Handler(self._take),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _take(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        self.requests.append((time.monotonic(), request))
        self._arrived.set()
        return b""

    def wait_first(self, timeout_s: float) -> float:
        """Returns the time of the first request. Raises ``TimeoutError`` if no request arrives."""
        if not self._arrived.wait(timeout_s):
            raise TimeoutError("nothing arrived")
        return self.requests[0][0]

    def close(self) -> None:
        self._server.stop(0).wait()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, take) -> None:
        self._method = grpc.unary_unary_rpc_method_handler(take)

    def service(self, handler_call_details):
        return self._method if handler_call_details.method == PROFILES.method else None
