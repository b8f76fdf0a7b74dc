"""Files and payloads from this profiler and from other producers are decoded."""

from __future__ import annotations

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import Form, Unresolved
from otel_kprofiler.otlp import (
    check_file,
    check_payload,
    decode_windows,
    encode_window,
    read_profiles,
)
from otel_kprofiler.otlp.payloads import parse_payloads
from tests.windows import move_window


@pytest.fixture
def payload(window):
    return encode_window(window).batches[0].payload


@pytest.fixture
def line(window):
    return encode_window(window, form=Form.JSON).batches[0].payload + b"\n"


def profiles_of(message):
    for resource_profiles in message.resource_profiles:
        for scope_profiles in resource_profiles.scope_profiles:
            yield from scope_profiles.profiles


def prefixed(*payloads):
    return b"".join(len(item).to_bytes(4, "big") + item for item in payloads)


def test_a_protobuf_message_that_starts_like_json_is_decoded():
    message = ExportProfilesServiceRequest()
    message.resource_profiles.add(schema_url="s" * 121)
    data = message.SerializeToString()
    assert data.startswith(b"\n{")
    (parsed,) = parse_payloads(data)
    assert parsed.message == message


def test_profiles_that_a_sender_repeated_are_decoded_once(window, payload, line):
    """Delivery is at least once: a request is sent again if its response is lost."""
    (once,) = decode_windows(payload)
    for data in (prefixed(payload, payload), line + line, [payload, payload]):
        (result,) = decode_windows(data)
        assert result.sample_count == once.sample_count
    (same_window,) = decode_windows([payload, encode_window(window).batches[0].payload])
    assert same_window.sample_count == 2 * once.sample_count, "the profiles have other ids"


def test_profiles_without_ids_and_parts_of_a_profile_are_all_decoded(payload):
    message = ExportProfilesServiceRequest.FromString(payload)
    (once,) = decode_windows(payload)
    parts = []
    for at in range(2):
        part = ExportProfilesServiceRequest.FromString(payload)
        for profile in profiles_of(part):
            del profile.samples[1 - at :: 2]
        parts.append(part.SerializeToString())
    assert sum(window.sample_count for window in decode_windows(parts)) == once.sample_count
    for profile in profiles_of(message):
        profile.profile_id = b""
    unmarked = message.SerializeToString()
    (twice,) = decode_windows([unmarked, unmarked])
    assert twice.sample_count == 2 * once.sample_count


def test_runs_of_zeros_between_messages_are_skipped(payload):
    """After a crash, a file system may fill the end of a file with zeros."""
    whole = prefixed(payload)
    first, second = parse_payloads(bytes(12) + whole + bytes(1 << 20) + whole + bytes(8))
    assert first.message == second.message
    problems = []
    assert len(decode_windows(whole + bytes(6), on_damage=problems.append)) == 1
    assert [problem.message for problem in problems] == [
        f"the message at byte {len(whole) + 4} is truncated"
    ]


def test_protobuf_length_prefixed_and_json_files_are_detected(window, payload, line, tmp_path):
    path = tmp_path / "profiles"
    for data in (payload, prefixed(payload), line, line + b"\n", b"\n" + line):
        path.write_bytes(data)
        (read,) = read_profiles(str(path))
        assert read.sample_count == window.sample_count
        assert check_file(str(path)) == []


def test_each_message_becomes_a_window(window, payload, line):
    later = move_window(window, 60 * 10**9)
    later_payload = encode_window(later).batches[0].payload
    later_line = encode_window(later, form=Form.JSON).batches[0].payload + b"\n"
    for data in (prefixed(payload, later_payload), line + later_line, [payload, later_payload]):
        windows = decode_windows(data)
        assert [w.start_unix_ns for w in windows] == [window.start_unix_ns, later.start_unix_ns]
        assert [w.sample_count for w in windows] == [window.sample_count] * 2


def test_a_truncated_tail_is_ignored_by_read_and_reported_by_check(payload, line):
    for data in (prefixed(payload, payload)[:-3], prefixed(payload) + b"\0\0", line + line[:-9]):
        (read,) = decode_windows(data)
        assert read.sample_count
        assert [item.rule for item in check_payload(data)] == ["parsable"]


@pytest.mark.parametrize(
    "data", [b"\x0a\xff", b"{", b"[]", b"\x0b", b"\x0c\n", b"hello, world", b'{"a":\n1']
)
def test_unrecognized_data_is_rejected(data):
    with pytest.raises(PayloadError):
        decode_windows(data)
    assert "parsable" in {item.rule for item in check_payload(data)}


