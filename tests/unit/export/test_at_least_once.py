"""Delivery and accounting are right when responses are lost or are not OTLP."""

import gzip

import pytest
from grpc import StatusCode
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from otel_kprofiler.export import ExportQueue, OtlpGrpcExporter, OtlpHttpExporter
from otel_kprofiler.model import Stack, WindowSample
from otel_kprofiler.otlp import encode_window
from tests.windows import make_window

pytestmark = pytest.mark.system

SAMPLES = 5


def make_batch(exporter):
    group = [WindowSample(Stack(()), 1, "main", cpu, None, [10 + cpu]) for cpu in range(SAMPLES)]
    window = make_window(10, 20, ({"a": "b"}, group))
    (batch,) = encode_window(window, **exporter.encoding._asdict()).batches
    return batch


def send(exporter):
    queue = ExportQueue(exporter)
    queue.put(make_batch(exporter))
    queue.shutdown()
    return queue.counts()


def profiles(payload):
    return {
        profile.profile_id: len(profile.samples)
        for resource in ExportProfilesServiceRequest.FromString(payload).resource_profiles
        for scope in resource.scope_profiles
        for profile in scope.profiles
    }


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_resent_batches_keep_their_profile_ids(grpc_receiver, http_receiver, quick, kind):
    """The receiver stores the request, but the response is lost."""
    if kind == "grpc":
        grpc_receiver.answer(lambda _, context: context.abort(StatusCode.UNAVAILABLE, "gone"), b"")
        exporter = OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", retry=quick)
    else:
        http_receiver.answer(lambda _: None, (200, {}, b""))
        exporter = OtlpHttpExporter(http_receiver.endpoint, retry=quick, proxy_url="")
    counts = send(exporter)
    if kind == "grpc":
        stored = [profiles(request) for request, _ in grpc_receiver.requests]
    else:
        stored = [profiles(gzip.decompress(body)) for _, _, body in http_receiver.requests]
    assert len(stored) == 2
    assert stored[0] == stored[1]
    assert sum((stored[0] | stored[1]).values()) == counts.exported == SAMPLES


def test_a_batch_whose_grpc_response_is_unreadable_is_delivered_once(grpc_receiver, quick, caplog):
    """The receiver stores the request, but a proxy responds with a page instead."""
    grpc_receiver.answer(b"<html>welcome</html>")
    counts = send(OtlpGrpcExporter(f"http://{grpc_receiver.endpoint}", retry=quick))
    assert len(grpc_receiver.requests) == 1
    assert (counts.exported, counts.lost) == (SAMPLES, {})
    assert "its response is unreadable" in caplog.text
