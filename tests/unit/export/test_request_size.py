"""Batches are split if a receiver accepts only small requests, and later batches are smaller."""

import contextlib
import itertools
from collections import Counter
from types import SimpleNamespace

import grpc
import pytest

from otel_kprofiler.export import (
    ExportOutcome,
    ExportQueue,
    OtlpGrpcExporter,
    OtlpHttpExporter,
    RetryPolicy,
    Spool,
)
from otel_kprofiler.export.client import DEFAULT_MAX_BYTES
from otel_kprofiler.export.grpc_status import parse_limit
from otel_kprofiler.export.request_size import MIN_LEARNED_BYTES
from otel_kprofiler.model import OFF_CPU, ON_CPU, LossCause, Stack, Window, WindowSample
from otel_kprofiler.otlp import decode_windows, encode_window
from tests.servers import serve_grpc
from tests.unit.export.answers import accept_only, refuse
from tests.waiting import wait_until
from tests.windows import make_profile, make_window

pytestmark = pytest.mark.system

START = 1_700_000_000_000_000_000
COUNT = 300
"""The number of samples of each kind in a batch."""


def make(number=0, count=COUNT, name="thread", max_bytes=None):
    start = START + number * 10**9
    samples = [
        WindowSample(Stack(()), at + 1, f"{name} {at}", 0, None, [start + at])
        for at in range(count)
    ]
    groups = [({"process.pid": pid}, samples[pid::2]) for pid in (0, 1)]
    profiles = [make_profile(*groups, kind=kind) for kind in (ON_CPU, OFF_CPU)]
    return encode_window(Window(start, start + 10**9, profiles), max_bytes=max_bytes).batches


def stamps(payloads):
    return Counter(
        (profile.kind.name, sample.thread_name, stamp)
        for decoded in decode_windows(payloads)
        for profile in decoded.profiles
        for _, sample in profile.samples
        for stamp in sample.timestamps_unix_ns
    )


class LimitedGrpc:
    def __init__(self, limit, answer=lambda *_: b""):
        self.taken, self.answer = [], answer
        self.server, port = serve_grpc(self.export, max_bytes=limit)
        self.endpoint = f"http://127.0.0.1:{port}"

    def export(self, request, context):
        answer = self.answer(request, context)
        self.taken.append(request)
        return answer


