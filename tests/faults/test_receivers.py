"""When a queue's receiver fails, samples arrive or are counted as lost for the correct reason."""

import contextlib
import dataclasses
import email.utils
import socket
import ssl
import threading
import time

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from otel_kprofiler.export import (
    ExportQueue,
    OtlpGrpcExporter,
    OtlpHttpExporter,
    RetryPolicy,
    Spool,
    Tls,
)
from otel_kprofiler.model import Batch, Form, LossCause, ProfileSamples
from tests.servers import HttpServer, free_port, make_certificate, serve_grpc
from tests.waiting import wait_until

QUICK = RetryPolicy(initial_interval_s=0.01, max_interval_s=0.05, max_elapsed_time_s=3)
ONCE = dataclasses.replace(QUICK, max_elapsed_time_s=0.3)
BATCHES = 4
SAMPLES = 3


def numbered(number, size=50):
    payload = b"batch %d " % number + b"." * size
    return Batch(payload, Form.PROTOBUF, (ProfileSamples("on_cpu", SAMPLES),), number, number + 1)


class GrpcReceiver:
    """Fails the first requests as scripted and accepts later requests."""

    def __init__(self, faults):
        self.faults, self.arrived, self.requests = iter(faults), [], 0
        self.server, port = serve_grpc(self.export)
        self.endpoint = f"127.0.0.1:{port}"

    def export(self, request, context):
        self.requests += 1
        fault = next(self.faults, None)
        answer = fault(context) if fault else b""
        self.arrived.append(request)
        return answer

    def exporter(self, **options):
        options = {"timeout_s": 0.5, "retry": QUICK, **options}
        return OtlpGrpcExporter(f"http://{self.endpoint}", **options)

    def close(self):
        self.server.stop(0).wait()


class HttpReceiver:
    """Like :class:`GrpcReceiver`, but over HTTP. Each fault is called with the request handler."""

    def __init__(self, faults, context=None):
        self.faults, self.arrived, self.requests = iter(faults), [], 0
        self.server = HttpServer(self.take, context)
        self.port = self.server.port
        self.close = self.server.close

    def take(self, request):
        self.requests += 1
        if fault := next(self.faults, None):
            fault(request)
            request.close_connection = True
            return
        self.arrived.append(request.body)
        request.reply()

    def exporter(self, **options):
        options = {"timeout_s": 0.5, "retry": QUICK, "compression": "none", **options}
        url = self.server.url.replace("127.0.0.1", "localhost")
        return OtlpHttpExporter(url, proxy_url="", **options)


