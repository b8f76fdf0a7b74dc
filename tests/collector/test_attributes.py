"""Processors and exporters of a real Collector receive the resource and scope attributes."""

import re

import pytest

from otel_kprofiler.export import ExportOutcome
from otel_kprofiler.model import AttributeForm, Stack, WindowSample
from otel_kprofiler.otlp import Scope, encode_window
from tests.collector.test_delivery import open_exporter
from tests.windows import make_window

START = 1_790_000_000_000_000_001
SCOPE = Scope("library", "1", {"scope.text": "text", "scope.number": 7})
KINDS = ["grpc", "http/protobuf", "http/json"]


def window():
    samples = [WindowSample(Stack(()), 1, "main", 0, None, [START])]
    groups = (
        ({"service.name": f"service-{pid}", "process.pid": pid, "host.tags": ("a", "b")}, samples)
        for pid in (17, 42)
    )
    return make_window(START, START + 10**9, *groups, period_ns=10_000_000)


def send(collector, kind, **options):
    exporter = open_exporter(kind, collector, **options)
    (batch,) = encode_window(window(), scope=SCOPE, **exporter.encoding._asdict()).batches
    assert exporter.export(batch).outcome is ExportOutcome.SUCCESS
    exporter.shutdown()
    collector.requests(1)
    collector.stop()


def shown(collector):
    text = collector.log
    results = {}
    for heading in ("Resource attributes", "InstrumentationScope attributes"):
        blocks = re.findall(rf"^{heading}:\n((?: +-> .*\n)+)", text, re.MULTILINE)
        results[heading] = [set(re.findall(r"-> (.*)", block)) for block in blocks]
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_processors_and_exporters_receive_attribute_keys_and_values(processing_collector, kind):
    send(processing_collector, kind)
    result = shown(processing_collector)
    tags = 'host.tags: Slice(["a","b"])'
    assert result["Resource attributes"] == [
        {f"service.name: Str({name})", f"service.copy: Str({name})", tags}
        for name in ("service-17", "service-42")
    ]
    assert (
        result["InstrumentationScope attributes"]
        == [{"scope.text: Str(text)", "scope.number: Int(7)"}] * 2
    )


def test_the_tested_collectors_do_not_resolve_references_over_grpc(processing_collector):
    """Attributes are inline by default: these Collectors resolve references only in files."""
    send(processing_collector, "grpc", attributes=AttributeForm.REFERENCES)
    result = shown(processing_collector)["Resource attributes"]
    assert all(item.startswith(": ") for block in result for item in block)
