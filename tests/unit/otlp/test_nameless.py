"""Names are added to payloads from any producer, in each encoding, without losing data."""

import json

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    USER_SIDE,
    AddressRange,
    BuildId,
    FileId,
    Form,
    Frame,
    Line,
    Module,
    ModuleKind,
    Stack,
    Unresolved,
    WindowSample,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window, name_locations
from tests.windows import make_window

INLINED = (Line("inner<int>", "_Z5innerIiEvv", "a.h", 7), Line("outer", "", "a.c", 40))


START = 10**18
LIBC = Module(
    name="libc.so.6",
    kind=ModuleKind.USER,
    build_id=BuildId("ab" * 20),
    file_id=FileId("cd" * 16),
    base=0,
    ranges=(AddressRange(0x29000, 0x17F000, ""),),
    file_offset=0x28000,
)
EXT4 = Module("ext4", ModuleKind.LOADED, BuildId("ef" * 20), FileId("ab" * 16), 1 << 63)
FRAMES = (
    Frame(EXT4, 0x1230, (), 0, KERNEL_SIDE, Unresolved.NOT_YET_KNOWN),
    Frame(EXT4, 0x1300, (Line("ext4_read"),), 5, KERNEL_SIDE),
    Frame(LIBC, 0x30010, (), 0, USER_SIDE, Unresolved.USER_ADDRESS),
    Frame(LIBC, 0x30020, (), 4, USER_SIDE, Unresolved.NO_NAME),
    Frame(LIBC, 0x30030, (Line("known"),), 0, USER_SIDE, found_by="frame_pointer"),
    Frame(None, 0x7F0000001000, (), 0, USER_SIDE, Unresolved.NO_FILE),
)


@pytest.fixture
def window():
    samples = [WindowSample(Stack.from_frames(FRAMES), 5, "cat", 1, None, [START + 5])]
    return make_window(START, START + 1000, ({"process.pid": 5}, samples), period_ns=1000)


def name_all(wanted):
    return {nameless.location: INLINED for nameless in wanted}


def prefixed(payload):
    return len(payload).to_bytes(4, "big") + payload


@pytest.fixture(params=["one", "prefixed", "json"])
def data(request, window):
    form = Form.JSON if request.param == "json" else Form.PROTOBUF
    payload = encode_window(window, form=form).batches[0].payload
    return {"one": payload, "prefixed": 2 * prefixed(payload), "json": 2 * (payload + b"\n")}[
        request.param
    ]


def frames(data):
    samples = (sample for window in decode_windows(data) for _, sample in window.samples)
    return [frame for sample in samples for frame in sample.stack.frames]


def test_names_are_added_to_nameless_locations_in_every_encoding(data):
    named = name_locations(data, name_all)
    assert check_payload(named.data) == []
    copies = named.nameless // 3
    assert (named.nameless, named.named) == (3 * copies, 3 * copies)
    expected = [
        frame._replace(lines=INLINED, offset=0, unresolved=None)
        if frame.module and not frame.lines
        else frame
        for frame in frames(data)
    ]
    assert frames(named.data) == expected
    assert [frame.lines for frame in expected].count(INLINED) == 3


def test_a_request_is_unchanged_if_no_names_are_available(data):
    assert name_locations(data, lambda _: {}).data in {data, json_again(data)}


def json_again(data):
    if not data.startswith(b"{"):
        return None
    lines = [json.dumps(json.loads(line), separators=(",", ":")) for line in data.splitlines()]
    return "".join(f"{line}\n" for line in lines).encode()


def test_unused_reasons_for_missing_names_are_removed_when_locations_are_named(window):
    data = encode_window(window).batches[0].payload
    assert data.count(b"no_name") == data.count(b"otel_kprofiler.unresolved") == 1
    named = name_locations(data, name_all).data
    assert (named.count(b"no_name"), named.count(b"otel_kprofiler.unresolved")) == (0, 1)
    assert named.count(b"no_file") == 1


