"""Each rule of the checker catches what it promises, and nothing else does."""

from __future__ import annotations

import json

import pytest
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from otel_kprofiler.model import Form
from otel_kprofiler.otlp import RULES, check_payload, encode_window
from otel_kprofiler.otlp.rules import TABLES

MUTATIONS = {}
"""By rule: functions that break it in a message."""

DATA_MUTATIONS = {}
"""By rule: functions that break it in the JSON form."""


def breaks(rule):
    def register(mutate):
        MUTATIONS.setdefault(rule, []).append(mutate)
        return mutate

    return register


def breaks_json(rule):
    def register(mutate):
        DATA_MUTATIONS.setdefault(rule, []).append(mutate)
        return mutate

    return register


def scope_of(message, index=0):
    return message.resource_profiles[index].scope_profiles[0]


def profile_of(message, index=0):
    return scope_of(message, index).profiles[0]


def string(message, text):
    """Index of a string, added if it is not there."""
    table = message.dictionary.string_table
    if text not in table:
        table.append(text)
    return list(table).index(text)


def attribute(message, key, **value):
    """Index of a new attribute."""
    entry = message.dictionary.attribute_table.add(key_strindex=string(message, key))
    for field, content in value.items():
        setattr(entry.value, field, content)
    return len(message.dictionary.attribute_table) - 1


def attribute_named(message, key):
    wanted = string(message, key)
    return next(e for e in message.dictionary.attribute_table if e.key_strindex == wanted)


def sample_stack(message, stack_index):
    """A sample that uses a stack."""
    profile = profile_of(message)
    profile.samples.add(
        stack_index=stack_index,
        attribute_indices=profile.samples[0].attribute_indices,
        timestamps_unix_nano=profile.samples[0].timestamps_unix_nano,
    )


def use_location(message, **fields):
    """A new location with a stack and a sample of its own."""
    dictionary = message.dictionary
    location = dictionary.location_table.add(**fields)
    dictionary.stack_table.add(location_indices=[len(dictionary.location_table) - 1])
    sample_stack(message, len(dictionary.stack_table) - 1)
    return location


def location_where(message, wanted):
    return next(e for e in list(message.dictionary.location_table)[1:] if wanted(e))


def kernel_location(message):
    return location_where(message, lambda e: e.lines and e.mapping_index)


@breaks("zero-entries")
def link_zero_is_not_empty(m):
    m.dictionary.link_table[0].trace_id = bytes(16)


@breaks("zero-entries")
def first_string_is_not_empty(m):
    m.dictionary.string_table[0] = "x"


@breaks("zero-entries")
def first_mapping_is_set(m):
    m.dictionary.mapping_table[0].memory_limit = 5


@breaks("zero-entries")
def first_location_is_set(m):
    m.dictionary.location_table[0].address = 5


@breaks("zero-entries")
def first_function_is_set(m):
    m.dictionary.function_table[0].start_line = 5


@breaks("zero-entries")
def first_stack_is_set(m):
    m.dictionary.stack_table[0].location_indices.extend([1, 2, 1])


@breaks("zero-entries")
def first_attribute_has_a_value(m):
    m.dictionary.attribute_table[0].value.int_value = 0


@breaks("zero-entries")
def link_table_is_missing(m):
    for resource_profiles in m.resource_profiles:
        for sample in resource_profiles.scope_profiles[0].profiles[0].samples:
            sample.link_index = 0
    del m.dictionary.link_table[:]


@breaks("index-range")
def stack_out_of_range(m):
    sample_stack(m, 999)


@breaks("index-range")
def stack_negative(m):
    sample_stack(m, -1)


@breaks("index-range")
def link_out_of_range(m):
    profile_of(m).samples[0].link_index = 99


@breaks("index-range")
def sample_attribute_out_of_range(m):
    profile_of(m).samples[0].attribute_indices.append(999)


