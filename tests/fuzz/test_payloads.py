"""Hostile and corrupt OTLP profiles are rejected, or read at low cost."""

import contextlib
import json

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import Line
from otel_kprofiler.otlp import check_payload, decode_windows, name_locations
from otel_kprofiler.otlp.check import MAX_PLACES, MAX_VIOLATIONS
from otel_kprofiler.otlp.messages import ExportProfilesServiceRequest
from otel_kprofiler.otlp.payloads import MAX_NOTES
from tests.further import further_of
from tests.fuzz.bounds import READ, REFUSED, read_within

pytestmark = pytest.mark.fuzz


def request():
    """Returns a request whose dictionary has only zero entries, and the request's only profile."""
    message = ExportProfilesServiceRequest()
    dictionary = message.dictionary
    dictionary.string_table.append("")
    for table in ("mapping", "location", "function", "link", "attribute", "stack"):
        getattr(dictionary, f"{table}_table").add()
    message.resource_profiles.add().scope_profiles.add().profiles.add()
    return message, message.resource_profiles[0].scope_profiles[0].profiles[0]


def counts_without_timestamps():
    message, profile = request()
    for _ in range(1500):
        profile.samples.add().values.append(1_000_000)
    return message


def one_deep_stack_for_all():
    message, profile = request()
    dictionary = message.dictionary
    dictionary.location_table.add(address=1)
    dictionary.stack_table.add().location_indices.extend([1] * 200_000)
    for index in range(200_000):
        profile.samples.add(stack_index=1, timestamps_unix_nano=[index])
    return message


def one_long_list_for_all(key, owner):
    message, profile = request()
    dictionary = message.dictionary
    dictionary.string_table.extend([key, "profile.frame.type", "kernel"])
    attribute = dictionary.attribute_table.add(key_strindex=1)
    attribute.value.array_value.values.extend([AnyValue(string_value="x")] * 100_000)
    for index in range(50_000):
        if owner == "sample":
            profile.samples.add(attribute_indices=[1], timestamps_unix_nano=[index])
        else:
            dictionary.location_table.add(address=index, attribute_indices=[1])
    return message


def one_long_name_for_all():
    message, profile = request()
    dictionary = message.dictionary
    dictionary.string_table.extend([" [" * 500_000, "profile.frame.type"])
    dictionary.attribute_table.add(key_strindex=2).value.string_value = "kernel"
    dictionary.function_table.add(name_strindex=1)
    dictionary.mapping_table.add(filename_strindex=1)
    dictionary.attribute_table.add(key_strindex=1, unit_strindex=1).value.int_value = 1
    for index in range(20_000):
        place = dictionary.location_table.add(address=index, attribute_indices=[1, 2, 2])
        place.mapping_index = 1
        place.lines.add(function_index=1)
    profile.samples.add(timestamps_unix_nano=[1])
    return message


def lists_in_lists():
    message, _ = request()
    value = message.dictionary.attribute_table.add().value
    for _ in range(40):
        value = value.array_value.values.add()
    value.string_value = "'\"\\"
    return message


def maps_of_one_long_text():
    message, _ = request()
    message.dictionary.string_table.append("x" * 1_000_000)
    items = message.dictionary.attribute_table.add().value.kvlist_value.values
    for index in range(10_000):
        items.add(key=str(index)).value.string_value_strindex = 1
    return message


def many_equal_keys():
    message, profile = request()
    message.dictionary.string_table.append("key")
    for _ in range(50_000):
        message.dictionary.attribute_table.add(key_strindex=1)
    profile.samples.add(timestamps_unix_nano=[1]).attribute_indices.extend(range(1, 50_001))
    return message


BOMBS = {
    "counts": (counts_without_timestamps, READ),
    "stack": (one_deep_stack_for_all, READ),
    "name of threads": (lambda: one_long_list_for_all("thread.name", "sample"), READ),
    "modules": (lambda: one_long_list_for_all("otel_kprofiler.module.builtin", "location"), READ),
    "name of functions": (one_long_name_for_all, READ),
    "lists": (lists_in_lists, READ),
    "maps": (maps_of_one_long_text, REFUSED),
    "keys": (many_equal_keys, READ),
}


@pytest.mark.parametrize(
    "bomb", further_of(BOMBS, ("counts", "modules", "name of functions", "lists", "maps", "keys"))
)
def test_reading_a_small_payload_takes_little_memory_and_time(bomb):
    make, outcome = BOMBS[bomb]
    payload = make().SerializeToString()
    assert len(payload) < 5_000_000
    assert read_within(lambda: decode_windows(payload)) == outcome
    assert read_within(lambda: check_payload(payload)) == READ


