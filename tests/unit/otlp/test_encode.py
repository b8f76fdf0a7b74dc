"""The encoder's output is correct, field by field."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from otel_kprofiler.errors import DependencyError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    USER_SIDE,
    AddressRange,
    AttributeForm,
    BuildId,
    FileId,
    Form,
    Frame,
    Line,
    Module,
    ModuleKind,
    ProfileKind,
    ProfileSamples,
    RawFrames,
    Resource,
    ResourceSamples,
    Side,
    Stack,
    UnnamedFrames,
    Unresolved,
    WindowSample,
)
from otel_kprofiler.otlp import SCHEMA_URL, Scope, check_payload, decode_windows, encode_window
from otel_kprofiler.otlp.dictionary import Dictionary
from otel_kprofiler.otlp.messages import require_current_layout
from otel_kprofiler.otlp.payloads import parse_payloads
from otel_kprofiler.otlp.protobuf import ProtobufWriter


class Reader:
    """A payload with its references resolved."""

    def __init__(self, payload):
        (parsed,) = parse_payloads(payload)
        self.message = parsed.message
        self.dictionary = self.message.dictionary
        self.strings = self.dictionary.string_table
        self.profiles = [
            profile
            for resource in self.message.resource_profiles
            for scope in resource.scope_profiles
            for profile in scope.profiles
        ]

    def attributes(self, owner):
        entries = [self.dictionary.attribute_table[index] for index in owner.attribute_indices]
        return {
            self.strings[entry.key_strindex]: getattr(entry.value, entry.value.WhichOneof("value"))
            for entry in entries
        }

    def locations(self, sample):
        stack = self.dictionary.stack_table[sample.stack_index]
        return [self.dictionary.location_table[index] for index in stack.location_indices]

    def names(self, location):
        functions = [self.dictionary.function_table[line.function_index] for line in location.lines]
        return [self.strings[function.name_strindex] for function in functions]

    def mapping(self, location):
        return self.dictionary.mapping_table[location.mapping_index]


def with_kind(window, kind):
    return replace(window, profiles=[replace(window.profiles[0], kind=kind, period_ns=0)])


def with_resources(window, resources):
    return replace(window, profiles=[replace(window.profiles[0], resources=resources)])


def with_samples(window, samples):
    return with_resources(window, [ResourceSamples(Resource({"process.pid": 1}), samples)])


def encoded(window, **options):
    (batch,) = encode_window(window, **options).batches
    return batch


def one_frame_window(window, *frames):
    sample = WindowSample(Stack.from_frames(frames), 1, "t", 0, None, [window.start_unix_ns])
    return with_samples(window, [sample])


def test_each_profile_has_a_sample_type_a_period_and_an_interval(window):
    reader = Reader(encoded(window).payload)
    assert len(reader.profiles) == 2
    for profile in reader.profiles:
        kinds = [(profile.sample_type, ("samples", "count"))]
        kinds.append((profile.period_type, ("cpu", "nanoseconds")))
        for value, wanted in kinds:
            assert (
                tuple(reader.strings[i] for i in (value.type_strindex, value.unit_strindex))
                == wanted
            )
        assert profile.period == window.profiles[0].period_ns
        assert profile.time_unix_nano == window.start_unix_ns
        assert profile.duration_nano == window.end_unix_ns - window.start_unix_ns


def test_profiles_that_count_events_have_no_period(window):
    reader = Reader(encoded(with_kind(window, ProfileKind("events", "events", "count"))).payload)
    assert not any(p.period or p.HasField("period_type") for p in reader.profiles)


def test_samples_include_the_thread_the_cpu_and_the_reason_for_an_incomplete_stack(window):
    reader = Reader(encoded(window).payload)
    samples = [sample for profile in reader.profiles for sample in profile.samples]
    results = [reader.attributes(sample) for sample in samples]
    assert results[0] == {"thread.name": "cat", "thread.id": 17, "cpu.logical_number": 0}
    assert results[2]["otel_kprofiler.user_stack.status"] == "EFAULT"
    assert results[4]["otel_kprofiler.kernel_stack.status"] == "truncated"
    assert results[5]["otel_kprofiler.kernel_stack.status"] == "ENOMEM"
    assert list(samples[2].timestamps_unix_nano) == [window.start_unix_ns + 4] * 2
    assert not any(sample.values for sample in samples)


def test_stacks_are_leaf_first_with_inlined_functions_innermost_first(window):
    reader = Reader(encoded(window).payload)
    reading = reader.locations(reader.profiles[0].samples[0])
    assert [reader.names(location) for location in reading] == [
        ["ext4_inlined", "ext4_file_read"],
        ["vfs_read"],
        ["entry_SYSCALL_64_after_hwframe"],
        [],
        [],
    ]
    assert [line.line for line in reading[0].lines] == [12, 345]
    types = [reader.attributes(location)["profile.frame.type"] for location in reading]
    assert types == ["kernel"] * 3 + ["native"] * 2
    assert reading[3].address == 0x7F1234567890


def test_mappings_include_the_address_range_and_ids_of_their_module(window):
    reader = Reader(encoded(window).payload)
    results = {
        reader.strings[m.filename_strindex]: (m.memory_limit, reader.attributes(m))
        for m in list(reader.dictionary.mapping_table)[1:]
    }
    gnu, htlhash = (f"process.executable.build_id.{kind}" for kind in ("gnu", "htlhash"))
    kind = "otel_kprofiler.module.kind"
    assert results == {
        "ext4": (0x10000, {htlhash: f"{2:032x}", gnu: "cd" * 20}),
        "vmlinux": (0x10000, {htlhash: f"{1:032x}", gnu: "ab" * 20}),
        "bpf_prog_6deef7357e7b4530_probe": (0x10000, {htlhash: f"{3:032x}", kind: "bpf"}),
        "[kprobe_insn_page]": (0, {htlhash: f"{4:032x}", kind: "ool"}),
    }


def test_the_mapping_of_an_address_outside_its_module_has_no_range(window):
    module = window.profiles[0].resources[0].samples[0].stack.frames[0].module
    module = replace(module, ranges=(AddressRange(module.base, module.base + 0x100, ".text"),))
    near, far = (Frame(module, address, (Line("f"),), 0, KERNEL_SIDE) for address in (0xFF, 0x100))
    batch = encoded(one_frame_window(window, near, far))
    reader = Reader(batch.payload)
    locations = reader.locations(reader.profiles[0].samples[0])
    assert [reader.mapping(location).memory_limit for location in locations] == [0x100, 0]
    assert check_payload(batch.payload) == []


USER_FILE = Module(
    name="libheld.so",
    kind=ModuleKind.USER,
    build_id=BuildId("0a" * 20),
    file_id=FileId(f"{5:032x}"),
    base=0,
    ranges=(AddressRange(0x401000, 0x480000, ""),),
    file_offset=0x1000,
)


@pytest.mark.parametrize("form", list(Form))
def test_the_mapping_of_a_user_file_has_the_bounds_and_offset_of_its_segment(window, form):
    inside, outside = (
        Frame(USER_FILE, address, (), 0, USER_SIDE, Unresolved.NO_SYMBOL_TABLE)
        for address in (0x401234, 0x400FFF)
    )
    batch = encoded(one_frame_window(window, inside, outside), form=form)
    reader = Reader(batch.payload)
    places = [
        (location.address, mapping.memory_start, mapping.memory_limit, mapping.file_offset)
        for location in reader.locations(reader.profiles[0].samples[0])
        for mapping in [reader.mapping(location)]
    ]
    assert places == [(0x401234, 0x401000, 0x480000, 0x1000), (0x400FFF, 0, 0, 0)]
    assert check_payload(batch.payload) == []
    (again,) = decode_windows(batch.payload)
    (frame, _) = again.profiles[0].resources[0].samples[0].stack.frames
    assert frame.module == USER_FILE


@pytest.mark.parametrize("form", list(Form))
def test_frames_found_by_frame_pointer_or_guess_have_a_found_by_attribute(window, form):
    frames = [
        Frame(USER_FILE, address, (), 0, USER_SIDE, Unresolved.USER_ADDRESS, found_by=found_by)
        for address, found_by in ((0x401000, ""), (0x401010, "guess"), (0x401020, "frame_pointer"))
    ]
    batch = encoded(one_frame_window(window, *frames), form=form)
    reader = Reader(batch.payload)
    results = [
        reader.attributes(location).get("otel_kprofiler.frame.found_by")
        for location in reader.locations(reader.profiles[0].samples[0])
    ]
    assert results == [None, "guess", "frame_pointer"]
    assert check_payload(batch.payload) == []
    (again,) = decode_windows(batch.payload)
    assert again.profiles[0].resources[0].samples[0].stack.frames == tuple(frames)


def test_unresolved_frames_keep_their_address_and_reason(window):
    reader = Reader(encoded(window).payload)
    lost = reader.locations(reader.profiles[1].samples[0])[0]
    assert (lost.mapping_index, lost.address) == (0, 0xFFFFFFFFC0001234)
    results = reader.attributes(lost)
    assert results == {"profile.frame.type": "kernel", "otel_kprofiler.unresolved": "module_gone"}


def names_by_address(payload):
    """Returns the function names and attributes for each location, by address."""
    reader = Reader(payload)
    return {
        location.address: (
            reader.names(location),
            reader.attributes(location).get("otel_kprofiler.unresolved"),
        )
        for location in list(reader.dictionary.location_table)[1:]
    }


UNNAMED = {"unnamed_frames": UnnamedFrames.NAMES}


@pytest.mark.parametrize("form", Form)
def test_unnamed_frames_receive_a_placeholder_on_request(window, form):
    raw = Side(USER_SIDE, RawFrames(USER_SIDE, [0x7F00AA, 0x7F00BB], Unresolved.USER_ADDRESS))
    gap = Frame(
        Module("/lib/libz.so.1", ModuleKind.USER, None, FileId("9" * 32), 0), 0x99, (), 0,
        USER_SIDE, Unresolved.NO_NAME,
    )  # fmt: skip
    part = Frame(None, 0x98, (Line("", file="a.py", line=3), Line("named")), 0, USER_SIDE)
    (profile,) = window.profiles
    stacks = [Stack((raw,)), Stack.from_frames((gap, part))]
    group = profile.resources[0]
    more = [group.samples[0]._replace(stack=stack) for stack in stacks]
    groups = [group._replace(samples=[*group.samples, *more]), *profile.resources[1:]]
    window = replace(window, profiles=[replace(profile, resources=groups)])
    (batch,) = encode_window(window, form=form, **UNNAMED).batches
    assert not list(check_payload(batch.payload))
    result = names_by_address(batch.payload)
    assert all(names and all(names) for names, _ in result.values())
    assert result[0x99] == (["libz.so.1+0x99 [no_name]"], "no_name")
    assert result[0x98] == (["[unknown]", "named"], None)
    assert result[0x7F00AA] == result[0x7F00BB] == (["[user_address]"], "user_address")
    assert result[0x30] == (["[kprobe_insn_page]+0x30 [no_symbol]"], "no_symbol")
    assert result[0xFFFFFFFFC0001234] == (["[module_gone]"], "module_gone")
    assert result[0x900][0] == ["vfs_read"]


@pytest.mark.parametrize("form", Form)
def test_placeholder_names_are_decoded_as_reasons_for_missing_names(window, form):
    with_names, without = (
        decode_windows(encode_window(window, form=form, **options).batches[0].payload)
        for options in (UNNAMED, {})
    )

    def frames(windows):
        return [
            (frame.address, frame.lines, frame.unresolved)
            for _, sample in windows[0].samples
            for frame in sample.stack.frames
        ]

    assert frames(with_names) == frames(without)


def test_equal_names_in_two_modules_share_one_function_at_two_locations(window):
    reader = Reader(encoded(window).payload)
    named = [e for e in reader.dictionary.location_table if reader.names(e) == ["vfs_read"]]
    assert len({location.lines[0].function_index for location in named}) == 1
    owners = {reader.strings[reader.mapping(location).filename_strindex] for location in named}
    assert owners == {"vmlinux", "ext4"}


def test_equal_values_in_distinct_objects_are_merged(window):
    def copied(stack):
        frames = [frame._replace() for frame in stack.frames]
        return Stack.from_frames(frames, {side.kind: side.status for side in stack.sides})

    groups = [
        group._replace(
            samples=[sample._replace(stack=copied(sample.stack)) for sample in group.samples]
            + group.samples
        )
        for group in window.profiles[0].resources
    ]
    windows = (window, with_resources(window, groups))
    once, twice = (Reader(encoded(window).payload) for window in windows)
    assert once.dictionary == twice.dictionary
    for profile, two in zip(once.profiles, twice.profiles, strict=True):
        for sample, double in zip(profile.samples, two.samples, strict=True):
            assert sorted(double.timestamps_unix_nano) == sorted(
                2 * list(sample.timestamps_unix_nano)
            )


def test_frames_are_looked_up_by_identity_and_compared_by_value(window):
    frame = window.profiles[0].resources[0].samples[0].stack.frames[0]
    twin = frame._replace()
    assert twin == frame
    assert {frame: 1}.get(twin) is None


def test_a_dictionary_is_freed_without_the_garbage_collector(window):
    stack = window.profiles[0].resources[0].samples[0].stack
    gc.disable()
    try:
        gc.collect()
        dictionary = Dictionary(ProtobufWriter(), AttributeForm.INLINE)
        assert dictionary.frame(stack.frames[0])
        del dictionary
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_equal_resources_are_merged(window):
    first, second = window.profiles[0].resources
    twin = ResourceSamples(replace(first.resource), first.samples)
    reader = Reader(encoded(with_resources(window, [first, second, twin])).payload)
    assert [sum(len(s.timestamps_unix_nano) for s in p.samples) for p in reader.profiles] == [14, 4]


@pytest.mark.parametrize("form", AttributeForm)
def test_resource_attributes_keep_their_types(window, form):
    by_reference = form is AttributeForm.REFERENCES
    reader = Reader(encoded(window, attributes=form).payload)
    results = {}
    for item in reader.message.resource_profiles[0].resource.attributes:
        assert bool(item.key) != by_reference
        results[item.key or reader.strings[item.key_strindex]] = item.value.WhichOneof("value")
    text = "string_value_strindex" if by_reference else "string_value"
    assert results == {
        "empty": "string_value",
        "host.name": text,
        "process.creation.time": text,
        "process.executable.name": text,
        "process.pid": "int_value",
        "ratio": "double_value",
        "sampled": "bool_value",
        "service.instances": "array_value",
    }


def test_the_request_contains_the_scope_and_the_schema_url(window):
    scope = Scope("library", "1.2", {"more": True}, "https://example.org/schema")
    for resource_profiles in Reader(encoded(window, scope=scope).payload).message.resource_profiles:
        assert resource_profiles.schema_url == SCHEMA_URL
        (result,) = resource_profiles.scope_profiles
        assert (result.scope.name, result.scope.version) == ("library", "1.2")
        assert result.schema_url == "https://example.org/schema"
        assert [attribute.key for attribute in result.scope.attributes] == ["more"]


def test_profile_ids_are_random_and_unique(window):
    ids = [
        profile.profile_id for _ in range(2) for profile in Reader(encoded(window).payload).profiles
    ]
    assert len(set(ids)) == 4
    assert {len(value) for value in ids} == {16}


@pytest.mark.parametrize("form", Form)
def test_encoding_is_deterministic(window, form):
    first, second = (encoded(window, form=form, new_id=lambda n: b"i" * n) for _ in range(2))
    assert first.payload == second.payload
    groups = []
    for group in window.profiles[0].resources:
        attributes = dict(sorted(group.resource.attributes.items()))
        groups.append(group._replace(resource=replace(group.resource, attributes=attributes)))
    third = encoded(with_resources(window, groups), form=form, new_id=lambda n: b"i" * n)
    assert third.payload == first.payload, "the order of attributes means nothing"


def test_a_window_without_samples_yields_no_batch(window):
    empty = with_resources(window, [])
    no_times = window.profiles[0].resources[0].samples[0]._replace(timestamps_unix_ns=[])
    without = with_resources(window, [window.profiles[0].resources[0]._replace(samples=[no_times])])
    assert encode_window(empty) == encode_window(without) == ((), {})


@pytest.mark.parametrize("form", Form)
def test_surrogates_are_escaped(window, form):
    samples = [
        WindowSample(Stack(()), 1, name, 0, None, [window.start_unix_ns])
        for name in ("a\udc80", "a\udcff", "a\\x80", "\ud800")
    ]
    resource = Resource({"process.executable.name": "x\udc80", "other": "x\\x80"})
    batch = encoded(with_resources(window, [ResourceSamples(resource, samples)]), form=form)
    assert check_payload(batch.payload) == []
    assert batch.profiles == (ProfileSamples("on_cpu", 4),)
    (decoded,) = decode_windows(batch.payload)
    (group,) = decoded.profiles[0].resources
    assert group.resource.attributes["process.executable.name"] == "x\\x80"
    assert {sample.thread_name for sample in group.samples} == {"a\\x80", "a\\xff", "\\ud800"}


@pytest.mark.parametrize("form", Form)
def test_a_sample_larger_than_the_limit_is_counted_as_lost_and_not_sent(window, form):
    huge = Frame(None, 1 << 63, (Line("f" * 5000),), 0, KERNEL_SIDE)
    normal = Frame(None, 1 << 63, (Line("g"),), 0, KERNEL_SIDE)
    samples = [
        WindowSample(Stack.from_frames((frame,)), 1, "t", 0, None, [window.start_unix_ns] * count)
        for frame, count in ((normal, 2), (huge, 3), (normal, 4))
    ]
    result = encode_window(with_samples(window, samples), form=form, max_bytes=4000)
    assert result.too_large == {"on_cpu": 3}
    assert sum(batch.sample_count for batch in result.batches) == 6
    for batch in result.batches:
        assert check_payload(batch.payload) == [], "nothing of the large sample is left behind"


@pytest.mark.parametrize("form", Form)
def test_a_sample_with_many_timestamps_is_split(window, form):
    times = [window.start_unix_ns + index % 1000 for index in range(20_000)]
    sample = window.profiles[0].resources[0].samples[0]._replace(timestamps_unix_ns=times)
    many = with_resources(window, [window.profiles[0].resources[0]._replace(samples=[sample])])
    result = encode_window(many, form=form, max_bytes=30_000)
    assert not result.too_large
    results = []
    for batch in result.batches:
        assert len(batch.payload) <= 30_000
        for profile in Reader(batch.payload).profiles:
            results += [time for item in profile.samples for time in item.timestamps_unix_nano]
    assert results == times
    full = result.batches[:-1]
    assert min(len(batch.payload) for batch in full) > 29_950, "parts are filled to the limit"


@pytest.mark.parametrize("form", Form)
def test_the_encoded_size_of_merged_equal_samples_is_computed_correctly(window, form):
    """A window may contain a stack twice, if the symbolizer evicted it between the samples."""
    frame = Frame(None, 1 << 63, (Line("f"),), 0, KERNEL_SIDE)
    samples = [
        WindowSample(Stack.from_frames((frame,)), 1, "t", 0, None, [window.start_unix_ns + number])
        for number in range(200)
    ]
    equal = with_samples(window, samples)
    size = len(encoded(equal, form=form).payload)
    assert len(encode_window(equal, form=form, max_bytes=size).batches) == 1
    assert len(encode_window(equal, form=form, max_bytes=size - 1).batches) == 2


@pytest.mark.parametrize("form", Form)
def test_a_resource_shared_by_two_profile_kinds_counts_once_toward_the_size_limit(window, form):
    resource = Resource({"process.pid": 1, "process.command_line": "x" * 1000})
    stack = Stack.from_frames((Frame(None, 1 << 63, (Line("f"),), 0, KERNEL_SIDE),))
    sample = WindowSample(stack, 1, "t", 0, None, [window.start_unix_ns], [5])
    groups = [ResourceSamples(Resource(dict(resource.attributes)), [sample])]
    kinds = [ProfileKind(name, name, "count") for name in ("first", "second")]
    profile = window.profiles[0]
    both = replace(window, profiles=[replace(profile, kind=k, resources=groups) for k in kinds])
    size = len(encoded(both, form=form).payload)
    assert len(encode_window(both, form=form, max_bytes=size).batches) == 1


def test_json_payloads_conform_to_the_otlp_json_mapping(window):
    tree = json.loads(encoded(window, form=Form.JSON, new_id=lambda n: b"\xab" * n).payload)
    profile = tree["resourceProfiles"][0]["scopeProfiles"][0]["profiles"][0]
    assert profile["timeUnixNano"] == str(window.start_unix_ns)
    assert profile["period"] == str(window.profiles[0].period_ns)
    assert profile["profileId"] == "ab" * 12 + "00000001"
    assert profile["samples"][0]["timestampsUnixNano"][0] == str(window.start_unix_ns + 5)
    assert profile["samples"][0]["stackIndex"] == 1
    results = tree["dictionary"]["linkTable"]
    assert results == [{}, {"traceId": bytes(range(16)).hex(), "spanId": bytes(range(8)).hex()}]


@pytest.mark.system
def test_importing_the_package_does_not_load_protobuf():
    code = "import otel_kprofiler.otlp, sys; sys.exit('google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_older_message_layout_is_rejected():
    def fields(**numbers):
        return {name: SimpleNamespace(number=number) for name, number in numbers.items()}

    old = fields(stack_index=1, values=2, attribute_indices=3, link_index=4, timestamps_unix_nano=5)
    new = fields(stack_index=1, attribute_indices=2, link_index=3, values=4, timestamps_unix_nano=5)
    require_current_layout(new, fields(key=1, value=2, key_strindex=3))
    for sample, key_value in ((old, fields(key_strindex=3)), (new, fields(key=1, value=2))):
        with pytest.raises(DependencyError) as caught:
            require_current_layout(sample, key_value)
        assert "opentelemetry-proto>=1.43" in caught.value.hint
