"""The C and the Python versions of the speedups return equal results and raise equal errors."""

import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.bpf import layout, number_kinds, parse_records
from otel_kprofiler.bpf.layout import RECORD_HEADER_BYTES
from otel_kprofiler.bpf.locks import LOCK_PHASE
from otel_kprofiler.bpf.wait_maps import (
    THREAD_BYTES,
    THREAD_ENDED,
    WAIT_BEGUN,
    WAIT_END_BYTES,
    WAIT_ENDED,
    WaitRecords,
)
from otel_kprofiler.model import (
    ADDRESS_BITS,
    KERNEL_SIDE,
    ON_CPU,
    PYTHON_SIDE,
    SOURCE_BITS,
    USER_SIDE,
    AddressRange,
    AttributeForm,
    FileId,
    FileKey,
    Form,
    Frame,
    FrameSource,
    Line,
    Module,
    ModuleKind,
    PythonEnd,
    RawSample,
    Side,
    StackEnd,
    StackMapping,
    UnnamedFrames,
    Unresolved,
    pack_python_stack,
    pack_user_stack,
)
from otel_kprofiler.otlp import dictionary as dictionary_module
from otel_kprofiler.otlp import encode as encode_module
from otel_kprofiler.otlp.dictionary import Dictionary
from otel_kprofiler.otlp.json_form import JsonWriter
from otel_kprofiler.otlp.protobuf import ProtobufWriter
from otel_kprofiler.speedups import pure
from tests.property.test_otlp import fixed_ids, relaxed, windows
from tests.records import pack_record
from tests.speedups import load_compiled

compiled = load_compiled()
BOTH = (compiled, pure)
LAST_WORD = 2**64 - 1
NOT_COLLECTED = -32768


def same(function, *arguments, **options):
    """Calls a function with each version, and returns the result that both have."""
    first, second = (function(version, *arguments, **options) for version in BOTH)
    assert first == second
    return first


# Few addresses and biases, so that words recur and frames are found in the caches of files.
words = st.builds(
    lambda address, mapping, source: address | mapping << ADDRESS_BITS | source << SOURCE_BITS,
    st.integers(0, 12) | st.sampled_from([4096, (1 << ADDRESS_BITS) - 1]),
    st.integers(0, 15),
    st.just(int(FrameSource.TABLE)) | st.integers(0, 15),
) | st.integers(0, LAST_WORD)
places = st.integers(0, 12) | words
caches = st.integers(0, 2)
biases = st.integers(0, 8) | st.sampled_from([LAST_WORD - 2, 1 << 63, 4090])
numbers = st.integers(0, 12) | st.sampled_from([LAST_WORD, 1 << 63, 4096])
segments = st.lists(st.tuples(numbers, numbers, numbers, st.integers()), max_size=3).map(tuple)
patterns = st.builds(
    pure.FramePattern, st.just(Frame), segments, st.integers(), st.just(((), 0, 1, 2, 3, 4))
)
files = st.lists(
    st.none() | st.tuples(caches, biases, st.none() | patterns), min_size=16, max_size=16
)
frames = st.integers(1, 9)
operations = st.lists(
    st.tuples(st.just("set"), caches, places, frames)
    | st.tuples(st.just("get"), caches, places)
    | st.tuples(st.just("age"), caches)
    | st.tuples(st.just("find"), caches, st.lists(words, max_size=20), st.binary(max_size=3)),
    max_size=60,
)


