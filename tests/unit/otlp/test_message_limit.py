"""Requests with too many messages are rejected before they are decoded."""

import json
import random

import pytest
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.otlp import refuse_many_messages
from otel_kprofiler.otlp.message_limit import _children, _count
from tests.wire import pack_field

COUNT = 200_000


def nested(data, fields):
    """Wraps data in nested messages with the field numbers ``fields``, outermost first."""
    for field in reversed(fields):
        data = pack_field(field, data)
    return data


@pytest.mark.parametrize(
    ("fields", "inner"),
    [((), 1), ((1,), 2), ((1, 2), 2), ((1, 2, 2), 2), ((2,), 4), ((1, 1), 1), ((1, 1, 1, 2, 5), 1)],
    ids=str,
)
def test_empty_messages_are_rejected_at_every_depth(fields, inner):
    data = nested(bytes([inner << 3 | 2, 0]) * COUNT, fields)
    ExportProfilesServiceRequest.FromString(data)
    with pytest.raises(PayloadError, match="contains more than"):
        refuse_many_messages(data)


@pytest.mark.parametrize("field", [b"\x1b\x1c", b"\x1b\n\0\x1c", b"\x18" + b"\xff" * 9 + b"\x7f"])
def test_messages_after_unknown_fields_that_the_decoder_skips_are_counted(field):
    """The unknown fields are groups and varints longer than 64 bits."""
    data = field + b"\n\0" * COUNT
    assert len(ExportProfilesServiceRequest.FromString(data).resource_profiles) == COUNT
    with pytest.raises(PayloadError, match="contains more than"):
        refuse_many_messages(data)


def test_empty_json_objects_are_rejected():
    data = json.dumps({"resourceProfiles": [{}] * COUNT}).encode()
    with pytest.raises(PayloadError, match="contains more than"):
        refuse_many_messages(data)


def count_by_protobuf(message):
    total = 0
    for field, value in message.ListFields():
        if field.message_type:
            for one in [value] if hasattr(value, "ListFields") else value:
                total += 1 + count_by_protobuf(one)
    return total


def test_the_message_count_matches_the_protobuf_library():
    rng = random.Random(1)
    request = ExportProfilesServiceRequest()
    for _ in range(5):
        scopes = request.resource_profiles.add()
        scopes.resource.attributes.add(key="a").value.array_value.values.add(int_value=300)
        for _ in range(rng.randrange(4)):
            profiles = scopes.scope_profiles.add()
            profile = profiles.profiles.add(time_unix_nano=1 << 60, original_payload=b"\n\0" * 50)
            profile.sample_type.type_strindex = 3
            for _ in range(rng.randrange(300)):
                profile.samples.add(stack_index=rng.randrange(1 << 20), values=[1, 1 << 40])
    for _ in range(50):
        request.dictionary.location_table.add(address=rng.randrange(1 << 60)).lines.add(line=7)
        request.dictionary.string_table.append("\n\0" * rng.randrange(200))
    data = request.SerializeToString()
    children = _children(ExportProfilesServiceRequest.DESCRIPTOR)
    assert _count(data, children, 10**9) == count_by_protobuf(request)
    for cut in rng.sample(range(len(data)), 200):
        _count(data[:cut], children, 10**9)
    refuse_many_messages(data)