@pytest.fixture
def limited():
    servers = []

    def start(limit, **more):
        servers.append(LimitedGrpc(limit, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.server.stop(0).wait()


@contextlib.contextmanager
def opened(exporter):
    try:
        yield exporter
    finally:
        exporter.shutdown(0)


@pytest.fixture
def http_exporter(http_receiver, quick):
    with opened(OtlpHttpExporter(http_receiver.endpoint, retry=quick, proxy_url="")) as exporter:
        yield exporter


def limit_http(receiver, limit, status=413, body=b""):
    """Limits requests to ``limit`` uncompressed bytes; returns the list of accepted requests."""
    return accept_only(receiver, lambda content: len(content) <= limit, status, body)


def check_all_arrived(exporter, batches, taken):
    for batch in batches:
        result = exporter.export(batch)
        assert result.counts() == batch.sample_counts
        assert (result.outcome, result.lost) == (ExportOutcome.SUCCESS, {})
    assert stamps(taken) == stamps([batch.payload for batch in batches])


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_grpc_receivers_size_limit_is_detected(limited, quick, compression, caplog):
    (batch,) = make()
    server = limited(len(batch.payload) // 3)
    with opened(
        OtlpGrpcExporter(server.endpoint, retry=quick, compression=compression)
    ) as exporter:
        check_all_arrived(exporter, make(), server.taken)
        assert exporter.encoding.max_bytes == exporter.max_bytes >= 64 << 10
    assert "rejects requests of" in caplog.text
    assert "dropping" not in caplog.text


@pytest.mark.parametrize(("status", "body"), [(413, b""), (400, b"http: request body too large")])
def test_an_http_receivers_size_limit_is_detected(http_receiver, http_exporter, status, body):
    """A Collector responds with 400, nginx and other servers with 413."""
    (batch,) = make()
    taken = limit_http(http_receiver, len(batch.payload) // 3, status, body)
    check_all_arrived(http_exporter, make(), taken)


def test_batches_encoded_after_a_rejection_are_within_the_receivers_limit(limited, quick):
    server = limited(100_000)
    asked = []

    class Noting(OtlpGrpcExporter):
        def _attempt(self, body, timeout_s):
            asked.append(len(body))
            return super()._attempt(body, timeout_s)

    with opened(Noting(server.endpoint, retry=quick, compression="none")) as exporter:
        assert exporter.export(*make(count=4000)).lost == {}
        assert max(asked) > 100_000
        assert exporter.max_bytes == 100_000, "as it said"
        asked.clear()
        for batch in make(1, 4000, max_bytes=exporter.encoding.max_bytes):
            assert exporter.export(batch).lost == {}
        assert max(asked) <= 100_000
        # An existing batch, such as a queued batch, is split before it is sent.
        asked.clear()
        assert exporter.export(*make(2, 4000)).lost == {}
        assert max(asked) <= 100_000
    assert sum(stamps(server.taken).values()) == 3 * 2 * 4000


def test_later_batches_are_split_up_front_to_the_accepted_size(http_receiver, http_exporter):
    """Responses do not state the accepted size, which may be below the minimum for encoding."""
    (batch,) = make()
    limit = len(batch.payload) // 6
    assert limit < MIN_LEARNED_BYTES
    taken = limit_http(http_receiver, limit)
    assert http_exporter.export(batch).lost == {}
    assert len(http_receiver.requests) > len(taken), "the limit is unknown at first"
    for number in (1, 2):
        http_receiver.requests.clear()
        taken.clear()
        check_all_arrived(http_exporter, make(number), taken)
        assert len(http_receiver.requests) == len(taken) > 1


def test_larger_requests_are_tried_again_later(http_receiver, http_exporter, monkeypatch, caplog):
    (batch,) = make()
    limit_http(http_receiver, len(batch.payload) // 6)
    assert http_exporter.export(batch).lost == {}
    http_receiver.script.clear()
    http_receiver.requests.clear()
    assert http_exporter.export(*make(1)).lost == {}
    assert len(http_receiver.requests) > 5
    monkeypatch.setattr("otel_kprofiler.export.request_size.TRY_LARGER_S", 0)
    http_receiver.requests.clear()
    assert http_exporter.export(*make(2)).lost == {}
    assert len(http_receiver.requests) == 1
    assert http_exporter.max_bytes == DEFAULT_MAX_BYTES
    assert caplog.text.count("rejects requests of") == 1


def test_a_receiver_that_accepts_no_sample_gets_one_request_per_batch(http_receiver, http_exporter):
    http_receiver.answer((413, {}, b""))
    assert http_exporter.export(*make()).lost == {LossCause.TOO_LARGE: 2 * COUNT}
    assert len(http_receiver.requests) < 60
    http_receiver.requests.clear()
    for number in (1, 2):
        result = http_exporter.export(*make(number))
        assert (result.exported, result.lost) == (0, {LossCause.TOO_LARGE: 2 * COUNT})
    assert len(http_receiver.requests) == 2
    http_receiver.script.clear()
    assert http_exporter.export(*make(3)).lost == {}
    assert http_exporter.max_bytes >= 64 << 10


def test_a_receiver_that_stops_accepting_gets_one_request_per_batch(http_receiver, http_exporter):
    http_receiver.answer((200, {}, b""), (413, {}, b""))
    assert http_exporter.export(*make()).exported == 2 * COUNT
    for number in (1, 2):
        assert http_exporter.export(*make(number)).lost == {LossCause.TOO_LARGE: 2 * COUNT}
    http_receiver.requests.clear()
    assert http_exporter.export(*make(3)).lost == {LossCause.TOO_LARGE: 2 * COUNT}
    assert len(http_receiver.requests) == 1


def test_splitting_is_retried_a_minute_after_it_failed(http_receiver, http_exporter, monkeypatch):
    clock = SimpleNamespace(now_s=1000)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("otel_kprofiler.export.request_size.time", clock)
    http_receiver.answer((413, {}, b""))
    for clock.now_s in (1000, 1020, 1040):
        assert http_exporter.export(*make()).lost == {LossCause.TOO_LARGE: 2 * COUNT}
    taken = limit_http(http_receiver, len(make()[0].payload) // 6)
    clock.now_s = 1061
    check_all_arrived(http_exporter, make(3), taken)


def test_later_batches_are_split_despite_one_oversized_sample(http_receiver, http_exporter):
    taken = limit_http(http_receiver, len(make()[0].payload) // 6)
    start = START + 10**9
    samples = [WindowSample(Stack(()), 1, "x" * 20_000, 0, None, [start])]
    (huge,) = encode_window(make_window(start, start + 10**9, ({}, samples))).batches
    assert http_exporter.export(huge).lost == {LossCause.TOO_LARGE: 1}
    check_all_arrived(http_exporter, make(3), taken)


def test_an_oversized_sample_is_counted_under_a_separate_cause(limited, quick, caplog):
    (small,) = make()
    (huge,) = make(1, count=2, name="x" * 3000)
    server = limited(len(small.payload) // 5)
    with opened(OtlpGrpcExporter(server.endpoint, retry=quick)) as exporter:
        result = exporter.export(small)
        assert (result.exported, result.lost) == (2 * COUNT, {})
        server = limited(2000)
    with opened(OtlpGrpcExporter(server.endpoint, retry=quick)) as exporter:
        result = exporter.export(huge)
        assert (result.outcome, result.exported) == (ExportOutcome.FAILURE, 0)
        assert result.kinds == {
            kind: (0, {LossCause.TOO_LARGE: 2}) for kind in ("on_cpu", "off_cpu")
        }
        assert "a single sample takes" in result.message
        assert exporter.export(*make(2, count=5)).lost == {}
    assert caplog.text.count("a single sample takes") == 1


MESSAGE = "message larger than max"
UNPACKED = "message after decompression larger than max"
TONIC = "decoded message length too large: found 5000 bytes, the limit is: 4096 bytes"


@pytest.mark.parametrize(
    ("code", "text", "limit"),
    [
        ("RESOURCE_EXHAUSTED", f"grpc: received {MESSAGE} (5000000 vs. 4194304)", 4194304),
        ("RESOURCE_EXHAUSTED", f"grpc: {UNPACKED} (5000 vs. 4096)", 4096),
        ("RESOURCE_EXHAUSTED", f"grpc: received {UNPACKED} 4096", 4096),
        ("RESOURCE_EXHAUSTED", "trying to send message larger than max (5000 vs. 4096)", 4096),
        ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (2000 vs. 1500)", 1500),
        ("RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (2000 vs. 1500)", 1500),
        ("RESOURCE_EXHAUSTED", "Decompressed message larger than max", 0),
        ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4096: 5000", 4096),
        ("RESOURCE_EXHAUSTED", "Decompressed gRPC message exceeds maximum size 4096", 4096),
        ("RESOURCE_EXHAUSTED", "Received message exceeds the maximum configured message size.", 0),
        ("OUT_OF_RANGE", f"Error, {TONIC}", 4096),
        ("UNKNOWN", "Received http2 header with status: 413", 0),
        ("UNKNOWN", "Payload Too Large", 0),
    ],
)  # fmt: skip
def test_size_errors_of_grpc_libraries_are_recognized(grpc_receiver, quick, code, text, limit):
    (batch,) = make()
    grpc_receiver.answer(refuse(grpc.StatusCode[code], text), b"")
    with opened(OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", retry=quick)) as exporter:
        result = exporter.export(batch)
        assert (result.exported, result.lost) == (2 * COUNT, {})
    assert len(grpc_receiver.requests) > 2
    assert parse_limit(text) == limit


@pytest.mark.parametrize("is_spooled", [False, True])
def test_remaining_parts_wait_while_a_receiver_is_down(limited, tmp_path, monkeypatch, is_spooled):
    monkeypatch.setattr("otel_kprofiler.export.queue._LONGEST_PAUSE_S", 0.02)
    (batch,) = make()
    calls = itertools.count(1)

    def answer(_, context):
        if next(calls) in range(3, 9):
            context.abort(grpc.StatusCode.UNAVAILABLE, "down")
        return b""

    server = limited(len(batch.payload) // 6, answer=answer)
    never = RetryPolicy(enabled=False)
    spool = Spool(str(tmp_path / "spool"), fsync=False) if is_spooled else None
    queue = ExportQueue(OtlpGrpcExporter(server.endpoint, retry=never), spool=spool)
    for number in range(3):
        queue.put(*make(number))
    assert queue.force_flush(30_000)
    queue.shutdown()
    counts = queue.counts()
    arrived = stamps(server.taken)
    assert max(arrived.values()) == 1
    assert counts.exported == sum(arrived.values())
    assert counts.exported + sum(counts.lost.values()) == 3 * 2 * COUNT
    for kind in ("on_cpu", "off_cpu"):
        of_kind = counts.kinds[kind]
        assert of_kind.exported + sum(of_kind.lost.values()) == 3 * COUNT
    if is_spooled:
        assert counts.lost == {}
        with contextlib.closing(Spool(str(tmp_path / "spool"), fsync=False)) as again:
            assert not again.waiting
    else:
        assert counts.lost.keys() == {LossCause.RETRIES_EXHAUSTED}
        assert counts.exported > 0


def test_remaining_parts_of_a_batch_are_left_for_the_next_run(limited, tmp_path):
    (batch,) = make()
    calls = itertools.count(1)

    def answer(_, context):
        if next(calls) > 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "down")
        return b""

    server = limited(len(batch.payload) // 6, answer=answer)
    never = RetryPolicy(enabled=False)
    queue = ExportQueue(
        OtlpGrpcExporter(server.endpoint, retry=never),
        spool=Spool(str(tmp_path / "spool"), fsync=False),
    )
    for number in range(2):
        queue.put(*make(number))
    # two parts were exported; exporting the third part failed
    wait_until(lambda: queue.counts().exported)
    queue.shutdown(500)
    first = queue.counts()
    assert first.exported == sum(stamps(server.taken).values()) > 0
    assert (first.exported + first.queued, first.lost) == (2 * 2 * COUNT, {})
    server.answer = lambda *_: b""
    queue = ExportQueue(
        OtlpGrpcExporter(server.endpoint, retry=never),
        spool=Spool(str(tmp_path / "spool"), fsync=False),
    )
    assert queue.force_flush(30_000)
    queue.shutdown()
    second = queue.counts()
    assert (second.carried, second.exported, second.lost) == (first.queued, first.queued, {})
    arrived = stamps(server.taken)
    assert sum(arrived.values()) == len(arrived) == 2 * 2 * COUNT


def test_lost_samples_in_a_split_batch_are_passed_to_the_callback(http_receiver, quick):
    """The callback records lost samples in files that hold unsent batches."""
    lost = []
    (batch,) = make()
    taken = limit_http(http_receiver, 4000)
    (with_huge,) = make(1, count=1, name="x" * 5000)
    exporter = OtlpHttpExporter(http_receiver.endpoint, retry=quick, proxy_url="")
    queue = ExportQueue(exporter, on_lost=lambda batch, cause: lost.append((batch, cause)))
    for one in (batch, with_huge):
        queue.put(one)
    assert queue.force_flush(30_000)
    queue.shutdown()
    assert queue.counts().lost == {LossCause.TOO_LARGE: 2}
    assert [cause for _, cause in lost] == [LossCause.TOO_LARGE] * len(lost)
    assert stamps([batch.payload for batch, _ in lost]) == stamps([with_huge.payload])
    assert stamps(taken) == stamps([batch.payload])
