"""The encoder and the OpenTelemetry SDK produce the same metrics messages."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics as encode_by_sdk
from opentelemetry.metrics import Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from otel_kprofiler.otlp import encode_metrics

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
INTEGERS = st.integers(-(2**61), 2**61)  # so that the sum of four values fits in an int64
NUMBERS = INTEGERS | st.floats(allow_nan=False)
VALUES = TEXTS | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.lists(TEXTS, max_size=3)
ATTRIBUTES = st.dictionaries(TEXTS.filter(bool), VALUES, max_size=4)
DURATIONS = st.lists(st.tuples(st.floats(0, 1e9), ATTRIBUTES), max_size=6)
OBSERVATIONS = st.lists(st.tuples(NUMBERS, ATTRIBUTES), max_size=4)


def collect(resource, scope, durations, observations):
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], Resource(resource, "https://schema"))
    meter = provider.get_meter("otel_kprofiler", *scope)
    histogram = meter.create_histogram("duration", "s", "text")
    bare = meter.create_histogram("bare", explicit_bucket_boundaries_advisory=[])
    for seconds, attributes in durations:
        histogram.record(seconds, attributes)
        bare.record(seconds, attributes)
    for create, name in (
        (meter.create_observable_counter, "counter"),
        (meter.create_observable_up_down_counter, "level"),
        (meter.create_observable_gauge, "gauge"),
    ):
        create(name, [lambda _: [Observation(*entry) for entry in observations]], "{x}", "")
    data = reader.get_metrics_data()
    provider.shutdown()
    return data


@settings(deadline=None)
@given(ATTRIBUTES, st.tuples(TEXTS, TEXTS) | st.just(()), DURATIONS, OBSERVATIONS)
def test_encoded_metrics_match_those_from_the_sdk_encoder(resource, scope, durations, observations):
    data = collect(resource, scope, durations, observations)
    if data is not None:
        assert ExportMetricsServiceRequest.FromString(encode_metrics(data)) == encode_by_sdk(data)


def test_all_metric_types_in_use_match_the_sdk_encoder():
    data = collect({"a": 1}, ("1.0", "u"), [(2.5, {"b": "c"})], [(0, {}), (-3, {"d": True})])
    request = ExportMetricsServiceRequest.FromString(encode_metrics(data))
    (scope,) = request.resource_metrics[0].scope_metrics
    assert {metric.name: metric.WhichOneof("data") for metric in scope.metrics} == {
        "duration": "histogram", "bare": "histogram", "counter": "sum", "level": "sum",
        "gauge": "gauge",
    }  # fmt: skip
    assert request == encode_by_sdk(data)


def test_metrics_of_an_unknown_type_are_an_error():
    data = collect({}, (), [(1.0, {})], [])
    metric = SimpleNamespace(name="odd", description="", unit="", data=object())
    data.resource_metrics[0].scope_metrics[0].metrics[:] = [metric]
    with pytest.raises(TypeError, match="odd"):
        encode_metrics(data)


@pytest.mark.system
def test_encoding_metrics_does_not_load_protobuf():
    code = (
        "import sys\n"
        "import otel_kprofiler.agent.metrics\n"
        "sys.exit('google.protobuf' in sys.modules or 'opentelemetry.sdk.trace' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
