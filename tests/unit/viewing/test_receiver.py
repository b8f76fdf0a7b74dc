"""The receivers of `view` accept this package's exports, and withstand hostile clients."""

import contextlib
import gzip
import http.client
import json
import os
import socket
import struct
import threading
import time
import zlib

import grpc
import pytest
from google.rpc import status_pb2
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
    ExportProfilesServiceResponse,
)

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.errors import HostError, KProfilerError
from otel_kprofiler.export import PROFILES, OtlpGrpcExporter, OtlpHttpExporter, RetryPolicy
from otel_kprofiler.export.grpc_status import parse_retry_delay
from otel_kprofiler.model import Form, WindowSample
from otel_kprofiler.otlp import encode_window
from otel_kprofiler.viewing import (
    Counts,
    GrpcReceiver,
    HttpReceiver,
    Intake,
    Query,
    SampleStore,
    grpc_receiver,
)
from otel_kprofiler.viewing.grpc_receiver import MOST_CALLS, THREADS
from otel_kprofiler.viewing.receiver import MAX_BYTES, PATH
from tests.raising import raising
from tests.unit.viewing import http2
from tests.unit.viewing.shown import answer, expected, shown
from tests.waiting import call_in_thread, wait_until
from tests.windows import encode, make_stack, make_window
from tests.wire import pack_field

pytestmark = pytest.mark.system

NOW = 1_700_000_000_000_000_000
PROTOBUF, JSON = {"Content-Type": "application/x-protobuf"}, {"Content-Type": "application/json"}


def window(count=3, start=NOW - 10**9):
    times = [start + at for at in range(count)]
    sample = WindowSample(make_stack("vfs_read"), 7, "x", 0, None, times)
    attributes = {"process.pid": 7, "process.executable.name": "nginx", "host.name": "web"}
    return make_window(start, start + 10**9, (attributes, [sample]), period_ns=10**7)


def payload(one=None, form=Form.PROTOBUF):
    return encode(one or window(), form)


@pytest.fixture
def store(tmp_path):
    with SampleStore(str(tmp_path / "x.db"), now_ns=lambda: NOW) as store:
        yield store


@pytest.fixture(scope="module")
def opened():
    """Starts both receivers on free ports. Yields the request intake and the receivers."""
    intake = Intake(None)
    with contextlib.ExitStack() as stack:
        receivers = [
            stack.enter_context(contextlib.closing(kind("127.0.0.1:0", intake)))
            for kind in (GrpcReceiver, HttpReceiver)
        ]
        yield intake, receivers


@pytest.fixture
def intake(opened, store):
    opened[0].counts, opened[0]._add = Counts(), store.add
    return opened[0]


@pytest.fixture
def receivers(opened, intake):
    return opened[1]


def call(receivers, body, method=PROFILES.method, **options):
    with grpc.insecure_channel(
        f"127.0.0.1:{receivers[0].port}", [("grpc.max_send_message_length", -1)]
    ) as channel:
        return channel.unary_unary(method)(body, timeout=20, **options)


def refused(receivers, body, **options):
    with pytest.raises(grpc.RpcError) as raised:
        call(receivers, body, **options)
    return raised.value


def post(receivers, body, path=PATH, method="POST", **headers):
    client = http.client.HTTPConnection("127.0.0.1", receivers[1].port, timeout=20)
    with contextlib.closing(client):
        client.request(method, path, body, headers or PROTOBUF)
        result = client.getresponse()
        return result.status, result.headers, result.read()


def message(body):
    return status_pb2.Status.FromString(body).message


@pytest.mark.parametrize("form", [Form.PROTOBUF, Form.JSON])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_every_exporter_delivers_every_sample(store, intake, receivers, form, compression):
    endpoint = f"http://127.0.0.1:{receivers[1].port}"
    exporters = [OtlpHttpExporter(endpoint, form=form, compression=compression, proxy_url="")]
    if form is Form.PROTOBUF:
        endpoint = f"http://127.0.0.1:{receivers[0].port}"
        exporters.append(OtlpGrpcExporter(endpoint, compression=compression))
    windows = [window(start=NOW - (at + 1) * 10**9) for at in range(len(exporters))]
    for exporter, one in zip(exporters, windows, strict=True):
        (batch,) = encode_window(one, form=form).batches
        result = exporter.export(batch)
        assert result.exported == 3, result
        exporter.shutdown()
    data = answer(store, Query(), NOW)
    assert shown(data) == expected(windows, data)
    assert (intake.counts.requests, intake.counts.kept) == (len(windows), 3 * len(windows))


def test_an_empty_request_is_accepted(receivers):
    assert call(receivers, b"") == b""
    assert post(receivers, b"")[::2] == (200, b"")
    assert json.loads(post(receivers, b"{}", **JSON)[2]) == {}


