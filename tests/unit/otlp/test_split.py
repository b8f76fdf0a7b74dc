"""Messages from any producer are re-encoded in a form that receivers accept."""

import json

import pytest

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    OFF_CPU,
    ON_CPU,
    AttributeForm,
    Batch,
    Form,
    LossCause,
    Profile,
    ProfileSamples,
    Resource,
    ResourceSamples,
    SampleCounts,
    SpanLink,
    Stack,
    StreamTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import (
    check_payload,
    decode_windows,
    divide_batch,
    encode_message,
    encode_window,
    parse_payloads,
)
from tests.windows import make_window

START = 1_700_000_000_000_000_000
FORMS = list(Form)


def sample(number, times=2):
    link = SpanLink(bytes([number % 200 + 1] * 16), bytes([number % 200 + 1] * 8))
    stamps = [START + number * 100 + at for at in range(times)]
    return WindowSample(Stack(()), number, f"thread {number}", number % 8, link, stamps)


def window(samples, processes=1):
    groups = (
        ({"process.pid": pid, "service.name": "é"}, samples) for pid in range(1, processes + 1)
    )
    return make_window(START, START + 10**9, *groups)


def message(window, attributes=AttributeForm.INLINE):
    (batch,) = encode_window(window, attributes=attributes).batches
    (payload,) = parse_payloads(batch.payload)
    return payload.message


def contents(payloads):
    return sorted(
        (time, resource.attributes["process.pid"], *sample[1:5])
        for decoded in decode_windows(payloads)
        for resource, sample in decoded.samples
        for time in sample.timestamps_unix_ns
    )


def profile_ids(batches):
    return [
        profile.profile_id
        for batch in batches
        for payload in parse_payloads(batch.payload)
        for resource in payload.message.resource_profiles
        for profile in resource.scope_profiles[0].profiles
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_message_within_the_limit_is_unchanged(form, limit):
    original = message(window([sample(1), sample(2)]))
    before = original.SerializeToString(deterministic=True)
    (batch,), too_large = encode_message(original, form, limit)
    assert not too_large
    assert batch.sample_count == 4
    assert (batch.start_unix_ns, batch.end_unix_ns) == (START, START + 10**9)
    (payload,) = parse_payloads(batch.payload)
    assert payload.message.SerializeToString(deterministic=True) == before
    assert check_payload(batch.payload) == []


@pytest.mark.parametrize("attributes", list(AttributeForm))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [2_000, 7_000])
def test_a_split_message_has_valid_parts_in_the_limit_and_loses_nothing(form, limit, attributes):
    original = message(window([sample(number) for number in range(60)], processes=3), attributes)
    expected = contents([original.SerializeToString()])
    batches, too_large = encode_message(original, form, limit)
    assert not too_large
    assert len(batches) > 1
    assert all(len(batch.payload) <= limit for batch in batches)
    assert [problem for batch in batches for problem in check_payload(batch.payload)] == []
    assert contents([batch.payload for batch in batches]) == expected
    assert sum(batch.sample_count for batch in batches) == len(expected) == 360
    ids = profile_ids(batches)
    assert len(set(ids)) == len(ids)


def test_the_timestamps_of_an_oversized_sample_are_divided_among_several_samples():
    original = message(window([sample(1, times=1000)]))
    batches, too_large = encode_message(original, Form.PROTOBUF, 2000)
    assert not too_large
    assert sum(batch.sample_count for batch in batches) == 1000
    assert len(contents([batch.payload for batch in batches])) == 1000


def test_an_indivisible_sample_above_the_limit_is_counted_as_too_large():
    huge = sample(1, times=3)._replace(thread_name="x" * 3000)
    batches, too_large = encode_message(message(window([huge, sample(2)])), Form.PROTOBUF, 2000)
    assert sum(too_large.values()) == 3
    assert [batch.sample_count for batch in batches] == [2]


@pytest.mark.parametrize("form", FORMS)
def test_string_references_in_resource_attributes_are_resolved(form):
    """The Collector's file exporter writes references, which most receivers show as empty."""
    original = message(window([sample(1)]), AttributeForm.REFERENCES)
    attributes = original.resource_profiles[0].resource.attributes
    assert all(attribute.key_strindex for attribute in attributes)
    (batch,), _ = encode_message(original, form, None)
    (payload,) = parse_payloads(batch.payload)
    attributes = payload.message.resource_profiles[0].resource.attributes
    assert {
        (attribute.key, attribute.value.string_value or attribute.value.int_value)
        for attribute in attributes
    } == {("process.pid", 1), ("service.name", "é")}
    assert check_payload(batch.payload) == []


def test_unknown_fields_from_newer_producers_are_preserved():
    original = message(window([sample(number) for number in range(50)]))
    profile = original.resource_profiles[0].scope_profiles[0].profiles[0]
    profile.MergeFromString(bytes.fromhex("fa3e") + b"\x03new")
    batches, _ = encode_message(original, Form.PROTOBUF, 3000)
    assert len(batches) > 1
    assert all(b"\xfa\x3e\x03new" in batch.payload for batch in batches)