def peer_message():
    """Builds a message like opentelemetry-ebpf-profiler's: base names, file addresses, no lines."""
    message = ExportProfilesServiceRequest()
    dictionary = message.dictionary
    dictionary.string_table.extend([
        "", "profile.frame.type", "native", "libc.so.6",
        "process.executable.build_id.gnu", "process.executable.build_id.htlhash", "cpython",
        "samples", "count",
    ])  # fmt: skip
    dictionary.link_table.add()
    dictionary.function_table.add()
    dictionary.attribute_table.add()
    for key, value in ((1, "native"), (4, "ab" * 20), (5, "cd" * 16), (1, "cpython")):
        dictionary.attribute_table.add(key_strindex=key).value.string_value = value
    dictionary.mapping_table.add()
    dictionary.mapping_table.add(
        memory_start=0x29000, memory_limit=0x17F000, file_offset=0x28000, filename_strindex=3,
        attribute_indices=[2, 3],
    )  # fmt: skip
    dictionary.location_table.add()
    dictionary.location_table.add(mapping_index=1, address=0x30010, attribute_indices=[1])
    dictionary.location_table.add(address=17, attribute_indices=[4])
    dictionary.stack_table.add()
    dictionary.stack_table.add(location_indices=[1, 2])
    scope = message.resource_profiles.add().scope_profiles.add()
    profile = scope.profiles.add(time_unix_nano=10**18, duration_nano=10**9, profile_id=b"\1" * 16)
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 7, 8
    profile.samples.add(stack_index=1, timestamps_unix_nano=[10**18 + 5])
    return message


def test_locations_from_another_producer_are_named():
    seen = []

    def find(wanted):
        seen.extend(wanted)
        return name_all(wanted)

    message = peer_message()
    named = name_locations(message.SerializeToString(), find)
    (wanted,) = seen
    assert wanted == (1, ("libc.so.6", "ab" * 20, "cd" * 16, False), 0x30010, 0x2F010)
    again = ExportProfilesServiceRequest.FromString(named.data)
    location = again.dictionary.location_table[1]
    assert [line.line for line in location.lines] == [7, 40]
    assert (named.nameless, named.named) == (1, 1)
    del location.lines[:]
    del again.dictionary.function_table[1:]
    del again.dictionary.string_table[9:]
    assert again == message


def test_a_location_without_a_frame_type_can_be_named():
    message = peer_message()
    del message.dictionary.location_table[1].attribute_indices[:]
    assert name_locations(message.SerializeToString(), name_all).named == 1


def test_unknown_fields_are_preserved(window):
    """Tests a length-delimited protobuf field with number 1000, and an unknown JSON key."""
    unknown = b"\xc2\x3e\x03new"
    payload = encode_window(window).batches[0].payload
    assert name_locations(payload + unknown, name_all).data.endswith(unknown)
    tree = json.loads(encode_window(window, form=Form.JSON).batches[0].payload)
    tree["new"] = {"a": [1]}
    tree["dictionary"]["locationTable"][1]["new"] = 5
    again = json.loads(name_locations(json.dumps(tree).encode(), name_all).data)
    assert again["new"] == {"a": [1]}
    assert again["dictionary"]["locationTable"][1]["new"] == 5


def test_json_and_protobuf_requests_yield_the_same_names():
    tree = MessageToDict(peer_message(), preserving_proto_field_name=True)
    for profile in tree["resource_profiles"][0]["scope_profiles"][0]["profiles"]:
        profile["profile_id"] = "01" * 16
    named = name_locations(json.dumps(tree).encode(), name_all)
    frame, _ = frames(named.data)
    assert frame.lines == INLINED
    assert "stringTable" not in json.loads(named.data)["dictionary"]


def test_locations_that_differ_only_in_the_unresolved_reason_are_not_merged():
    message = peer_message()
    dictionary = message.dictionary
    dictionary.string_table.append("otel_kprofiler.unresolved")
    dictionary.attribute_table.add(key_strindex=9).value.string_value = "symbols_pending"
    dictionary.location_table.add(mapping_index=1, address=0x30010, attribute_indices=[1, 5])
    dictionary.stack_table[1].location_indices.append(3)
    named = name_locations(message.SerializeToString(), name_all)
    assert "no-duplicates" not in {result.rule for result in check_payload(named.data)}
    assert [frame.lines for frame in frames(named.data)].count(INLINED) == 2


@pytest.mark.parametrize("index", [2, -1])
def test_an_index_outside_its_table_is_an_error(index):
    message = peer_message()
    message.dictionary.location_table[1].mapping_index = index
    with pytest.raises(PayloadError, match="an index points outside its table"):
        name_locations(message.SerializeToString(), name_all)
