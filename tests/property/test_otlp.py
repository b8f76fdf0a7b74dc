"""Any window survives encoding in each form and splitting at any size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    STACK_OK,
    STACK_TRUNCATED,
    USER_SIDE,
    AddressRange,
    AttributeForm,
    BuildId,
    FileId,
    Form,
    Frame,
    Line,
    LossCause,
    Module,
    ModuleKind,
    Profile,
    ProfileKind,
    RawFrames,
    Resource,
    ResourceSamples,
    Side,
    SpanLink,
    Stack,
    StackStatus,
    StreamTotals,
    Unresolved,
    WaitCause,
    WaitState,
    WaitTotals,
    Window,
    WindowSample,
    WindowWait,
    WindowWaker,
)
from otel_kprofiler.otlp import SCHEMA_URL, check_payload, decode_windows, encode_window
from otel_kprofiler.otlp.payloads import parse_payloads
from tests.windows import make_window, timed_values

START = 1_750_000_000_000_000_000
BASE = 0xFFFFFFFFA0000000

words = st.text("abcdefghij_.äß€𝄞", min_size=1, max_size=8)
text = st.text(max_size=8)
hexadecimal = st.text("0123456789abcdef", min_size=32, max_size=32)

maybe = st.just("") | words
lines = st.lists(
    st.builds(Line, words, maybe, maybe, st.integers(0, 2**31), st.integers(0, 2**31)),
    min_size=1,
    max_size=3,
).map(tuple)

MODULE_KINDS = [ModuleKind.VMLINUX, ModuleKind.LOADED, ModuleKind.BPF, ModuleKind.OUT_OF_LINE]


@st.composite
def modules(draw):
    kind = draw(st.sampled_from(MODULE_KINDS))
    size = draw(st.sampled_from([0, 1, 200, 2**24]))
    return Module(
        name="vmlinux" if kind is ModuleKind.VMLINUX else "m" + draw(words).replace(".", "_"),
        kind=kind,
        build_id=draw(st.none() | hexadecimal.map(BuildId)),
        file_id=draw(hexadecimal.map(FileId)),
        base=BASE,
        ranges=(AddressRange(BASE, BASE + size, ".text"),) if size else (),
        generation=draw(st.integers(0, 2)),
    )


@st.composite
def kernel_frames(draw, known):
    module = draw(st.none() | st.sampled_from(known))
    address = draw(
        st.integers(2**63, 2**64 - 1) if module is None else st.integers(0, 300) | st.just(2**63)
    )
    result = draw(st.just(()) | lines)
    reasons = set(Unresolved) - {Unresolved.USER_ADDRESS}
    reason = None if result else draw(st.sampled_from(sorted(reasons, key=lambda r: r.name)))
    return Frame(module, address, result, 0, KERNEL_SIDE, reason)


@st.composite
def user_frames(draw):
    return Frame(None, draw(st.integers(0, 2**47)), (), 0, USER_SIDE, Unresolved.USER_ADDRESS)


statuses = st.sampled_from([STACK_OK, STACK_TRUNCATED]) | st.sampled_from(
    [1, 2, 12, 14, 22, 110, 9999]
).map(lambda number: StackStatus(-number))


@st.composite
def stacks(draw, kernel, user):
    below = draw(st.lists(st.sampled_from(user), max_size=4))
    made = draw(st.integers(0, len(below)))  # frames before this index are symbolized
    kernel_status, user_status = draw(st.tuples(statuses, statuses))
    raw = [frame.address for frame in below[made:]]
    above = tuple(draw(st.lists(st.sampled_from(kernel), max_size=6)))
    return Stack(
        (
            Side(KERNEL_SIDE, above, kernel_status),
            Side(USER_SIDE, tuple(below[:made])),
            Side(USER_SIDE, RawFrames(USER_SIDE, raw, Unresolved.USER_ADDRESS), user_status),
        )
    )


links = st.none() | st.builds(
    SpanLink,
    st.binary(min_size=16, max_size=16).filter(any),
    st.binary(min_size=8, max_size=8).filter(any),
)
scalars = [text, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)]
values = st.one_of(*scalars, *(st.lists(each, max_size=3).map(tuple) for each in scalars))


labels = st.dictionaries(words, text, max_size=2).map(lambda result: tuple(sorted(result.items())))
ids = st.integers(0, 2**22)
waits = st.none() | st.builds(
    WindowWait,
    st.sampled_from(WaitState),
    st.none() | st.sampled_from(WaitCause),
    st.booleans(),
    st.none() | st.builds(WindowWaker, ids, ids, text),
)
wait_totals = st.none() | st.builds(
    WaitTotals,
    st.tuples(*[st.integers(0, 2**60)] * len(WaitState)),
    st.integers(0, 2**40),
    st.integers(0, 2**60),
)

KINDS = [(ON_CPU, 10_101_010), (ProfileKind("events", "events", "count"), 0), (OFF_CPU, 0)]


@st.composite
def windows(draw):
    known = draw(st.lists(modules(), min_size=1, max_size=4))
    kernel = draw(st.lists(kernel_frames(known), min_size=1, max_size=12))
    user = draw(st.lists(user_frames(), min_size=1, max_size=6))
    shared = draw(st.lists(stacks(kernel, user), min_size=1, max_size=8))
    length = draw(st.sampled_from([1, 10**9]))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    kinds.sort(key=KINDS.index)  # in the order of the agent's windows
    return Window(START, START + length, [draw(profiles(shared, length, *kind)) for kind in kinds])


@st.composite
def profiles(draw, shared, length, kind, period):
    weigh = st.integers(0, 2**62) if kind.sample_unit == "nanoseconds" else st.just(1)

    def with_values(sample):
        count = len(sample.timestamps_unix_ns)
        return st.lists(weigh, min_size=count, max_size=count).map(
            lambda result: sample._replace(values=[] if set(result) == {1} else result)
        )

    samples = st.builds(
        WindowSample,
        st.sampled_from(shared),
        st.integers(0, 2**22),
        st.sampled_from(["cat", "kworker/0:1"]) | text,
        st.integers(0, 300),
        links,
        st.lists(st.integers(START, START + length - 1), min_size=1, max_size=20),
        st.just([]),  # placeholder: with_values adds the values
        labels,
        waits,
    ).flatmap(with_values)
    groups = [
        ResourceSamples(
            Resource({**draw(st.dictionaries(words, values, max_size=2)), "process.pid": pid % 3}),
            draw(st.lists(samples, min_size=1, max_size=6)),
            draw(wait_totals),
        )
        for pid in range(draw(st.integers(0, 4)))
    ]
    return draw(accounted(Profile(kind, period, groups)))


losses = st.dictionaries(st.sampled_from(LossCause), st.integers(1, 2**40), max_size=3)


@st.composite
def accounted(draw, profile):
    """Draws the profile with sample counts, with sample counts and stream totals, or unchanged."""
    if draw(st.booleans()):
        return profile
    samples = profile.sample_count + draw(st.integers(0, 2**40))
    totals = StreamTotals(
        draw(hexadecimal),
        samples,
        samples + draw(st.integers(0, 2**40)),
        draw(losses),
        draw(losses),
        draw(st.just(0) | st.just(START)),
        draw(st.integers(0, 2**40)),
    )
    taken = draw(st.integers(1, 2**40))
    totals = draw(st.none() | st.just(totals))
    return replace(profile, taken=taken, lost=draw(losses), totals=totals)


def module_value(module):
    if module is None:
        return None
    return (module.name, module.kind, module.build_id, module.file_id)


def content(*some):
    counts = Counter()
    for window, profile in [(made, profile) for made in some for profile in made.profiles]:
        about = profile.kind, profile.period_ns, window.start_unix_ns, window.end_unix_ns
        for resource, sample in profile.samples:
            schema_url = resource.schema_url or SCHEMA_URL
            attributes = frozenset((k, type(v), v) for k, v in resource.attributes.items())
            frames = tuple(
                (module_value(f.module), f.address, f.lines, f.side, f.unresolved)
                for f in sample.stack.frames
            )
            sides = frozenset(
                (side.kind, side.status) for side in sample.stack.sides if side.status
            )
            rest = *sample[1:5], sample.labels, sample.wait
            for entry in timed_values(sample):
                counts[*about, schema_url, attributes, frames, sides, *rest, *entry] += 1
    return counts


def account_of(profile):
    return profile.taken, profile.lost, profile.totals


def fixed_ids(count):
    return b"i" * count


relaxed = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=30)


@relaxed
@given(windows(), st.sampled_from(Form), st.sampled_from(AttributeForm))
def test_decoding_restores_the_encoded_window(window, form, attributes):
    encoded = encode_window(window, form=form, attributes=attributes)
    payloads = [batch.payload for batch in encoded.batches]
    decoded = decode_windows(payloads)
    assert content(*decoded) == content(window)
    assert not encoded.too_large
    sent = {profile.kind: profile for profile in window.profiles if profile.resources}
    assert len(decoded) == len(payloads) == bool(sent)
    for back in decoded:
        assert {profile.kind for profile in back.profiles} == sent.keys()
        for got in back.profiles:
            assert got.period_ns == sent[got.kind].period_ns
            assert (got.taken, got.lost, got.totals) == account_of(sent[got.kind])
    for payload in payloads:
        assert check_payload(payload) == []


@relaxed
@given(windows(), st.sampled_from(Form), st.integers(300, 4000))
def test_each_batch_is_valid_and_within_the_limit_and_no_sample_is_missing(window, form, limit):
    encoded = encode_window(window, form=form, max_bytes=limit)
    for batch in encoded.batches:
        assert len(batch.payload) <= limit
        assert check_payload(batch.payload) == []
        (parsed,) = parse_payloads(batch.payload)
        counts = [
            sum(len(sample.timestamps_unix_nano) for sample in profile.samples)
            for group in parsed.message.resource_profiles
            for scope in group.scope_profiles
            for profile in scope.profiles
        ]
        assert [profile.samples for profile in batch.profiles] == counts
    sent = sum(batch.sample_count for batch in encoded.batches)
    assert sent + sum(encoded.too_large.values()) == window.sample_count
    back = content(*decode_windows(batch.payload for batch in encoded.batches))
    missing = content(window) - back
    assert not back - content(window)
    assert missing.total() == sum(encoded.too_large.values())


@relaxed
@given(windows().filter(lambda window: window.sample_count), st.sampled_from(Form))
def test_encoded_sizes_are_predicted_exactly(window, form):
    """A limit equal to the encoded size has no effect; a limit one byte lower is not exceeded."""
    (batch,) = encode_window(window, form=form, new_id=fixed_ids).batches
    same = encode_window(window, form=form, max_bytes=len(batch.payload), new_id=fixed_ids)
    assert [part.payload for part in same.batches] == [batch.payload]
    limit = len(batch.payload) - 1
    less = encode_window(window, form=form, max_bytes=limit, new_id=fixed_ids)
    assert less.batches or less.too_large
    assert all(len(part.payload) <= limit for part in less.batches)


@relaxed
@given(windows().filter(lambda window: window.sample_count))
def test_json_and_protobuf_are_equivalent(window):
    binary, json_text = (
        next(parse_payloads(encode_window(window, form=form, new_id=fixed_ids).batches[0].payload))
        for form in (Form.PROTOBUF, Form.JSON)
    )
    assert binary.message == json_text.message
    assert json_text.notes == ()


@pytest.mark.parametrize("form", Form)
def test_windows_with_more_frames_than_short_indices_can_address_are_split_correctly(form):
    """Frequent frames have the lowest indices. Parts are nearly full, without unused frames."""
    frames = [
        Frame(None, 2**63 + number, (Line("function" * 4 + str(number)),), 0, KERNEL_SIDE)
        for number in range(600)
    ]
    samples = [
        WindowSample(Stack.from_frames(stack), number, "t", 0, None, [START])
        for number in range(1200)
        for stack in [tuple(frames[number * k % 600] for k in (1, 2, 7, 11))]
    ]
    window = make_window(START, START + 1, ({"process.pid": 1}, samples))
    (whole,) = encode_window(window, form=form).batches
    parts = encode_window(window, form=form, max_bytes=16_384).batches
    assert len(parts) > 5
    assert sum(len(part.payload) for part in parts) > 0.85 * 16_384 * (len(parts) - 1)
    for part in (whole, *parts):
        assert check_payload(part.payload) == []
    assert content(*decode_windows(part.payload for part in parts)) == content(window)


@st.composite
def damaged(draw):
    window = draw(windows().filter(lambda window: window.sample_count))
    batch = encode_window(window, form=draw(st.sampled_from(Form)), new_id=fixed_ids).batches[0]
    data = bytearray(batch.payload)
    for position, byte in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=4)
    ):
        data[position] = byte
    return bytes(data[draw(st.integers(0, 3)) :])


@relaxed
@given(damaged() | st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"resourceProfiles":[{"schemaUrl":"\\ud800"}]}')
@example(b'{"dictionary":{"mappingTable":[{"memoryStart":Infinity}]}}')
@example(b'{"dictionary":{"attributeTable":[{"value":' + b'{"arrayValue":{"values":[' * 1000)
def test_malformed_data_is_decoded_or_rejected_without_a_crash(data):
    violations = check_payload(data)
    try:
        decode_windows(data)
    except PayloadError:
        assert violations, "what cannot be read breaks a rule"