def test_the_nesting_depth_of_json_is_limited():
    value = '{"stringValue":"x"}'
    for _ in range(80):
        value = '{"arrayValue":{"values":[' + value + "]}}"
    tables = {"stringTable": [""], "attributeTable": ["@"]}
    payload = json.dumps({"dictionary": tables}).replace('"@"', '{"value":' + value + "}")
    with pytest.raises(PayloadError, match="nested more than 64"):
        decode_windows(payload.encode())


def test_the_number_of_reported_deviations_and_violations_is_limited():
    line = json.dumps({"unknown": 1}).encode() + b"\n"
    result = check_payload(line * 5000)
    assert MAX_VIOLATIONS < len(result) < MAX_VIOLATIONS + 100
    assert "not checked" in result[0].message
    many = b'{"resourceProfiles":[{"scopeProfiles":[{"profiles":[{"samples":[%b]}]}]}]}'
    result = check_payload(many % b",".join([b'{"x":1}'] * 5000))
    by_rule = [violation.rule for violation in result]
    assert by_rule.count("json-names") == MAX_NOTES
    assert max(map(by_rule.count, by_rule)) == MAX_PLACES


def test_an_otlp_message_above_the_size_limit_is_rejected(monkeypatch):
    monkeypatch.setattr("otel_kprofiler.otlp.payloads.MAX_MESSAGE_BYTES", 100)
    payload = one_long_name_for_all().SerializeToString()
    framed = len(payload).to_bytes(4, "big") + payload
    for data in (payload, framed, b'{"a":"' + b"x" * 200 + b'"}'):
        with pytest.raises(PayloadError, match="larger than"):
            decode_windows(data)


def small():
    message, profile = request()
    dictionary = message.dictionary
    dictionary.string_table.extend(["samples", "count", "cpu", "nanoseconds", "thread.id", "f"])
    dictionary.attribute_table.add(key_strindex=5).value.int_value = 7
    dictionary.function_table.add(name_strindex=6)
    dictionary.mapping_table.add(memory_limit=4096, filename_strindex=6)
    dictionary.location_table.add(mapping_index=1, address=16).lines.add(function_index=1)
    dictionary.stack_table.add().location_indices.append(1)
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 1, 2
    profile.samples.add(stack_index=1, attribute_indices=[1], timestamps_unix_nano=[5])
    return message.SerializeToString()


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 20), st.binary(max_size=12)), max_size=4)
)
@example([(0, 0, b'{"resourceProfiles":[{"scopeProfiles":' + b"[" * 3000)])
@example([(0, 400, b'{"dictionary":{"stringTable":' + b"9" * 5000 + b"}}")])
@example([(0, 400, b'{"resourceProfiles":{"a":1}}')])
@settings(max_examples=300, deadline=10_000)
def test_corrupt_payloads_are_read_or_rejected(changes):
    data = bytearray(small())
    for at, cut, new in changes:
        data[at : at + cut] = new
    check_payload(bytes(data))
    with contextlib.suppress(PayloadError):
        decode_windows(bytes(data))
    with contextlib.suppress(PayloadError):
        name_locations(bytes(data), name_all)


def name_all(wanted):
    return {nameless.location: (Line("f", "", "f.c", 1),) for nameless in wanted}


def nameless_tree():
    message, profile = request()
    dictionary = message.dictionary
    dictionary.string_table.extend(["profile.frame.type", "otel_kprofiler.unresolved", "f"])
    for key, value in ((1, "native"), (2, "no_name")):
        dictionary.attribute_table.add(key_strindex=key).value.string_value = value
    dictionary.mapping_table.add(memory_limit=4096, filename_strindex=3)
    dictionary.location_table.add(mapping_index=1, address=16, attribute_indices=[1, 2])
    dictionary.stack_table.add().location_indices.append(1)
    profile.samples.add(stack_index=1, timestamps_unix_nano=[5])
    return MessageToDict(message)


JSON_VALUES = st.recursive(
    st.none() | st.integers(-3, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.lists(st.tuples(st.integers(0, 99), st.booleans(), JSON_VALUES), max_size=3))
@settings(max_examples=300, deadline=10_000)
def test_names_are_added_to_json_with_unexpected_values_or_the_json_is_rejected(changes):
    """The types of values differ from the schema, and keys are in camel case or snake case."""
    tree = nameless_tree()
    for at, other_name, value in changes:
        nodes = list(objects(tree))
        node, key = nodes[at % len(nodes)]
        node["".join(f"_{c.lower()}" if c.isupper() else c for c in key) if other_name else key] = (
            value
        )
    data = json.dumps(tree).encode()
    try:
        named = name_locations(data, name_all)
    except PayloadError:
        return
    check_payload(named.data)
    if not changes:
        assert named.named == 1
        assert b"no_name" not in named.data


def objects(node):
    """Yields (object, key) for each key of each object in parsed JSON."""
    if isinstance(node, list):
        for inner in node:
            yield from objects(inner)
    elif isinstance(node, dict):
        for key in list(node):
            yield node, key
            yield from objects(node[key])