def use_caches(version, files, operations):
    """Returns everything that three caches return, and the calls of `missing`."""
    tables = [version.FrameCache() for _ in range(3)]
    in_files = tuple(None if file is None else (tables[file[0]], *file[1:]) for file in files)
    log = []
    for name, at, *arguments in operations:
        cache = tables[at]

        def add(word, cache=cache):
            frame = ("missing", word, len(log))
            log.append(frame)
            if word % 3:
                cache[word] = frame
            if word % 5 == 0:  # re-enter the cache while it is in use
                for other in range(word & 7):
                    cache[word * 31 + other & LAST_WORD] = ("further", word, other)
                log.append(cache.find(struct.pack("<Q", word ^ 1), 0, in_files, lambda _: "inner"))
            return frame

        if name == "set":
            cache[arguments[0]] = ("frame", arguments[1])
        elif name == "get":
            log.append(cache.get(arguments[0]))
        elif name == "age":
            log.append((cache.get_any() is None, cache.age()))
        else:
            raw = arguments[1] + array("Q", arguments[0]).tobytes()
            log.append(cache.find(raw, len(arguments[1]), in_files, add))
        log.append(list(map(len, tables)))
    return log


@settings(max_examples=200)
@given(files, operations)
def test_frame_caches_contain_and_find_the_same_frames(files, operations):
    same(use_caches, files, operations)