def test_requests_for_other_signals_are_rejected_with_the_reason(receivers):
    error = refused(
        receivers, b"", method="/opentelemetry.proto.collector.trace.v1.TraceService/Export"
    )
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == "only profiles are received here"
    status, _, body = post(receivers, b"", "/v1/traces")
    assert (status, message(body)) == (404, f"only profiles are received here, at {PATH}")


VERSION = "otlp-profiles-development-version"


@pytest.mark.parametrize("values", [["2"], ["0"], ["01"], [""], ["1, 1"], ["1", "1"], ["x" * 99]])
def test_requests_with_another_schema_version_are_rejected_undecoded(intake, receivers, values):
    """The body cannot be decoded, so only a check before decoding can reject the version."""
    metadata = [(VERSION, value) for value in values]
    error = refused(receivers, b"\xff", metadata=metadata)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{VERSION} is ")
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", receivers[1].port, timeout=30)
    ) as client:
        client.putrequest("POST", PATH)
        for name, value in [*PROTOBUF.items(), *metadata, ("Content-Length", "1")]:
            client.putheader(name, value)
        client.endheaders(b"\xff")
        answered = client.getresponse()
        assert answered.status == 400
        assert message(answered.read()).startswith(f"{VERSION} is ")
    assert (intake.counts.requests, intake.counts.refused) == (0, 2)


def test_requests_with_schema_version_1_are_accepted(intake, receivers):
    assert call(receivers, payload(), metadata=[(VERSION, "1")]) == b""
    assert post(receivers, payload(), **PROTOBUF, **{VERSION: "1"})[0] == 200
    assert intake.counts.requests == 2


@pytest.mark.parametrize(
    "body", [b"\xff" * 50, b"\x0a\xff", b"{" * 10_000, b"GET / HTTP/1.1", b"\0" * 9]
)
def test_data_that_is_not_a_profile_is_rejected(intake, receivers, body):
    assert refused(receivers, body).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert post(receivers, body)[0] == 400
    status, headers, answered = post(receivers, body, **JSON)
    assert (status, headers["Content-Type"]) == (400, "application/json")
    assert json.loads(answered)["message"]
    assert (intake.counts.refused, intake.counts.requests) == (3, 0)


def test_the_intact_part_of_a_malformed_request_is_accepted(store, receivers):
    request = ExportProfilesServiceRequest.FromString(payload())
    good = request.resource_profiles[0].scope_profiles[0].profiles[0]
    for number in (10**6, -5):
        bad = request.resource_profiles[0].scope_profiles[0].profiles.add()
        bad.CopyFrom(good)
        bad.samples[0].stack_index = number
    request.resource_profiles[0].scope_profiles[0].profiles.append(good)
    said = ExportProfilesServiceResponse.FromString(call(receivers, request.SerializeToString()))
    assert said.partial_success.rejected_profiles == 2
    assert "an index points outside its table" in said.partial_success.error_message
    assert sum(answer(store, Query(), NOW)["samples"]["count"]) == 6


def test_received_samples_that_are_too_old_to_keep_are_reported(store, intake, receivers):
    old = payload(window(start=NOW - 7200 * 10**9))
    said = ExportProfilesServiceResponse.FromString(post(receivers, old)[2])
    assert said.partial_success.rejected_profiles == 1
    assert said.partial_success.error_message.startswith("3 samples not kept: older than")
    assert intake.counts.outdated == 3