@breaks("index-range")
def location_out_of_range(m):
    m.dictionary.stack_table[1].location_indices.append(999)


@breaks("index-range")
def function_out_of_range(m):
    kernel_location(m).lines.add(function_index=999)


@breaks("index-range")
def mapping_out_of_range(m):
    location_where(m, lambda e: not e.mapping_index).mapping_index = 99


@breaks("index-range")
def name_out_of_range(m):
    table = list(m.dictionary.function_table)[1:]
    next(entry for entry in table if not entry.filename_strindex).filename_strindex = 999


@breaks("index-range")
def unit_out_of_range(m):
    m.dictionary.attribute_table[1].unit_strindex = 999


@breaks("index-range")
def resource_value_out_of_range(m):
    item = m.resource_profiles[0].resource.attributes.add(key_strindex=string(m, "more"))
    item.value.string_value_strindex = 999


@breaks("no-orphans")
def string_unused(m):
    m.dictionary.string_table.append("unused")


@breaks("no-orphans")
def location_and_function_unused(m):
    m.dictionary.function_table.add(name_strindex=string(m, "unused"))
    location = m.dictionary.location_table.add()
    location.CopyFrom(kernel_location(m))
    location.address += 1
    location.lines.add(function_index=len(m.dictionary.function_table) - 1)


@breaks("no-orphans")
def link_unused(m):
    m.dictionary.link_table.add(trace_id=b"t" * 16, span_id=b"s" * 8)


@breaks("no-orphans")
def stack_unused(m):
    m.dictionary.stack_table.add(location_indices=[1])


@breaks("no-orphans")
def attribute_unused(m):
    attribute(m, "unused", int_value=5)


@breaks("no-orphans")
def mapping_unused(m):
    mapping = m.dictionary.mapping_table.add()
    mapping.CopyFrom(m.dictionary.mapping_table[1])
    mapping.memory_limit += 1


@breaks("no-duplicates")
def string_twice(m):
    m.dictionary.string_table.append("thread.name")
    attribute_named(m, "thread.name").key_strindex = len(m.dictionary.string_table) - 1


@breaks("no-duplicates")
def link_twice(m):
    m.dictionary.link_table.add().CopyFrom(m.dictionary.link_table[1])
    profile_of(m).samples[0].link_index = 2


@breaks("no-duplicates")
def function_twice(m):
    table = m.dictionary.function_table
    table.add().CopyFrom(table[1])
    kernel_location(m).lines.add(function_index=len(table) - 1)


@breaks("no-duplicates")
def stack_twice(m):
    table = m.dictionary.stack_table
    table.add().CopyFrom(table[1])
    sample_stack(m, len(table) - 1)


@breaks("no-duplicates")
def location_twice(m):
    use_location(m).CopyFrom(kernel_location(m))


@breaks("no-duplicates")
def attribute_twice(m):
    table = m.dictionary.attribute_table
    location = kernel_location(m)
    table.add().CopyFrom(table[location.attribute_indices[0]])
    use_location(
        m,
        address=location.address + 1,
        mapping_index=location.mapping_index,
        attribute_indices=[len(table) - 1],
    )


@breaks("no-duplicates")
def mapping_twice_with_attributes_in_another_order(m):
    table = m.dictionary.mapping_table
    location = kernel_location(m)
    copy = table.add()
    copy.CopyFrom(table[location.mapping_index])
    assert len(copy.attribute_indices) > 1
    copy.attribute_indices.reverse()
    use_location(
        m,
        address=location.address + 1,
        mapping_index=len(table) - 1,
        attribute_indices=location.attribute_indices,
    )


@breaks("attribute-index-unset")
def attribute_index_0(m):
    profile_of(m).samples[0].attribute_indices.append(0)


@breaks("attribute-keys-unique")
def two_thread_ids(m):
    profile_of(m).samples[0].attribute_indices.append(attribute(m, "thread.id", int_value=999))