@given(
    st.lists(st.tuples(st.integers(1, 99), st.sampled_from([0, 0, 1, 1, 2])), max_size=30),
    st.lists(st.integers(100, 199), max_size=20).map(tuple),
    st.lists(st.integers(0, 20), max_size=6).map(sorted)
    | st.lists(st.integers(-2, 30), max_size=3),
    st.integers(-1, 0) | st.just(0),
)
def test_native_and_python_frames_are_interleaved_alike(marked, python, entries, more):
    native, marks = tuple(frame for frame, _ in marked), bytes(mark for _, mark in marked)

    def merge(version):
        try:
            return version.interleave(
                native, marks[: len(marks) + more], python, tuple(entries), Side,
                (USER_SIDE, PYTHON_SIDE), (0, False, ()),
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            return str(error)

    sides = same(merge)
    if isinstance(sides, list):
        assert all(type(side) is Side for side in sides)
        found = [frame for side in sides if side.kind is PYTHON_SIDE for frame in side.frames]
        assert tuple(found) == python


@given(st.binary(max_size=40), st.integers(-3, 42))
def test_stacks_of_partial_words_are_rejected_alike(raw, start):
    def find(version):
        try:
            return version.FrameCache().find(raw, start, (None,) * 16, str)
        except ValueError as error:
            return str(error)

    found = same(find)
    assert isinstance(found, tuple) == (0 <= start <= len(raw) and (len(raw) - start) % 8 == 0)


@pytest.mark.parametrize("step", [1, 8, 4096, 1 << 32, 1 << 56, 0x9E3779B97F4A7C15])
def test_large_frame_caches_find_all_frames(step):
    def fill(version):
        cache = version.FrameCache()
        keys = [at * step & LAST_WORD for at in range(20_000)]
        for at, key in enumerate(keys):
            cache[key] = at + 1
        others = [cache.get(key + 3 & LAST_WORD) for key in keys]
        raw = array("Q", keys).tobytes()
        return len(cache), cache.find(raw, 0, (None,) * 16, str), others

    same(fill)


# The last three are equal, but distinct, and their kinds are equal.
FRAMES = [
    Frame(None, at, (), 0, KERNEL_SIDE, None, ("ssl", f"m{number}"[:2]))
    for number, at in enumerate((*range(30), 29, 29))
]
FRAMES += [
    Frame(module, 5, (), 0, side, unresolved, found_by=found_by)
    for module in (None, Module("m", ModuleKind.USER, None, FileId("0" * 32), 0, ()))
    for side in (KERNEL_SIDE, USER_SIDE)
    for unresolved in (None, Unresolved.NO_FILE)
    for found_by in ("", "guess")
]
some_frames = st.lists(st.integers(0, len(FRAMES) - 1), max_size=20)
tokens = st.binary(min_size=1, max_size=11)
statuses = st.sampled_from([(), (0,), (0, True, ()), (0,), (1,), (-14,)])
containers = st.sampled_from([tuple, tuple, tuple, tuple, tuple, list, iter])
some_sides = st.lists(st.tuples(some_frames, containers, statuses), max_size=3)
uses = st.lists(
    st.tuples(st.just("count"), some_sides)
    | st.tuples(st.just("most_used"), st.integers(-1, len(FRAMES) + 1))
    | st.tuples(st.just("group"))
    | st.tuples(st.just("get"), st.integers(0, len(FRAMES) - 1))
    | st.tuples(st.just("set"), st.integers(0, len(FRAMES) - 1), tokens)
    | st.tuples(
        st.just("join"),
        some_sides,
        st.sampled_from([1, 1, 1, 25, 100]),
        st.sampled_from([b"", b",", b", " * 2000]),
    ),
    max_size=30,
)


def draw_sides(sides, times=1):
    """Returns the sides of a stack, each with frames in a container, and perhaps a status."""
    return tuple(
        (KERNEL_SIDE, container([FRAMES[at] for at in frames] * times), *status)
        for frames, container, status in sides
    )


def use_tokens(version, uses):
    """Returns everything that a table returns, and the calls of `missing`."""
    table = version.FrameTokens()
    log = []

    def add(frame):
        log.append(id(frame))
        token = table[frame] = f"{frame.address * 7919 % 10 ** (1 + frame.address % 11)}".encode()
        if frame.address % 2:  # enlarge the table while it is in use
            more = tuple(Frame(None, at, (), 0, KERNEL_SIDE) for at in range(100))
            table.count(((KERNEL_SIDE, more),))
        return token

    for name, *arguments in uses:
        if name == "count":
            log.append(table.count(draw_sides(*arguments)))
        elif name == "most_used":
            log.append([(*frame, count) for frame, count in table.most_used(*arguments)])
        elif name == "group":
            table.group(groups := {})
            log.append(groups)
        elif name == "get":
            log.append(table.get(FRAMES[arguments[0]]))
        elif name == "set":
            table[FRAMES[arguments[0]]] = arguments[1]
        else:
            sides, times, separator = arguments
            log.append(table.join(draw_sides(sides, times), separator, add))
    return log


@given(uses)
def test_frame_tokens_are_counted_and_joined_alike(uses):
    same(use_tokens, uses)


@pytest.mark.parametrize("separator", [b"", b","])
@pytest.mark.parametrize("count", [0, 1, 340, 341, 342, 371, 372, 373, 374, 5000])
def test_joined_tokens_may_exceed_the_buffer(count, separator):
    token = b"12345678901"

    def join(version):
        table = version.FrameTokens()
        table[FRAMES[0]] = token
        return table.join(((KERNEL_SIDE, (FRAMES[0],) * count),), separator, str)

    assert same(join) == separator.join([token] * count)


def test_frames_are_ordered_by_their_uses_and_their_first_use():
    many = [Frame(None, at, (), 0, KERNEL_SIDE) for at in range(10_000)]

    def count(version):
        table = version.FrameTokens()
        assert table.count(((KERNEL_SIDE, (*many[5000:], *many)),))
        return [(frame.address, uses) for frame, uses in table.most_used(7000)]

    assert same(count) == [(at, 2) for at in range(5000, 10_000)] + [(at, 1) for at in range(2000)]


# Events have the numbers 16 and 17.
KINDS = number_kinds([ON_CPU._replace(name="a"), ON_CPU._replace(name="b")])
u64, u32 = st.integers(0, LAST_WORD), st.integers(0, 2**32 - 1)
outcomes = st.sampled_from([NOT_COLLECTED, 0, -14, -1])
ends = st.integers(0, 255)
stack_words = st.integers(0, 5)
kernel_stacks = st.lists(st.integers(1, 3), max_size=4).map(
    lambda at: struct.pack(f"<{len(at)}Q", *at)
)
user_stacks = st.builds(
    lambda end, frames, mappings: (
        bytes((end,)) + pack_user_stack(StackEnd.COMPLETE, frames, mappings)[1:]
    ),
    st.sampled_from(StackEnd) | ends,
    st.lists(st.tuples(stack_words, st.none(), st.sampled_from(FrameSource)), max_size=3),
    st.lists(st.just(StackMapping(FileKey(1, 2, 3), 4096)), max_size=2).map(tuple),
)
python_stacks = st.builds(
    pack_python_stack,
    st.sampled_from(PythonEnd) | ends,
    st.lists(st.tuples(stack_words, stack_words, st.booleans()), max_size=3),
    stack_words,
)
contexts = st.just(b"") | st.builds(
    lambda ids, valid, attributes: (
        ids + struct.pack("<BBH", valid, 1, len(attributes)) + attributes
    ),
    st.sampled_from([bytes(24), bytes(range(24))]),
    st.integers(1, 2),
    st.sampled_from([b"", b"\0\2ab", bytes(7)]),
)
comms = st.sampled_from([b"", b"python3", b"fifteen_letters", b"sixteen__letters", b"a\0b"])
phases = st.just(0) | st.sampled_from(
    [0, 0, WAIT_BEGUN, WAIT_ENDED, THREAD_ENDED, 4, LOCK_PHASE, LOCK_PHASE + 5]
)


@st.composite
def records(draw):
    # The C version parses only samples of running threads without a span.
    is_plain = draw(st.booleans())
    stacks = [draw(outcomes | strategy) for strategy in (kernel_stacks, user_stacks, python_stacks)]
    sizes = [stack if isinstance(stack, int) else len(stack) for stack in stacks]
    context, phase = (b"", 0) if is_plain else (draw(contexts), draw(phases))
    header = pack_record(
        draw(u64),
        value=draw(u64), cgroup=draw(u64), exec_id=draw(u32), labels=draw(u32),
        tgid=draw(u32), tid=draw(u32), cpu=draw(st.integers(0, 2**16 - 1)),
        start_ns=draw(st.just(0) | u64), stack_start=draw(st.just(0) | u64),
        owner=draw(st.just(2**32 - 1) | u32),
        trace=draw(st.just(0) | st.integers(0, 2**128 - 1)),
        span=0 if is_plain else draw(st.just(0) | u64),
        kind=draw(st.sampled_from([*KINDS, *KINDS, 77])),
        kernel=sizes[0], user=sizes[1], python=sizes[2],
        phase=phase, comm=draw(comms), context=context, holder=draw(st.integers(0, 1)),
    )[:RECORD_HEADER_BYTES]  # fmt: skip
    parts = [header, *[stack for stack in stacks if isinstance(stack, bytes)], context]
    if phase == WAIT_ENDED:
        parts.insert(1, bytes(WAIT_END_BYTES))
    elif phase == THREAD_ENDED:
        parts[1:] = [bytes(THREAD_BYTES) * draw(st.integers(0, 2))]
    elif phase >= LOCK_PHASE:
        parts.append(b"holder".ljust(16, b"\0"))
    return b"".join(parts)


flags = st.sampled_from([0] * 12 + [1 << 30, 1 << 30, 1 << 31])
in_ring = st.builds(
    lambda record, flag: (
        struct.pack("<II", len(record) | flag, 0) + record + bytes(-len(record) % 8)
    ),
    records(),
    flags,
)
chunks = st.lists(in_ring, max_size=8).map(b"".join)
limits = st.sampled_from([8, 16, 1016, 1 << 40])


@st.composite
def damaged(draw):
    """Draws records with bytes overwritten, which may be truncated."""
    chunk = bytearray(draw(chunks.filter(len)))
    for _ in range(draw(st.integers(0, 4))):
        chunk[draw(st.integers(0, len(chunk) - 1))] = draw(ends)
    return bytes(chunk[: draw(st.just(len(chunk)) | st.integers(0, len(chunk)))])


def parse(version, chunk, limit):
    """Returns the samples and waits with the types of their fields; or the error."""
    waits = WaitRecords([], [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "parse_samples", getattr(version, "parse_samples", None))
        try:
            samples = parse_records(chunk, limit, waits, KINDS)
        except ValueError as error:
            return type(error), str(error), waits
    assert all(type(sample) is RawSample for sample in samples)
    types = [[type(field) for field in sample] for sample in samples]
    stacks = [words for sample in samples for words in sample.stacks]
    return samples, types, waits, len(set(map(id, stacks)))


@settings(max_examples=200)
@given(chunks, limits)
def test_records_are_parsed_alike(chunk, limit):
    same(parse, chunk, limit)


@settings(max_examples=200)
@given(damaged(), limits)
def test_damaged_records_are_parsed_or_rejected_alike(chunk, limit):
    same(parse, chunk, limit)


@settings(max_examples=200)
@given(st.binary(max_size=200), limits)
def test_arbitrary_bytes_are_rejected_alike(chunk, limit):
    same(parse, chunk, limit)


lines = st.builds(
    Line,
    st.sampled_from(["", "f", "g", "h" * 200]),
    st.sampled_from(["", "f.isra.0"]),
    st.sampled_from(["", "a.c"]),
    st.integers(0, 3) | st.integers(0, 1 << 40),
    st.integers(0, 3),
)
addresses = st.integers(0, 300) | st.integers(0, LAST_WORD)


@st.composite
def alike_frames(draw):
    """Draws frames that differ only in their addresses, lines and offsets."""
    ranges = draw(
        st.sampled_from([(), (AddressRange(0, 200, ""),), (AddressRange(100, 1 << 40, ""),)])
    )
    modules = [None, Module("m", ModuleKind.USER, None, FileId("0" * 32), 0, ranges)]
    module = draw(st.sampled_from(modules))
    unresolved = draw(st.sampled_from([None, Unresolved.NO_NAME, Unresolved.NO_FILE]))
    parts = st.tuples(addresses, st.lists(lines, max_size=4).map(tuple), st.integers(0, 10))
    return [
        Frame(module, *part, USER_SIDE, unresolved)
        for part in draw(st.lists(parts, min_size=1, max_size=8))
    ]


def add_frames(version, frames, writer, unnamed_frames):
    dictionary = Dictionary(writer, AttributeForm.INLINE, unnamed_frames)
    dictionary.frame_tokens = version.FrameTokens()
    for frame in frames[5:]:
        dictionary.frame(frame)
    dictionary.add_frames(frames)
    tables = dictionary.tables
    return tables.entries, tables.tokens, tables.size, list(map(dictionary.frame, frames))


@given(
    alike_frames(),
    st.sampled_from([ProtobufWriter(), JsonWriter()]),
    st.sampled_from(UnnamedFrames),
)
def test_locations_are_encoded_alike(frames, writer, unnamed_frames):
    same(add_frames, frames, writer, unnamed_frames)


def encode_window(version, window, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dictionary_module, "FrameTokens", version.FrameTokens)
        encode_samples = getattr(version, "encode_samples", None)
        patch.setattr(encode_module, "encode_samples", encode_samples)
        batches, too_large = encode_module.encode_window(window, new_id=fixed_ids, **options)
    return [(batch.payload, batch.profiles) for batch in batches], too_large


@st.composite
def similar_samples(draw):
    """Draws a window with samples that have the same attributes, and with equal samples."""
    window = draw(windows())
    for profile in window.profiles:
        for resource in profile.resources:
            plain = [
                sample._replace(tid=1, thread_name="a", cpu=0, link=None, labels=(), wait=None)
                for sample in resource.samples
            ]
            resource.samples.extend(draw(st.lists(st.sampled_from(plain), max_size=100)))
    return window


@relaxed
@given(
    similar_samples(),
    st.sampled_from([Form.PROTOBUF, Form.PROTOBUF, Form.JSON]),
    st.none() | st.integers(300, 4000),
    st.sampled_from(UnnamedFrames),
)
def test_windows_are_encoded_alike(window, form, limit, unnamed_frames):
    same(encode_window, window, form=form, max_bytes=limit, unnamed_frames=unnamed_frames)
