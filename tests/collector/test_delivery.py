"""Every sample in a real Collector's output file is identical to the exported sample."""

import logging
import time

import pytest

from otel_kprofiler.export import (
    ExportOutcome,
    ExportQueue,
    OtlpGrpcExporter,
    OtlpHttpExporter,
    RetryPolicy,
)
from otel_kprofiler.model import (
    KERNEL_SIDE,
    USER_SIDE,
    Batch,
    BuildId,
    FileId,
    Form,
    Frame,
    Line,
    LossCause,
    Module,
    ModuleKind,
    ProfileSamples,
    SpanLink,
    Stack,
    StreamTotals,
    Unresolved,
    WindowSample,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window
from tests.collector.conftest import ALL_VERSIONS, GATE
from tests.further import further
from tests.windows import make_window

START = 1_790_000_000_000_000_001
ONCE = RetryPolicy(enabled=False)

VMLINUX = Module("vmlinux", ModuleKind.VMLINUX, BuildId("ab" * 20), FileId("1" * 32), 0xFFFF << 48)
EXT4 = Module("ext4", ModuleKind.LOADED, None, FileId("2" * 32), 0xFFFFC0 << 40)
READ = Frame(EXT4, 0x1234, (Line("ext4_file_read_iter"),), 4, KERNEL_SIDE)
VFS = Frame(VMLINUX, 0x99, (Line("inlined"), Line("vfs_read", "vfs_read.cold")), 9, KERNEL_SIDE)
GAP = Frame(VMLINUX, 0x77, (), 0, KERNEL_SIDE, Unresolved.NO_SYMBOL)
USER = Frame(None, 0x7F0012345678, (), 0, USER_SIDE, Unresolved.USER_ADDRESS)
STACKS = (
    Stack.from_frames((READ, VFS, USER)),
    Stack.from_frames((GAP,)),
    Stack.from_frames((VFS, GAP, USER, USER)),
)


def window_of(processes=5, samples=40):
    """Returns a window with several processes and stacks. Some samples have links."""
    groups = []
    for process in range(processes):
        attributes = {"service.name": f"service-{process}", "process.pid": 100 + process}
        samples_of_process = [
            WindowSample(
                STACKS[number % 3],
                1000 + number,
                f"worker/{number}",
                number % 2,
                SpanLink(bytes([process + 1] * 16), (number + 1).to_bytes(8))
                if number % 4
                else None,
                [START + process + number * 1000 + times for times in range(number % 3 + 1)],
            )
            for number in range(samples)
        ]
        groups.append((attributes, samples_of_process))
    return make_window(START, START + 10**9, *groups, period_ns=10_101_010)


def expected(window):
    """Yields all samples of a window in the form that ``resolve`` in conftest.py uses."""
    kind = ("samples", "count", "cpu", "nanoseconds")
    for group in window.profiles[0].resources:
        resource = tuple(sorted(group.resource.attributes.items()))
        for sample in group.samples:
            attributes = (
                ("cpu.logical_number", sample.cpu),
                ("thread.id", sample.tid),
                ("thread.name", sample.thread_name),
            )
            frames = tuple(
                (
                    frame.module.name if frame.module else "",
                    frame.address,
                    tuple(line.function for line in frame.lines),
                )
                for frame in sample.stack.frames
            )
            link = sample.link and (sample.link.trace_id.hex(), sample.link.span_id.hex())
            period_ns = window.profiles[0].period_ns
            for timestamp in sample.timestamps_unix_ns:
                yield resource, kind, period_ns, attributes, frames, link or ("", ""), timestamp


def open_exporter(kind, collector, **options):
    if kind == "grpc":
        return OtlpGrpcExporter(f"http://{collector.grpc_endpoint}", **options)
    form = Form.JSON if kind == "http/json" else Form.PROTOBUF
    return OtlpHttpExporter(collector.http_endpoint, form=form, proxy_url="", **options)


@pytest.mark.parametrize("kind", ["grpc", "http/protobuf", "http/json"])
@pytest.mark.parametrize("compression", ["gzip", *further("none")])
@pytest.mark.parametrize("collector", ALL_VERSIONS, indirect=True)
def test_all_samples_arrive_unchanged(collector, samples_of, kind, compression):
    window = window_of()
    exporter = open_exporter(kind, collector, compression=compression, max_bytes=6_000)
    encoded = encode_window(window, form=exporter.form, max_bytes=exporter.max_bytes)
    assert len(encoded.batches) > 2
    queue = ExportQueue(exporter)
    for batch in encoded.batches:
        queue.put(batch)
    queue.shutdown()
    counts = queue.counts()
    assert (counts.exported, counts.lost) == (window.sample_count, {})
    arrived = samples_of(collector.requests(len(encoded.batches)))
    assert sorted(arrived) == sorted(expected(window))
    # Compare the counts with the file's content, not only with each other.
    assert len(arrived) == counts.exported


@pytest.mark.parametrize("kind", ["grpc", "http/protobuf", "http/json"])
def test_loss_counts_reach_the_collector_even_without_samples(collector, kind):
    """A Collector forwards a sample with value 0, but drops requests without samples."""
    totals = StreamTotals("ab", 7, 9, {LossCause.RING_FULL: 2, LossCause.SHUTDOWN: 7})
    window = make_window(START, START + 1, ({"host.name": "here"}, ()), totals=totals)
    exporter = open_exporter(kind, collector)
    (batch,) = encode_window(window, form=exporter.form).batches
    assert check_payload(batch.payload) == []
    assert exporter.export(batch).outcome is ExportOutcome.SUCCESS
    exporter.shutdown()
    collector.requests(1)
    (arrived,) = decode_windows(collector.output.read_bytes())
    assert (arrived.sample_count, arrived.profiles[0].totals) == (0, totals)


def test_a_batch_at_the_default_size_limit_is_accepted(collector, samples_of):
    """The exporters' default limit is just under the 4 MiB that gRPC receivers accept."""
    window = window_of(processes=30, samples=3_000)
    exporter = open_exporter("grpc", collector)
    encoded = encode_window(window, max_bytes=exporter.max_bytes)
    assert len(encoded.batches[0].payload) > 0.95 * exporter.max_bytes
    assert [exporter.export(batch).outcome for batch in encoded.batches] == [
        ExportOutcome.SUCCESS
    ] * len(encoded.batches)
    exporter.shutdown()
    assert len(samples_of(collector.requests(len(encoded.batches)))) == window.sample_count


def test_a_collector_that_closes_old_connections_receives_each_sample_once(
    open_collector, samples_of
):
    """The Collector announces the end of each connection (RFC 9113, 6.8), even during a call."""
    collector = open_collector(keepalive="max_connection_age: 100ms")
    exporter = open_exporter("grpc", collector, retry=ONCE)
    window = window_of()
    (batch,) = encode_window(window).batches
    began, count = time.monotonic(), 0
    while time.monotonic() < began + 3:
        assert exporter.export(batch).exported == batch.sample_count
        count += 1
    exporter.shutdown()
    assert len(samples_of(collector.requests(count))) == count * window.sample_count


def test_a_message_above_4_mib_is_too_large_and_not_retried(collector):
    exporter = open_exporter("grpc", collector, max_bytes=None)
    result = exporter.export(
        Batch(b"\x00" * (5 << 20), Form.PROTOBUF, (ProfileSamples("on_cpu", 7),), START, START + 1)
    )
    assert (result.lost, result.error_type) == ({LossCause.TOO_LARGE: 7}, "too_large")
    exporter.shutdown()


@pytest.mark.parametrize("kind", ["grpc", "http/protobuf", "http/json"])
def test_the_result_for_garbage_contains_the_collectors_error_message(collector, kind):
    exporter = open_exporter(kind, collector)
    result = exporter.export(
        Batch(b"\xff\xff", exporter.form, (ProfileSamples("on_cpu", 7),), START, START + 1)
    )
    assert result.lost == {LossCause.REJECTED: 7}
    assert result.message
    exporter.shutdown()


@pytest.mark.parametrize("kind", ["grpc", "http/protobuf", "http/json"])
def test_a_collector_without_support_for_profiles_is_reported_once(open_collector, kind, caplog):
    collector = open_collector(profiles=False)
    caplog.set_level(logging.WARNING)
    exporter = open_exporter(kind, collector)
    (batch,) = encode_window(window_of(), form=exporter.form).batches
    for _ in range(3):
        result = exporter.export(batch)
        assert result.lost == {LossCause.REJECTED: batch.sample_count}
        assert GATE in result.message
    assert [GATE in message for message in caplog.messages] == [True]
    exporter.shutdown()


def test_samples_for_a_stopped_collector_are_lost_after_the_last_retry(open_collector):
    collector = open_collector()
    exporter = open_exporter("grpc", collector, retry=ONCE)
    (batch,) = encode_window(window_of()).batches
    assert exporter.export(batch).exported == batch.sample_count
    collector.stop()
    assert exporter.export(batch).lost == {LossCause.RETRIES_EXHAUSTED: batch.sample_count}
    exporter.shutdown()