def test_empty_data_decodes_to_no_windows_and_fails_validation():
    assert decode_windows(b"") == []
    assert [item.rule for item in check_payload(b"")] == ["parsable"]


def test_message_layouts_older_than_opentelemetry_proto_1_43_are_rejected(mutable):
    sample = mutable.profile().samples[0]
    old = b"\x08\x01\x1a\x02\x01\x02"  # stack_index 1, attribute_indices in field 3
    sample.MergeFromString(old)
    with pytest.raises(PayloadError, match=r"opentelemetry-proto 1\.43"):
        decode_windows(mutable.message.SerializeToString())


def test_json_from_other_producers_is_read(window, payload):
    message = ExportProfilesServiceRequest.FromString(payload)
    text = MessageToJson(message, indent=None, preserving_proto_field_name=False)
    (read,) = decode_windows(text.encode())
    assert read.sample_count == window.sample_count
    links = {sample.link for group in read.profiles[0].resources for sample in group.samples}
    assert links == {None, window.profiles[0].resources[0].samples[1].link}, (
        "ids in base64 are understood"
    )


def test_frames_from_other_profilers_are_read(payload):
    """An interpreter's frame has a user mapping, and a BPF address has no mapping."""
    message = ExportProfilesServiceRequest.FromString(payload)
    dictionary = message.dictionary
    for entry in dictionary.attribute_table:
        if entry.value.string_value == "native":
            entry.value.string_value = "luajit"
    for location in dictionary.location_table:
        if location.address == 0x7F1234567890:
            location.mapping_index = 1
        if location.address == 0xFFFFFFFFC0001234:
            location.address = 0x10
            del location.attribute_indices[1:]
    frames = {
        frame.address: frame
        for window in decode_windows(message.SerializeToString())
        for group in window.profiles[0].resources
        for sample in group.samples
        for frame in sample.stack.frames
    }
    lua = frames[0x7F1234567890]
    assert (lua.side.name, lua.side.frame_type, lua.module.kind.value) == (
        "luajit", "luajit", "user",
    )  # fmt: skip
    assert (frames[0x10].module, frames[0x10].unresolved) == (None, Unresolved.UNMAPPED)


def test_an_aggregated_value_is_assigned_the_start_time_of_its_profile(mutable):
    message, profile = mutable.message, mutable.profile()
    del profile.samples[1:]
    del profile.samples[0].timestamps_unix_nano[:]
    profile.samples[0].values.append(3)
    (window,) = decode_windows(message.SerializeToString())
    sample = window.profiles[0].resources[0].samples[0]
    assert (sample.timestamps_unix_ns, sample.weight) == ([profile.time_unix_nano], 3)
    del profile.samples[0].values[:]
    with pytest.raises(PayloadError, match="neither timestamps nor values"):
        decode_windows(message.SerializeToString())


def test_each_value_is_paired_with_its_timestamp(mutable):
    """Off-CPU profiles from opentelemetry-ebpf-profiler have a duration for each timestamp."""
    message, profile = mutable.message, mutable.profile()
    del profile.samples[1:]
    start = profile.time_unix_nano
    profile.samples[0].timestamps_unix_nano[:] = [start, start + 1]
    profile.samples[0].values[:] = [70_000, 5]
    (window,) = decode_windows(message.SerializeToString())
    (sample,) = window.profiles[0].resources[0].samples
    assert (sample.timestamps_unix_ns, sample.values) == ([start, start + 1], [70_000, 5])
    assert sample.weight == 70_005
    profile.samples[0].values.append(1)
    with pytest.raises(PayloadError, match="2 timestamps, but 3 values"):
        decode_windows(message.SerializeToString())


def test_a_timestamp_at_the_end_of_a_window_extends_the_window(mutable):
    message, profile = mutable.message, mutable.profile()
    end = profile.time_unix_nano + profile.duration_nano
    profile.samples[0].timestamps_unix_nano.append(end)
    (window,) = decode_windows(message.SerializeToString())
    assert window.end_unix_ns == end + 1


@pytest.mark.parametrize("index", [-1, 999])
def test_an_out_of_range_index_is_an_error(mutable, index):
    mutable.profile().samples[0].stack_index = index
    with pytest.raises(PayloadError, match="index"):
        decode_windows(mutable.message.SerializeToString())