def test_request_size_is_limited_before_and_after_decompression(intake, receivers):
    large = b"\0" * (MAX_BYTES + 1)
    assert refused(receivers, large).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert post(receivers, large)[0] == 413
    bomb = b"\0" * (2 * MAX_BYTES)
    error = refused(receivers, bomb, compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    packed = {"gzip": gzip.compress(bomb, 1), "deflate": zlib.compress(bomb, 1)}
    for encoding, body in packed.items():
        status, _, said = post(receivers, body, **PROTOBUF, **{"Content-Encoding": encoding})
        assert (status, message(said)) == (413, "the request is larger than 8 MiB")
    assert intake.counts.requests == 0


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (415, {"Content-Type": "text/plain"}, b""),
        (415, {"X": ""}, b""),
        (415, PROTOBUF | {"Content-Encoding": "zstd"}, b""),
        (400, PROTOBUF | {"Content-Encoding": "gzip"}, b"not gzip"),
        (400, PROTOBUF | {"Content-Encoding": "gzip"}, gzip.compress(b"x" * 1000)[:-9]),
        (403, PROTOBUF | {"Origin": "http://evil.example"}, b""),
        (403, PROTOBUF | {"Origin": "null"}, b""),
        (403, PROTOBUF | {"Sec-Fetch-Site": "same-origin"}, b""),
    ],
)
def test_invalid_requests_are_rejected(intake, receivers, status, headers, body):
    assert post(receivers, body, **headers)[0] == status
    assert intake.counts.requests == 0


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "HEAD"])
def test_only_post_requests_are_allowed(receivers, method):
    status, headers, _ = post(receivers, None, method=method, **PROTOBUF)
    assert (status, headers["Allow"]) == (405, "POST")
    assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "request_",
    [
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nContent-Type: application/json\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nx",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\0\xff\xfe\r\n\r\n",
        b"POST\r\n\r\n",
    ],
)
def test_hostile_requests_are_rejected_without_a_traceback(receivers, capfd, caplog, request_):
    with (
        socket.create_connection(("127.0.0.1", receivers[1].port), timeout=20) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        said = client.makefile("rb").read()
        assert b" 4" in said[:20] or b"Bad request" in said
    assert post(receivers, payload())[0] == 200
    assert capfd.readouterr().err == ""
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_resets_its_connection_does_not_affect_other_clients(receivers):
    for port in (receiver.port for receiver in receivers):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\nx")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert post(receivers, payload())[0] == 200
    assert call(receivers, payload()) == b""


def test_overload_responses_include_a_retry_delay(receivers, intake, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.viewing.receiver._WAIT_S", 0.05)
    with intake._lock:
        error = refused(receivers, payload())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert parse_retry_delay(dict(error.trailing_metadata())["grpc-status-details-bin"]) == 5
        status, headers, _ = post(receivers, payload())
        assert (status, headers["Retry-After"]) == (503, "5")
        assert intake.counts.refused == 2
        # The sender retries until the store is available, so no samples are lost.
        monkeypatch.setattr("otel_kprofiler.viewing.grpc_receiver.RETRY_S", 0)
        policy = RetryPolicy(initial_interval_s=0.05, max_interval_s=0.05)
        exporter = OtlpGrpcExporter(f"http://127.0.0.1:{receivers[0].port}", retry=policy)
        (batch,) = encode_window(window()).batches
        result = call_in_thread(exporter.export, batch)
        wait_until(lambda: intake.counts.refused >= 4)
    assert result.result(20).exported == 3
    exporter.shutdown()
    assert intake.counts.kept == 3


def test_a_queued_request_is_not_decompressed(receivers, intake, monkeypatch):
    """Decompressing requests before queueing them would keep each one in memory twice."""
    monkeypatch.setattr("otel_kprofiler.viewing.receiver._WAIT_S", 0.05)
    bomb = gzip.compress(bytes(MAX_BYTES + 1))
    with intake._lock:
        assert post(receivers, bomb, **PROTOBUF, **{"Content-Encoding": "gzip"})[0] == 503
    assert post(receivers, bomb, **PROTOBUF, **{"Content-Encoding": "gzip"})[0] == 413


# AnyValue.array_value and ArrayValue.values, within an attribute of a Resource or the dictionary.
NESTING, OUTER = (5, 1), {"resource": (2, 1, 1, 1), "dictionary": (2, 6, 2)}


@pytest.mark.parametrize("levels", [70, 2000])
@pytest.mark.parametrize("place", OUTER)
def test_deeply_nested_attribute_values_are_rejected(receivers, intake, place, levels):
    value = b""
    for number in (*NESTING * levels, *OUTER[place]):
        value = pack_field(number, value)
    body = payload() + value  # protobuf merges fields with the same number
    assert post(receivers, body)[0] == 400
    assert refused(receivers, body).code() is grpc.StatusCode.INVALID_ARGUMENT
    arrays = b'{"arrayValue":{"values":[' * levels + b"{}" + b"]}}" * levels
    attributes = b'{"resource":{"attributes":[{"key":"k","value":' + arrays + b"}]}}"
    body = b'{"resourceProfiles":[' + attributes + b"]}"
    assert post(receivers, body, **{"Content-Type": "application/json"})[0] == 400
    assert post(receivers, payload())[0] == 200
    assert intake.counts.kept == 3


def test_data_after_the_end_of_a_gzip_stream_is_rejected_instead_of_ignored(receivers, intake):
    body = gzip.compress(payload()) + gzip.compress(payload())
    assert post(receivers, body, **PROTOBUF, **{"Content-Encoding": "gzip"})[0] == 400
    assert intake.counts.requests == 0


def test_a_store_failure_is_reported_as_an_overload(receivers, intake):
    intake._add = raising(KProfilerError("cannot write x.db: full", hint="free space"))
    error = refused(receivers, payload())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "cannot write x.db: full (fix: free space)"
    assert post(receivers, payload())[0] == 503


def test_a_port_that_is_already_in_use_is_reported(intake):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        for kind, option in ((GrpcReceiver, "--listen"), (HttpReceiver, "--listen-http")):
            with pytest.raises(HostError, match=f"cannot listen on {endpoint}") as raised:
                kind(endpoint, intake)
            assert raised.value.hint.endswith(option)


@pytest.fixture
def clients(receivers):
    """Yields a function that opens a persistent connection to the gRPC receiver and sends bytes."""
    with contextlib.ExitStack() as stack:

        def open_one(sent):
            client = socket.create_connection(("127.0.0.1", receivers[0].port), timeout=20)
            stack.enter_context(client)
            client.sendall(http2.PREFACE + sent)
            return client

        yield open_one


RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def is_taken(receivers):
    """Returns whether a sender that retries for 30 seconds, as OTLP requires, succeeds."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            return call(receivers, payload()) == b""
        except grpc.RpcError as error:
            if error.code() not in RETRYABLE:
                raise
            time.sleep(0.1)
    return False


@pytest.mark.parametrize("part", [b"", b"\0\0\x7f\0\0xxxx"], ids=["silent", "part of a message"])
@pytest.mark.parametrize("count", [THREADS, 2 * MOST_CALLS])
def test_calls_whose_messages_never_arrive_do_not_block_others(receivers, clients, count, part):
    for _ in range(count):
        clients(http2.call(1, part))
    assert is_taken(receivers)


def count_connections(port):
    """Counts the connections accepted on a local port. See proc_pid_net_tcp(5)."""
    rows = []
    for table in ("tcp", "tcp6"):  # gRPC listens on dual-stack sockets
        with open(f"/proc/self/net/{table}") as lines:
            rows += [line.split() for line in lines]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def await_count(port, most):
    """Waits until a port has at most ``most`` connections, and returns their number.

    Waits less than a minute, because silent connections are always closed after a minute.
    """
    end = time.monotonic() + 40
    while (count := count_connections(port)) > most and time.monotonic() < end:
        time.sleep(0.1)
    return count


def test_the_number_of_connections_is_limited(intake, monkeypatch):
    patient = {**dict(grpc_receiver._OPTIONS), "grpc.max_connection_idle_ms": 600_000}
    monkeypatch.setattr(grpc_receiver, "_OPTIONS", tuple(patient.items()))
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(contextlib.closing(GrpcReceiver("127.0.0.1:0", intake)))
        for _ in range(600):
            client = stack.enter_context(
                socket.create_connection(("127.0.0.1", receiver.port), timeout=20)
            )
            with contextlib.suppress(ConnectionError):
                client.sendall(http2.PREFACE)
        assert 200 < await_count(receiver.port, 300) <= 300


@pytest.mark.long
def test_idle_connections_are_closed(receivers, clients):
    for _ in range(40):
        clients(b"")
    assert is_taken(receivers)
    assert await_count(receivers[0].port, 5) <= 5


def read_all(client):
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 16):
            pass


def test_calls_reset_immediately_by_clients_use_little_memory(receivers, clients):
    assert is_taken(receivers)
    start = highest = read_resident_bytes(os.getpid())
    for _ in range(4):
        client = clients(b"")
        reader = threading.Thread(target=read_all, args=(client,))
        reader.start()
        for first in range(1, 60_000, 400):
            client.sendall(http2.reset_calls(first, 200))
        client.shutdown(socket.SHUT_RDWR)
        reader.join()
        highest = max(highest, read_resident_bytes(os.getpid()))
    assert is_taken(receivers)
    assert highest - start < 30 << 20


def test_calls_above_the_limit_are_answered_with_a_retry_delay(receivers, intake, monkeypatch):
    """Without a retry delay in the response, a sender must drop the request."""
    monkeypatch.setattr("otel_kprofiler.viewing.grpc_receiver.MOST_CALLS", 4)
    monkeypatch.setattr("otel_kprofiler.viewing.receiver._WAIT_S", 60)
    with grpc.insecure_channel(f"127.0.0.1:{receivers[0].port}") as channel:
        with intake._lock:
            export = channel.unary_unary(PROFILES.method)
            calls = [export.future(payload(), timeout=60) for _ in range(8)]
            wait_until(lambda: sum(call.done() for call in calls) == 4)
            errors = [call.exception() for call in calls if call.done()]
        for call in calls:
            call.exception(60)
    for error in errors:
        assert error.details() == "too many calls are waiting"
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert parse_retry_delay(dict(error.trailing_metadata())["grpc-status-details-bin"]) == 5