@breaks("attribute-keys-unique")
def two_build_ids(m):
    mapping = m.dictionary.mapping_table[kernel_location(m).mapping_index]
    key = "process.executable.build_id.gnu"
    mapping.attribute_indices.append(attribute(m, key, string_value="ee" * 20))


@breaks("attribute-values")
def attribute_without_value(m):
    profile_of(m).samples[0].attribute_indices.append(attribute(m, "more"))


@breaks("attribute-values")
def attribute_refers_to_its_string(m):
    index = attribute(m, "more", string_value_strindex=string(m, "value"))
    profile_of(m).samples[0].attribute_indices.append(index)


@breaks("attribute-values")
def attribute_without_key(m):
    profile_of(m).samples[0].attribute_indices.append(attribute(m, "", int_value=5))


@breaks("units")
def unit_in_words(m):
    index = attribute(m, "more", int_value=5)
    m.dictionary.attribute_table[index].unit_strindex = string(m, "bytes")
    profile_of(m).samples[0].attribute_indices.append(index)


@breaks("integer-attributes")
def thread_id_as_text(m):
    attribute_named(m, "thread.id").value.string_value = "17"


@breaks("integer-attributes")
def pid_as_text(m):
    for item in m.resource_profiles[0].resource.attributes:
        if item.key_strindex == string(m, "process.pid"):
            item.value.string_value = "17"


@breaks("function-named")
def function_without_name(m):
    m.dictionary.function_table.add(start_line=5)
    kernel_location(m).lines.add(function_index=len(m.dictionary.function_table) - 1)


@breaks("line-numbers")
def line_negative(m):
    kernel_location(m).lines[0].line = -1


@breaks("line-numbers")
def column_negative(m):
    kernel_location(m).lines[0].column = -1


@breaks("line-numbers")
def start_line_negative(m):
    m.dictionary.function_table[1].start_line = -1


@breaks("link-ids")
def trace_id_short(m):
    m.dictionary.link_table[1].trace_id = b"t" * 8


@breaks("link-ids")
def span_id_zero(m):
    m.dictionary.link_table[1].span_id = bytes(8)


@breaks("mapping-identity")
def no_file_id(m):
    attribute_named(m, "process.executable.build_id.htlhash").key_strindex = string(m, "more")


@breaks("mapping-identity")
def file_id_malformed(m):
    attribute_named(m, "process.executable.build_id.htlhash").value.string_value = "AB" * 16


@breaks("mapping-identity")
def build_id_malformed(m):
    attribute_named(m, "process.executable.build_id.gnu").value.string_value = "abc"


@breaks("mapping-range")
def range_empty(m):
    mapping = m.dictionary.mapping_table[kernel_location(m).mapping_index]
    mapping.memory_start = mapping.memory_limit


@breaks("location-in-mapping")
def address_at_the_limit(m):
    location = kernel_location(m)
    location.address = m.dictionary.mapping_table[location.mapping_index].memory_limit


@breaks("frame-type")
def frame_type_unknown(m):
    entries = m.dictionary.attribute_table
    next(e for e in entries if e.value.string_value == "native").value.string_value = "assembly"


@breaks("frame-type")
def frame_type_missing(m):
    use_location(m, address=0x7F0000000000)


@breaks("kernel-mapping-name")
def module_with_path(m):
    table = m.dictionary.string_table
    table[list(table).index("ext4")] = "/lib/modules/ext4.ko.xz"


@breaks("kernel-address")
def unmapped_kernel_address_is_relative(m):
    location_where(m, lambda e: not e.mapping_index and e.address > 1 << 63).address = 0x1234


@breaks("kernel-names")
def name_with_offset(m):
    table = m.dictionary.string_table
    table[list(table).index("vfs_read")] = "vfs_read+0x10"


@breaks("kernel-names")
def name_with_module(m):
    table = m.dictionary.string_table
    table[list(table).index("vfs_read")] = "vfs_read [ext4]"