@pytest.fixture
def opened():
    """Returns a function that returns a given receiver, to be closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda receiver: stack.enter_context(contextlib.closing(receiver))


def abort(code, retry_s=None):
    def fault(context):
        if retry_s is not None:
            status = Status(code=code.value[0], message="busy")
            info = RetryInfo()
            info.retry_delay.FromMilliseconds(int(retry_s * 1000))
            status.details.add().Pack(info)
            context.set_trailing_metadata(
                (("grpc-status-details-bin", status.SerializeToString()),)
            )
        context.abort(code, "busy")

    return fault


def hang(handler):
    handler.reply(503, b"\n", Content_Length="100")
    handler.wfile.flush()
    time.sleep(1.0)


def flood(handler):
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(bytes(1 << 20))
            time.sleep(0.01)
    except OSError:
        pass


def run(exporter, batches=None):
    queue = ExportQueue(exporter)
    for batch in batches or [numbered(number) for number in range(BATCHES)]:
        queue.put(batch)
    assert queue.force_flush(20_000)
    queue.shutdown()
    counts = queue.counts()
    assert counts.accepted == counts.exported + sum(counts.lost.values())
    assert counts.queued == 0
    return counts


ALL = [numbered(number).payload for number in range(BATCHES)]
RETRIED = {
    "refusing for now": [abort(grpc.StatusCode.UNAVAILABLE)] * 2,
    "aborting": [abort(grpc.StatusCode.ABORTED)],
    "throttling with RetryInfo": [abort(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.3)],
}


@pytest.mark.parametrize("name", RETRIED)
def test_no_samples_are_lost_to_transient_grpc_errors(opened, name):
    receiver = opened(GrpcReceiver(RETRIED[name]))
    started = time.monotonic()
    counts = run(receiver.exporter())
    assert (counts.exported, counts.lost) == (BATCHES * SAMPLES, {})
    assert receiver.arrived == ALL
    assert receiver.requests == BATCHES + len(RETRIED[name])
    if "RetryInfo" in name:
        assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT]
)
def test_grpc_rejections_are_counted_and_not_retried(opened, code, caplog):
    receiver = opened(GrpcReceiver([abort(code)]))
    assert run(receiver.exporter()).lost == {LossCause.REJECTED: SAMPLES}
    assert receiver.arrived == ALL[1:]
    assert receiver.requests == BATCHES
    assert "busy" in caplog.text, "the receiver's own words"


def test_a_slow_receiver_delays_only_its_own_queue(opened):
    over = threading.Event()

    def slow(_):
        over.wait(60)
        return b""

    receiver = opened(GrpcReceiver(iter(lambda: None if over.is_set() else slow, "never")))
    quick, patient = opened(GrpcReceiver([])), dataclasses.replace(QUICK, max_elapsed_time_s=60)
    queues = [ExportQueue(receiver.exporter(retry=patient)), ExportQueue(quick.exporter())]
    for number in range(BATCHES):
        for queue in queues:
            queue.put(numbered(number))
    assert queues[1].force_flush(20_000)
    assert quick.arrived == ALL
    assert queues[0].counts().queued == BATCHES * SAMPLES
    wait_until(lambda: receiver.requests >= 2)  # a request without a timely response is retried
    over.set()
    assert queues[0].force_flush(20_000)
    assert queues[0].counts().exported == BATCHES * SAMPLES
    for queue in queues:
        queue.shutdown()


@pytest.mark.parametrize("make", [OtlpGrpcExporter, OtlpHttpExporter])
def test_an_unreachable_receiver_is_retried(make):
    exporter = make(f"http://127.0.0.1:{free_port()}", retry=ONCE, proxy_url="")
    assert run(exporter).lost == {LossCause.RETRIES_EXHAUSTED: BATCHES * SAMPLES}
    assert "attempts" in exporter.find_outage()


def test_a_spool_keeps_every_sample_until_the_receiver_responds(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.export.queue._LONGEST_PAUSE_S", 0.05)
    receiver = opened(GrpcReceiver([abort(grpc.StatusCode.UNAVAILABLE)] * 30))
    never = RetryPolicy(initial_interval_s=0.01, max_interval_s=0.01, max_elapsed_time_s=0.05)
    queue = ExportQueue(
        receiver.exporter(retry=never), spool=Spool(str(tmp_path / "spool"), fsync=False)
    )
    for number in range(BATCHES):
        queue.put(numbered(number))
    assert queue.force_flush(20_000)
    queue.shutdown()
    assert queue.counts().exported == BATCHES * SAMPLES
    assert receiver.arrived == ALL


HTTP_RETRIED = {
    "429 with seconds": lambda h: h.reply(429, Retry_After="1"),
    "503 with a date": lambda h: h.reply(
        503, Retry_After=email.utils.format_datetime(
            email.utils.parsedate_to_datetime(email.utils.formatdate(time.time() + 1, usegmt=True))
        )
    ),
    "502": lambda h: h.reply(502),
    "hanging in the middle of its response": hang,
    "hanging up": lambda h: h.connection.shutdown(socket.SHUT_RDWR),
}  # fmt: skip


@pytest.mark.parametrize("name", HTTP_RETRIED)
def test_no_samples_are_lost_to_transient_http_errors(opened, name):
    receiver = opened(HttpReceiver([HTTP_RETRIED[name]]))
    started = time.monotonic()
    counts = run(receiver.exporter())
    assert (counts.exported, counts.lost) == (BATCHES * SAMPLES, {})
    assert receiver.arrived == ALL
    if name == "429 with seconds":
        assert time.monotonic() - started >= 1


def test_http_rejections_are_counted_and_not_retried(opened):
    receiver = opened(HttpReceiver([lambda h: h.reply(400, b"no", Content_Type="text/plain")]))
    assert run(receiver.exporter()).lost == {LossCause.REJECTED: SAMPLES}
    assert receiver.arrived == ALL[1:]
    assert receiver.requests == BATCHES


UNREADABLE = {
    "garbage": lambda h: h.reply(200, b"\xff\xff\xff", Content_Type="application/x-protobuf"),
    "another protocol": lambda h: h.reply(200, b"<html>", Content_Type="text/html"),
    "cut off": lambda h: h.reply(200, b"\n", Content_Length="100"),
    "without an end": flood,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_batch_is_not_exported_again_if_the_response_is_unreadable(opened, name, caplog):
    receiver = opened(HttpReceiver([UNREADABLE[name]] * 2))
    counts = run(receiver.exporter(timeout_s=5))
    assert (counts.exported, counts.lost) == (BATCHES * SAMPLES, {})
    assert receiver.requests == BATCHES
    assert caplog.text.count("its response is unreadable") == 1


def test_samples_rejected_in_a_partial_success_are_counted(opened):
    # partial_success { rejected_profiles: 1, error_message: "one too many" }
    partial = b"\x0a\x10\x08\x01\x12\x0cone too many"
    receiver = opened(GrpcReceiver([lambda _: partial]))
    batch = Batch(b"x", Form.PROTOBUF, tuple(ProfileSamples("on_cpu", n) for n in (2, 7)), 0, 1)
    counts = run(receiver.exporter(), [batch, numbered(1)])
    assert counts.lost == {LossCause.REJECTED: 7}, "never less than what may be missing"
    assert counts.exported == 2 + SAMPLES
    assert receiver.requests == 2


def test_batches_above_4_mib_are_lost_without_a_retry(opened):
    receiver = opened(GrpcReceiver([]))
    large = numbered(0, size=5 << 20)
    assert run(receiver.exporter(), [large]).lost == {LossCause.TOO_LARGE: SAMPLES}
    assert run(receiver.exporter(max_bytes=None, timeout_s=10), [large]).lost == {
        LossCause.TOO_LARGE: SAMPLES
    }
    assert receiver.arrived == []


def test_a_failed_dns_lookup_is_retried():
    exporter = OtlpHttpExporter("http://nowhere.invalid:4318", retry=ONCE, proxy_url="")
    assert run(exporter, [numbered(0)]).lost == {LossCause.RETRIES_EXHAUSTED: SAMPLES}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    for name in ("server", "stranger"):
        make_certificate(directory, name)
    return directory


def server_context(directory, newest=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem", directory / "server.key")
    if newest:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = newest
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context


@pytest.mark.parametrize(
    ("ca", "newest", "arrives"),
    [
        ("server", None, True),
        ("stranger", None, False),
        ("server", ssl.TLSVersion.TLSv1_1, False),
        ("server", ssl.TLSVersion.TLSv1_2, True),
    ],
    ids=["right", "wrong CA", "TLS 1.1", "TLS 1.2"],
)
def test_data_is_sent_only_over_tls_1_2_or_newer_and_only_to_verified_receivers(
    opened, certificates, ca, newest, arrives
):
    receiver = opened(HttpReceiver([], server_context(certificates, newest)))
    tls = Tls(ca_file=str(certificates / f"{ca}.pem"))
    counts = run(receiver.exporter(tls=tls, retry=ONCE, timeout_s=5), [numbered(0)])
    assert receiver.arrived == ([ALL[0]] if arrives else [])
    assert counts.exported == (SAMPLES if arrives else 0)