def test_ids_in_json_are_hexadecimal():
    (batch,), _ = encode_message(message(window([sample(9)])), Form.JSON, None)
    link = json.loads(batch.payload)["dictionary"]["linkTable"][1]
    assert link == {"traceId": "0a" * 16, "spanId": "0a" * 8}


@pytest.mark.parametrize("limit", [None, 100])
def test_an_index_outside_its_table_is_an_error(limit):
    original = message(window([sample(1), sample(2)]), AttributeForm.REFERENCES)
    original.resource_profiles[0].resource.attributes[0].key_strindex = 999
    with pytest.raises(PayloadError, match="an index points outside its table"):
        encode_message(original, Form.PROTOBUF, limit)


def test_placeholder_samples_that_carry_only_loss_counts_are_not_counted():
    lost = {LossCause.RING_FULL: 5}
    account = {"taken": 5, "lost": lost, "totals": StreamTotals("stream", 0, 5, lost)}
    window = make_window(START, START + 10**9, ({"process.pid": 1}, []), **account)
    (again,), _ = encode_message(message(window), Form.PROTOBUF, None)
    assert [profile.samples for profile in again.profiles] == [0]


def two_kinds(samples=40):
    """Returns a window with two sample kinds, three processes and stream totals."""
    totals = StreamTotals("stream", 1000, 1010, {LossCause.RING_FULL: 10})
    groups = [
        ResourceSamples(Resource({"process.pid": pid}), [sample(one) for one in range(samples)])
        for pid in (1, 2, 3)
    ]
    profiles = [Profile(kind, 10, groups, taken=250, totals=totals) for kind in (ON_CPU, OFF_CPU)]
    return Window(START, START + 10**9, profiles)


def divided(batch, limit):
    """Splits a batch until each part is small enough or has a single sample."""
    parts = divide_batch(batch, limit) if len(batch.payload) > limit else ()
    return [one for part in parts for one in divided(part, limit)] or [batch]


@pytest.mark.parametrize("attributes", list(AttributeForm))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [1, 3_000, 9_000])
def test_splitting_a_batch_preserves_each_sample_once_and_all_loss_counts(form, limit, attributes):
    samples = 10 if limit == 1 else 40
    (batch,) = encode_window(two_kinds(samples), form=form, attributes=attributes).batches
    parts = divided(batch, limit)
    if limit == 1:
        assert [part.sample_count for part in parts] == [1] * 12 * samples
    else:
        assert all(len(part.payload) <= limit for part in parts)
    counts = sum((part.sample_counts for part in parts), SampleCounts())
    assert counts == batch.sample_counts == {"on_cpu": 6 * samples, "off_cpu": 6 * samples}
    assert contents([part.payload for part in parts]) == contents([batch.payload])
    assert {(part.form, part.start_unix_ns, part.end_unix_ns) for part in parts} == {
        (form, batch.start_unix_ns, batch.end_unix_ns)
    }
    for part in parts:
        assert check_payload(part.payload) == []
        (decoded,) = decode_windows(part.payload)
        for profile in decoded.profiles:
            assert (profile.totals.stream_id, profile.totals.samples) == ("stream", 1000)
            assert profile.taken == 250
        kinds = [profile.kind for profile in decoded.profiles]
        assert len(kinds) == len(set(kinds))


def test_splitting_a_batch_is_deterministic():
    (batch,) = encode_window(two_kinds()).batches
    first, second = (
        [part.payload for part in divide_batch(batch, len(batch.payload) // 2)] for _ in range(2)
    )
    assert first == second


def test_profiles_in_batches_that_are_split_repeatedly_have_distinct_ids():
    """Receivers treat profiles with the same id as duplicates."""
    (batch,) = encode_window(window([sample(1, times=9), sample(2, times=9)])).batches
    waiting, parts = [batch], []
    while waiting:
        part = waiting.pop()
        smaller = divide_batch(part, len(part.payload))
        waiting += smaller
        parts += [] if smaller else [part]
    ids = profile_ids(parts)
    assert len(set(ids)) == len(ids) == 18


@pytest.mark.parametrize(
    "batch",
    [
        encode_window(window([sample(1, times=1)])).batches[0],
        Batch(b"\xff no message", Form.PROTOBUF, (ProfileSamples("on_cpu", 5),), 0, 1),
        Batch(b"{", Form.JSON, (ProfileSamples("on_cpu", 5),), 0, 1),
        Batch(
            encode_window(window([sample(1), sample(2)])).batches[0].payload,
            Form.PROTOBUF, (ProfileSamples("on_cpu", 5),), 0, 1,
        ),
    ],
    ids=["one sample", "no protobuf", "no JSON", "another count"],
)  # fmt: skip
def test_a_batch_that_cannot_be_divided_exactly_is_not_split(batch):
    assert divide_batch(batch, 100) == ()