@breaks("no-empty")
def resource_without_scopes(m):
    m.resource_profiles.add(schema_url="x")


@breaks("no-empty")
def scope_without_profiles(m):
    m.resource_profiles[0].scope_profiles.add(schema_url="x")


def events_profile(m):
    profile = type(profile_of(m))()
    profile.sample_type.type_strindex = string(m, "events")
    profile.sample_type.unit_strindex = string(m, "count")
    return profile


@breaks("no-empty")
def profile_without_samples(m):
    scope_of(m).profiles.append(events_profile(m))


@breaks("no-empty")
def request_without_resources(m):
    del m.resource_profiles[:]
    for name in TABLES:
        del getattr(m.dictionary, name)[1:]


@breaks("schema-url")
def no_schema_of_resource(m):
    m.resource_profiles[0].schema_url = ""


@breaks("schema-url")
def no_schema_of_scope(m):
    scope_of(m).schema_url = ""


@breaks("key-form")
def key_twice_over(m):
    m.resource_profiles[0].resource.attributes[0].key = "more"


@breaks("key-form")
def no_key_at_all(m):
    m.resource_profiles[0].resource.attributes[0].key_strindex = 0


@breaks("resource-keys-unique")
def resource_key_twice(m):
    attributes = m.resource_profiles[0].resource.attributes
    attributes.add().CopyFrom(attributes[0])


@breaks("resource-keys-unique")
def scope_key_twice(m):
    for number in (1, 2):
        scope_of(m).scope.attributes.add(key="more").value.int_value = number


@breaks("resources-unique")
def resource_twice(m):
    m.resource_profiles.add().CopyFrom(m.resource_profiles[0])
    profile_of(m, -1).profile_id = b""


@breaks("creation-time")
def creation_time_as_number(m):
    table = m.dictionary.string_table
    index = next(i for i, text in enumerate(table) if text.startswith("2025-"))
    table[index] = "1750000000"


@breaks("sample-type")
def sample_type_without_unit(m):
    profile_of(m).sample_type.unit_strindex = 0


@breaks("period")
def no_period(m):
    profile_of(m).period = 0


@breaks("period")
def no_period_type(m):
    profile_of(m).ClearField("period_type")


@breaks("period")
def period_of_wall_time(m):
    profile_of(m).period_type.type_strindex = string(m, "wall")


@breaks("profile-order")
def on_cpu_last(m):
    events = events_profile(m)
    on_cpu = profile_of(m)
    events.time_unix_nano, events.duration_nano = on_cpu.time_unix_nano, on_cpu.duration_nano
    events.samples.append(on_cpu.samples[0])
    profiles = [events, *scope_of(m).profiles]
    del scope_of(m).profiles[:]
    scope_of(m).profiles.extend(profiles)


@breaks("profile-order")
def one_type_twice(m):
    copy = scope_of(m).profiles.add()
    copy.CopyFrom(profile_of(m))
    copy.profile_id = b""


@breaks("profile-id")
def profile_id_short(m):
    profile_of(m).profile_id = b"12345678"


@breaks("profile-id")
def profile_id_zero(m):
    profile_of(m).profile_id = bytes(16)


@breaks("profile-id")
def profile_id_twice(m):
    profile_of(m).profile_id = profile_of(m, 1).profile_id


@breaks("original-payload")
def payload_without_format(m):
    profile_of(m).original_payload = b"x"


@breaks("original-payload")
def format_without_payload(m):
    profile_of(m).original_payload_format = "pprof"


@breaks("timestamps")
def timestamp_at_the_end(m):
    profile = profile_of(m)
    end = profile.time_unix_nano + profile.duration_nano
    profile.samples[0].timestamps_unix_nano.append(end)


@breaks("timestamps")
def timestamp_before_the_start(m):
    profile = profile_of(m)
    profile.samples[0].timestamps_unix_nano.append(profile.time_unix_nano - 1)


