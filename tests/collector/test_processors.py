"""Tests requests that a real Collector has processed and exported to the next receiver."""

import pytest

from otel_kprofiler.export import ExportOutcome
from otel_kprofiler.otlp import encode_window
from otel_kprofiler.processes import Grain, merge_resources
from tests.collector.test_delivery import expected, open_exporter, window_of
from tests.strict_receiver import EQUAL_LABELS, NO_FUNCTION, StrictReceiver
from tests.windows import move_window

KINDS = ["grpc", "http/protobuf", "http/json"]
PROCESSORS = """
  memory_limiter: {check_interval: 1s, limit_mib: 1024}
  filter:
    error_mode: propagate
    profiles: {resource: ['attributes["service.name"] == "service-3"']}
  transform:
    error_mode: propagate
    profile_statements:
      - context: resource
        statements: ['set(attributes["deployment.environment.name"], "test")']
  resource/add:
    attributes: [{key: service.copy, from_attribute: service.name, action: insert}]
  resource/remove:
    attributes: [{key: process.pid, action: delete}, {key: service.name, action: delete}]
"""
EXPORTERS = """
  otlp:
    endpoint: {grpc}
    tls: {{insecure: true}}
    timeout: 60s  # a Collector that stops does not retry
    wait_for_ready: true
    sending_queue:
      batch: {{flush_timeout: 2s, min_size: 1000000, max_size: 0}}
  otlphttp:
    profiles_endpoint: {http}/v1development/profiles
    tls: {{insecure: true}}
    timeout: 60s
"""
PIPELINE = "profiles: {{receivers: [otlp], processors: [{}], exporters: [{}]}}"
ALL = "memory_limiter, filter, transform, resource/add"


@pytest.fixture
def receiver():
    receiver = StrictReceiver()
    yield receiver
    receiver.close()


@pytest.fixture
def send(open_collector, receiver):
    def run(version, kind, windows, processors, exporter="otlp"):
        collector = open_collector(
            version,
            pipelines=PIPELINE.format(processors, exporter),
            processors=PROCESSORS.strip(),
            exporters=EXPORTERS.format(grpc=receiver.grpc, http=receiver.http).strip(),
        )
        client = open_exporter(kind, collector)
        for window in windows:
            for batch in encode_window(window, **client.encoding._asdict()).batches:
                assert client.export(batch).outcome is ExportOutcome.SUCCESS
        client.shutdown()
        collector.stop()  # flushes its batch processor
        return collector

    return run


def changed(sample):
    """Returns a sample as changed by the processors, or None if the filter drops it."""
    resource = dict(sample[0])
    if resource["service.name"] == "service-3":
        return None
    resource |= {"deployment.environment.name": "test", "service.copy": resource["service.name"]}
    return (tuple(sorted(resource.items())), *sample[1:])


@pytest.mark.parametrize("version", ["0.161.0", "0.159.0"])
@pytest.mark.parametrize("kind", KINDS)
def test_processors_and_batching_change_samples_only_as_configured(
    send, receiver, samples_of, version, kind
):
    windows = [move_window(window_of(), second * 10**9) for second in range(10)]
    send(version, kind, windows, ALL)
    sent = [sample for window in windows for sample in expected(window)]
    wanted = [after for sample in sent if (after := changed(sample))]
    assert 0 < len(wanted) < len(sent)
    assert receiver.refused == []
    assert len(receiver.accepted["grpc"]) < len(windows), "requests are merged"
    assert sorted(samples_of(receiver.requests("grpc"))) == sorted(wanted)
    assert receiver.complaints["grpc"].keys() == {NO_FUNCTION}


def test_newer_collectors_send_attribute_keys_as_references_over_http(send, receiver, samples_of):
    """Collector v0.161 writes references over HTTP, so it should send to Pyroscope over gRPC."""
    window = window_of()
    send("0.161.0", "grpc", [window], "memory_limiter", "otlphttp")
    assert receiver.accepted == {}
    assert receiver.refused[0] == "attribute key at index 0 in resource attributes is empty"
    send("0.159.0", "grpc", [window], "memory_limiter", "otlphttp")
    arrived = samples_of(receiver.requests("application/x-protobuf"))
    assert sorted(arrived) == sorted(expected(window))


@pytest.mark.parametrize("version", ["0.161.0", "0.159.0"])
def test_removing_attributes_causes_duplicate_labels_unless_resources_are_merged(
    send, receiver, samples_of, version
):
    window = window_of()
    send(version, "grpc", [window], "resource/remove")
    assert receiver.complaints["grpc"][EQUAL_LABELS] == len(window.profiles[0].resources) - 1
    merged = merge_resources(move_window(window, 60 * 10**9), Grain.HOST, ())
    send(version, "grpc", [merged], "resource/remove")
    assert receiver.complaints["grpc"][EQUAL_LABELS] == len(window.profiles[0].resources) - 1
    assert len(samples_of(receiver.requests("grpc"))) == 2 * window.sample_count
