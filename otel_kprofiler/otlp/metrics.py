"""Encodes opentelemetry-sdk metrics as protobuf, without the protobuf library.

The SDK's encoder would load 5 MB of code that the agent does not otherwise need. The field numbers
are in opentelemetry/proto/metrics/v1/metrics.proto and opentelemetry/proto/common/v1/common.proto.
Default values are omitted.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from otel_kprofiler.otlp.protobuf import key_value, message_field, text_field
from otel_kprofiler.otlp.wire import delimited, double, fixed64, varint
from otel_kprofiler.otlp.writer import KeyValue

_GAUGE: Final = b"\x2a"
_SUM: Final = b"\x3a"
_HISTOGRAM: Final = b"\x4a"


def encode_metrics(metrics: MetricsData) -> bytes:
    """Encodes sums, gauges and histograms as a request; raises ``TypeError`` for other metrics."""
    return _repeated(b"\x0a", map(_resource_metrics, metrics.resource_metrics))


def _resource_metrics(group: ResourceMetrics) -> bytes:
    return (
        delimited(b"\x0a", _attributes(b"\x0a", group.resource.attributes))
        + _repeated(b"\x12", map(_scope_metrics, group.scope_metrics))
        + text_field(b"\x1a", group.resource.schema_url)
    )


def _scope_metrics(group: ScopeMetrics) -> bytes:
    scope = group.scope
    described = text_field(b"\x0a", scope.name) + text_field(b"\x12", scope.version or "")
    return (
        delimited(b"\x0a", described + _attributes(b"\x1a", scope.attributes or {}))
        + _repeated(b"\x12", map(_metric, group.metrics))
        + text_field(b"\x1a", scope.schema_url or "")
    )


def _metric(metric: Metric) -> bytes:
    names = (
        text_field(b"\x0a", metric.name)
        + text_field(b"\x12", metric.description or "")
        + text_field(b"\x1a", metric.unit or "")
    )
    data = metric.data
    if isinstance(data, Sum):
        kind = b"\x10" + varint(data.aggregation_temporality)
        kind += b"\x18\x01" if data.is_monotonic else b""
        return names + delimited(_SUM, _repeated(b"\x0a", map(_number, data.data_points)) + kind)
    if isinstance(data, Gauge):
        return names + delimited(_GAUGE, _repeated(b"\x0a", map(_number, data.data_points)))
    if isinstance(data, Histogram):
        kind = b"\x10" + varint(data.aggregation_temporality)
        points = _repeated(b"\x0a", map(_distribution, data.data_points))
        return names + delimited(_HISTOGRAM, points + kind)
    raise TypeError(f"{metric.name}: metrics of type {type(data).__name__} are not supported")


def _number(point: NumberDataPoint) -> bytes:
    # Zeros are written, because the field determines the type.
    value = (
        b"\x31" + struct.pack("<q", point.value)
        if isinstance(point.value, int)
        else b"\x21" + double(point.value)
    )
    return _times(point) + value + _attributes(b"\x3a", point.attributes)


def _distribution(point: HistogramDataPoint) -> bytes:
    counts, bounds = point.bucket_counts, point.explicit_bounds
    return (
        _times(point)
        + (b"\x21" + fixed64(point.count) if point.count else b"")
        + (b"\x29" + double(point.sum))
        + _packed(b"\x32", f"<{len(counts)}Q", counts)
        + _packed(b"\x3a", f"<{len(bounds)}d", bounds)
        + _attributes(b"\x4a", point.attributes)
        + (b"\x59" + double(point.min) + b"\x61" + double(point.max))
    )


def _times(point: NumberDataPoint | HistogramDataPoint) -> bytes:
    start = point.start_time_unix_nano
    return (b"\x11" + fixed64(start) if start else b"") + b"\x19" + fixed64(point.time_unix_nano)


def _attributes(tag: bytes, attributes: Mapping[str, Any] | None) -> bytes:
    return b"".join(
        [tag + key_value(KeyValue(key, value)) for key, value in (attributes or {}).items()]
    )


def _repeated(tag: bytes, messages: Iterable[bytes]) -> bytes:
    return b"".join([delimited(tag, message) for message in messages])


def _packed(tag: bytes, layout: str, numbers: Iterable[float]) -> bytes:
    return message_field(tag, struct.pack(layout, *numbers))