@breaks("sample-values")
def nothing_counted(m):
    del profile_of(m).samples[0].timestamps_unix_nano[:]


@breaks("sample-values")
def more_values_than_timestamps(m):
    for sample in profile_of(m).samples:
        sample.values.extend([1] * (len(sample.timestamps_unix_nano) + 1))


@breaks("sample-values")
def two_values_without_timestamps(m):
    for sample in profile_of(m).samples:
        del sample.timestamps_unix_nano[:]
        sample.values.extend([1, 1])


@breaks("sample-shape")
def values_on_one_sample_only(m):
    sample = profile_of(m).samples[0]
    sample.values.extend([1] * len(sample.timestamps_unix_nano))


@breaks("sample-identity")
def sample_twice(m):
    samples = profile_of(m).samples
    samples.add().CopyFrom(samples[0])
    samples[-1].attribute_indices.reverse()


@breaks("kernel-first")
def stack_root_first(m):
    longest = max(m.dictionary.stack_table, key=lambda stack: len(set(stack.location_indices)))
    indices = list(longest.location_indices)
    native = [i for i, e in enumerate(m.dictionary.location_table) if e.address < 1 << 47 and i]
    assert set(indices) & set(native)
    del longest.location_indices[:]
    longest.location_indices.extend(indices[::-1])


@breaks_json("parsable")
def cut_off(text):
    return text[:-5]


@breaks_json("parsable")
def no_object(text):
    return text.replace('"mappingTable":[{}', '"mappingTable":[5')


@breaks_json("json-names")
def snake_case(text):
    return text.replace('"stackIndex"', '"stack_index"', 1)


@breaks_json("json-names")
def unknown_key(text):
    return text.replace('"samples":', '"more":1,"samples":', 1)


@breaks_json("json-long-strings")
def time_as_number(text):
    tree = json.loads(text)
    profile = tree["resourceProfiles"][0]["scopeProfiles"][0]["profiles"][0]
    profile["timeUnixNano"] = int(profile["timeUnixNano"])
    return json.dumps(tree)


@breaks_json("json-int-numbers")
def index_as_text(text):
    return text.replace('"stackIndex":1,', '"stackIndex":"1",')


@breaks_json("json-hex-ids")
def id_as_base64(text):
    tree = json.loads(text)
    tree["dictionary"]["linkTable"][1]["traceId"] = "AAECAwQFBgcICQoLDA0ODw=="
    return json.dumps(tree)


def message_of(window):
    return ExportProfilesServiceRequest.FromString(encode_window(window).batches[0].payload)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("keys_by_reference", [True, False])
def test_the_good_payload_breaks_no_rule(window, form, keys_by_reference):
    encoded = encode_window(window, form=form, keys_by_reference=keys_by_reference)
    assert check_payload(encoded.batches[0].payload) == []


@pytest.mark.parametrize(
    ("rule", "mutate"),
    [(rule, mutate) for rule, functions in MUTATIONS.items() for mutate in functions],
)
def test_a_mutation_is_caught_by_its_rule_alone(window, rule, mutate):
    message = message_of(window)
    mutate(message)
    assert {item.rule for item in check_payload(message.SerializeToString())} == {rule}


@pytest.mark.parametrize(
    ("rule", "mutate"),
    [(rule, mutate) for rule, functions in DATA_MUTATIONS.items() for mutate in functions],
)
def test_a_mutation_of_the_text_is_caught_by_its_rule_alone(window, rule, mutate):
    text = encode_window(window, form=Form.JSON).batches[0].payload.decode()
    mutated = mutate(text)
    assert mutated != text
    assert {item.rule for item in check_payload(mutated.encode())} == {rule}


def test_every_rule_has_a_mutation():
    assert MUTATIONS.keys() | DATA_MUTATIONS.keys() == RULES.keys()
    assert all(RULES.values()), "every rule says what it promises"
