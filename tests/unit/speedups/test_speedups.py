"""The C version of the speedups checks its arguments, keeps no references, and can be replaced."""

import copy
import gc
import os
import platform
import re
import struct
import sys
from pathlib import Path

import pytest

from otel_kprofiler.bpf import number_kinds
from otel_kprofiler.bpf.layout import _collect
from otel_kprofiler.bpf.wait_maps import WAIT_BEGUN
from otel_kprofiler.model import (
    ADDRESS_BITS,
    KERNEL_SIDE,
    NO_MAPPING,
    ON_CPU,
    SOURCE_BITS,
    USER_SIDE,
    FileKey,
    Frame,
    FrameSource,
    Line,
    PythonEnd,
    RawSample,
    Side,
    Stack,
    StackEnd,
    StackMapping,
    StackStatus,
    WindowSample,
    pack_python_stack,
    pack_user_stack,
)
from otel_kprofiler.otlp.json_form import JsonWriter
from otel_kprofiler.otlp.protobuf import ProtobufWriter
from otel_kprofiler.speedups import library_problem, pure
from tests.commands import run_python
from tests.emulated import run_on_arm64
from tests.interpreters import VERSIONS, require_pythons
from tests.records import in_ring, pack_record
from tests.speedups import load_compiled, measure_growth

compiled = load_compiled()
FILES = (None,) * 16
FRAME = Frame(None, 1, (), 0, KERNEL_SIDE)
SIDES = ((KERNEL_SIDE, (FRAME,)),)
LINE = Line("function", "", "file.c", 3, 1)
KEY = ("function", "", "file.c", 1)
ENTRY = b"\x12\x07\x08\x05\x10\x01\x22\x01\x06"
"""The location of the frame, with the arguments of :func:`add_locations`."""
STACK = Stack((Side(*SIDES[0]),))
SAMPLE = WindowSample(STACK, 1, "thread", 0, None, [7])
KIND = (1, "thread", 0, (), "", (), None)
"""The attributes of the sample."""
KINDS = number_kinds([])
BY_TABLE = FrameSource.TABLE << SOURCE_BITS
SUPPORTED = platform.machine() in {"x86_64", "aarch64"}
HERE = Path(__file__).parent


def word(value):
    return struct.pack("<Q", value)


def find_in(file):
    """Returns the arguments to find a caller in a file."""
    return word(BY_TABLE), 0, (file, *FILES[1:]), str


def find_in_file(pattern):
    """Returns the arguments to find a caller in a file with a pattern for new frames."""
    return find_in((compiled.FrameCache(), 0, pattern))


def use(*items):
    """Returns a cache with frames, the tokens of the same frames, and the frames."""
    cache, tokens = compiled.FrameCache(), compiled.FrameTokens()
    for at, frame in enumerate(items):
        cache[at] = frame
        tokens[frame] = b"%d" % at
    return cache, tokens


def parse(chunk, at=0, **changes):
    arguments = {
        "samples": [], "shared": {}, "kinds": KINDS, "collect": _collect, "limit": 1016,
        "type": RawSample, **changes,
    }  # fmt: skip
    return compiled.parse_samples(chunk, at, *arguments.values())


def plain(**fields):
    """Returns a sample of a running thread with all stacks, as in the ring."""
    mappings = (StackMapping(FileKey(1, 2, 3), 4),)
    user = pack_user_stack(StackEnd.COMPLETE, [(3, 0, FrameSource.TABLE)], mappings)
    python = pack_python_stack(PythonEnd.COMPLETE, [(7, 2, True)])
    record = pack_record(9, (1, 2), user=len(user), python=len(python), **fields)
    return in_ring(record + user + python)


@pytest.mark.skipif(not SUPPORTED, reason="there is no library for this processor")
def test_the_library_is_used_unless_it_is_disabled():
    is_off = os.environ.get("KPROFILER_SPEEDUPS") == "off"
    assert library_problem == ("KPROFILER_SPEEDUPS is off" if is_off else None)


def test_words_have_the_format_of_user_stacks():
    assert (pure._ADDRESS_BITS, pure._SOURCE_BITS) == (ADDRESS_BITS, SOURCE_BITS)
    assert (pure._BY_TABLE, pure._MAPPING_MASK) == (FrameSource.TABLE, NO_MAPPING)


@pytest.mark.parametrize("writer", [JsonWriter(), ProtobufWriter()], ids=["json", "protobuf"])
def test_tokens_of_all_valid_indices_fit(writer):
    """Indices are of type int32 (profiles.proto)."""
    token = writer.token(2**31 - 1)
    tokens = compiled.FrameTokens()
    tokens[FRAME] = token
    assert tokens.get(FRAME) == token


@pytest.mark.parametrize("version", [compiled, pure], ids=["C", "Python"])
def test_a_frame_stored_for_a_word_is_found_again_in_the_same_stack(version):
    cache, calls = version.FrameCache(), []

    def add(value):
        calls.append(value)
        cache[value] = frame = object()
        return frame

    first, second = cache.find(word(5) * 2, 0, FILES, add)
    assert first is second
    assert calls == [5]


@pytest.mark.parametrize("version", [compiled, pure], ids=["C", "Python"])
def test_frames_in_use_survive_aging(version):
    cache = version.FrameCache()
    for at in range(100):
        cache[at] = f"frame {at}"
    assert cache.age() == 100
    assert (len(cache), cache.get_any(), cache.get(7)) == (0, None, "frame 7")
    assert (len(cache), cache.get_any(), cache.age()) == (1, "frame 7", 1)
    assert cache.find(word(7), 0, FILES, str) == ("frame 7",)
    assert [cache.get(at) for at in range(9)] == [None] * 7 + ["frame 7", None]
    assert (cache.age(), cache.age(), cache.get(7)) == (1, 0, None)


@pytest.mark.parametrize("version", [compiled, pure], ids=["C", "Python"])
def test_frames_without_names_are_made_by_file_offset(version):
    segments = ((0x1000, 0x100, 0x400000, "text"), (0x1080, 0x10, 0x500000, "inner"))
    pattern = pure.FramePattern(Frame, segments, "file", ((), 0, KERNEL_SIDE, None, (), ""))
    cache, in_file = version.FrameCache(), version.FrameCache()
    files = ((in_file, 0x7F0000, pattern), *FILES[1:])
    expected = [
        (0x7F1000, "text", 0x400000), (BY_TABLE | 0x7F1001, "text", 0x400000),
        (0x7F1084, "inner", 0x500004), (0x7F10FF, "text", 0x4000FF), (0x7F1100, "file", 0x1100),
        (0x7EFFFF, "file", 2**64 - 1), (BY_TABLE | 0x7F0FFF, "file", 0xFFE),
    ]  # fmt: skip
    raw = b"".join(word(value) for value, _, _ in expected)
    frames = cache.find(raw, 0, files, str)
    assert [type(frame) for frame in frames] == [Frame] * 7
    assert [frame[:2] for frame in frames] == [(module, at) for _, module, at in expected]
    assert {frame[2:] for frame in frames} == {pattern.rest}
    assert frames[0] is frames[1] is in_file.get(0x1000) is cache.get(0x7F1000)
    other = FrameSource.FRAME_POINTER << SOURCE_BITS | 5
    assert cache.find(word(other), 0, files, str) == (str(other),)


@pytest.mark.parametrize("fields", [{}, {"labels": 7, "owner": 5}, {"kernel": 16, "start_ns": 0}])
def test_samples_of_running_threads_are_parsed_in_c(fields):
    samples = []
    chunk = plain(**fields) * 3
    assert parse(chunk, samples=samples) == len(chunk)
    assert len(samples) == 3
    assert samples[0].stacks[1] is samples[2].stacks[1]
    assert samples[0].collected is samples[2].collected


@pytest.mark.parametrize(
    "other",
    [
        plain(span=7), plain(context=b"c" * 28), plain(phase=WAIT_BEGUN), plain(kind=77),
        plain(kernel=8), plain()[:-8], plain()[:100], plain()[:4], b"\0\0\0\x80" + plain()[4:],
    ],
)  # fmt: skip
def test_other_records_are_left_to_the_caller(other):
    samples, chunk = [], plain() * 2
    discarded = struct.pack("<II", 5 | 1 << 30, 0) + bytes(8)
    assert parse(chunk + discarded + other, samples=samples) == len(chunk + discarded)
    assert len(samples) == 2
    assert parse(chunk, len(chunk)) == len(chunk)
    assert parse(chunk, len(chunk) + 8) == len(chunk) + 8


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError), ((b"",), TypeError), ((b"", 0, FILES, str, 5), TypeError),
        (("text", 0, FILES, str), TypeError), ((bytearray(8), 0, FILES, str), TypeError),
        ((b"", "0", FILES, str), TypeError), ((b"", 2**70, FILES, str), OverflowError),
        ((b"", 0, [None] * 16, str), TypeError), ((b"", 0, None, str), TypeError),
        ((bytes(7), 0, FILES, str), ValueError), ((bytes(8), 9, FILES, str), ValueError),
        ((bytes(8), -8, FILES, str), ValueError), ((bytes(8), 0, FILES, None), TypeError),
        ((word(BY_TABLE), 0, (), str), IndexError),
        ((word(BY_TABLE), 0, (5, *FILES[1:]), str), TypeError),
        (find_in((1, 2, None)), TypeError), (find_in((pure.FrameCache(), 2, None)), TypeError),
        (find_in((compiled.FrameCache(), 2)), TypeError),
        (find_in((compiled.FrameCache(), "0", None)), TypeError),
        (find_in((compiled.FrameCache(), -1, None)), OverflowError),
        (find_in_file(5), TypeError), (find_in_file((Frame, (), None)), TypeError),
        (find_in_file((Frame, [], None, ())), TypeError),
        (find_in_file((Frame, (), None, [])), TypeError),
        (find_in_file((Frame, (5,), None, ())), TypeError),
        (find_in_file((Frame, ((0, 2**64 - 1, 5),), None, ())), IndexError),
        (find_in_file((Frame, ((0, "1", 5, None),), None, ())), TypeError),
        (find_in_file((Frame, ((-1, 1, 5, None),), None, ())), OverflowError),
        (find_in_file((Frame, ((0, 2**64, 5, None),), None, ())), OverflowError),
        (find_in_file((str, (), None, ())), TypeError),
        (find_in_file(("", (), None, ())), TypeError),
    ],
)  # fmt: skip
def test_invalid_arguments_of_find_are_rejected(arguments, error):
    with pytest.raises(error):
        compiled.FrameCache().find(*arguments)


def user_stack(*words, mappings=1):
    files = tuple(StackMapping(FileKey(1, 2, at), 0) for at in range(mappings))
    return pack_user_stack(StackEnd.COMPLETE, [(at, None, 0) for at in words], files)


def find_user_frames(raw, tables):
    sample = RawSample(*[0] * 9, ((USER_SIDE, 0),), (raw,), None)
    sources, stacks = {USER_SIDE: (tables, None)}, []
    compiled.find_stacks([sample], (), {}, {}, sources, Side, Stack, stacks)
    return stacks[0] and stacks[0].sides[0].frames


def test_user_stacks_with_known_frames_are_found_in_c():
    cache, in_file = compiled.FrameCache(), compiled.FrameCache()
    cache[int.from_bytes(user_stack(5)[-8:], "little")] = "here"
    tables = {user_stack(5)[8:32]: (cache, FILES), b"": (in_file, FILES)}
    assert find_user_frames(user_stack(5, 5), tables) == ("here",) * 2
    assert find_user_frames(user_stack(), tables) == ()
    left = [user_stack(5, 9), user_stack(5, mappings=2), user_stack(5, mappings=0), b"", bytes(7),
            user_stack(5)[:-1], user_stack(5)[:31]]  # fmt: skip
    assert [find_user_frames(raw, tables) for raw in left] == [None] * len(left)


@pytest.mark.parametrize(
    "arguments",
    [
        ("", {}), (b"", []), (user_stack(5), {user_stack(5)[8:32]: 5}),
        (user_stack(5), {user_stack(5)[8:32]: (5, FILES)}),
        (user_stack(5), {user_stack(5)[8:32]: (pure.FrameCache(), FILES)}),
        (user_stack(5), {user_stack(5)[8:32]: (compiled.FrameTokens(), FILES)}),
        (user_stack(5), {user_stack(5)[8:32]: (compiled.FrameCache(),)}),
        (user_stack(5), {user_stack(5)[8:32]: (compiled.FrameCache(), [])}),
    ],
)  # fmt: skip
def test_invalid_user_stacks_and_tables_are_rejected(arguments):
    with pytest.raises(TypeError):
        find_user_frames(*arguments)


@pytest.mark.parametrize(
    ("key", "error"),
    [(-1, OverflowError), (2**64, OverflowError), ("1", TypeError), (1.0, TypeError)],
)
def test_words_are_unsigned_64_bit_numbers(key, error):
    cache = compiled.FrameCache()
    cache[2**64 - 1] = FRAME
    assert cache.get(2**64 - 1) is FRAME
    with pytest.raises(error):
        cache.get(key)
    with pytest.raises(error):
        cache[key] = FRAME
    assert len(cache) == 1


def test_frames_and_tokens_cannot_be_removed():
    cache, tokens = use(FRAME)
    for table, key in ((cache, 0), (tokens, FRAME)):
        with pytest.raises(TypeError, match="cannot be removed"):
            del table[key]
    assert (cache.get(0), tokens.get(FRAME)) == (FRAME, b"0")


@pytest.mark.parametrize("make", [compiled.FrameCache, compiled.FrameTokens])
def test_tables_take_no_arguments_and_cannot_be_extended_or_copied(make):
    for arguments, keywords in (((1,), {}), ((), {"size": 1})):
        with pytest.raises(TypeError):
            make(*arguments, **keywords)
    with pytest.raises(TypeError):
        type("Further", (make,), {})
    with pytest.raises(TypeError):
        copy.copy(make())
    with pytest.raises(TypeError):
        make.get = None


@pytest.mark.parametrize(
    ("token", "error"),
    [(b"", ValueError), (b"123456789012", ValueError), ("1", TypeError), (None, TypeError)],
)
def test_invalid_tokens_are_rejected(token, error):
    tokens = compiled.FrameTokens()
    with pytest.raises(error):
        tokens[FRAME] = token
    assert tokens.get(FRAME) is None
    assert tokens.most_used(5) == []


@pytest.mark.parametrize(
    "arguments",
    [
        (), (SIDES, b""), (SIDES, b"", str, 4), ([*SIDES], b"", str), (None, b"", str),
        (SIDES, "", str), (SIDES, b"", None),
    ],
)  # fmt: skip
def test_invalid_arguments_of_join_are_rejected(arguments):
    with pytest.raises(TypeError):
        compiled.FrameTokens().join(*arguments)


@pytest.mark.parametrize("side", [None, (), (1,), [1, (FRAME,)], (1, [FRAME]), (1, None)])
def test_sides_without_a_tuple_of_frames_are_left_to_the_caller(side):
    tokens = use(FRAME)[1]
    assert tokens.count(SIDES)
    assert not tokens.count((*SIDES, side, *SIDES))
    assert tokens.most_used(5) == [(FRAME, 3)]
    assert tokens.join(SIDES, b"", str) == b"0"
    assert tokens.join((*SIDES, side), b"", str) is None


def test_errors_of_statuses_are_raised():
    class Status:
        def __bool__(self):
            raise LookupError("refused")

    with pytest.raises(LookupError, match="refused"):
        compiled.FrameTokens().join(((1, (FRAME,), Status()),), b"", str)


def test_invalid_arguments_of_frame_tokens_are_rejected():
    tokens = compiled.FrameTokens()
    for sides in ([*SIDES], None, "frames"):
        with pytest.raises(TypeError, match="sides must be a tuple"):
            tokens.count(sides)
    for limit, error in ((None, TypeError), ("1", TypeError), (2**70, OverflowError)):
        with pytest.raises(error):
            tokens.most_used(limit)
    for frame in (5, FRAME[:7], (*FRAME, 8), list(FRAME)):
        tokens = compiled.FrameTokens()
        tokens[5] = b"not counted"
        tokens.count(((1, (FRAME, frame)),))
        with pytest.raises(TypeError, match="frame must be a tuple of 8 fields"):
            tokens.group({})
    for groups in (None, []):
        with pytest.raises(TypeError, match="groups must be a dict"):
            tokens.group(groups)


def test_groups_may_contain_frames_already():
    tokens, key = compiled.FrameTokens(), (id(None), KERNEL_SIDE, None, (), "")
    tokens.count(SIDES)
    tokens.group(groups := {key: [5]})
    tokens.group(groups)
    assert groups == {key: [5, FRAME, FRAME]}
    for frames in ((), None):
        with pytest.raises(TypeError, match="group must be a list"):
            tokens.group({key: frames})


def test_frames_whose_kind_has_no_hash_are_not_grouped():
    tokens, other = compiled.FrameTokens(), FRAME._replace(builtin=[])
    tokens.count(((1, (FRAME, other)),))
    with pytest.raises(TypeError, match="unhashable"):
        tokens.group({})


def test_a_token_that_is_not_stored_is_rejected():
    tokens = compiled.FrameTokens()
    for frames in ((FRAME,), (FRAME,) * 1000):
        with pytest.raises(ValueError, match="the frame still has no token"):
            tokens.join(((1, frames),), b",", lambda _: b"5")
    tokens.count(SIDES)
    with pytest.raises(ValueError, match="the frame still has no token"):
        tokens.join(SIDES, b",", lambda _: b"5")


@pytest.mark.parametrize("size", [1, 1000])
def test_errors_of_called_functions_are_raised(size):
    def fail(*_):
        raise LookupError("refused")

    cache, tokens = use(FRAME)
    with pytest.raises(LookupError, match="refused"):
        cache.find(word(0) + word(1) * size, 0, FILES, fail)
    with pytest.raises(LookupError, match="refused"):
        tokens.join(((1, (FRAME, *[object() for _ in range(size)])),), b"", fail)
    samples = []
    with pytest.raises(LookupError, match="refused"):
        parse(plain() * size, samples=samples, collect=fail)
    assert samples == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"at": -1}, ValueError), ({"at": "0"}, TypeError), ({"at": 2**70}, OverflowError),
        ({"samples": ()}, TypeError), ({"shared": []}, TypeError), ({"kinds": []}, TypeError),
        ({"limit": "8"}, TypeError), ({"limit": 2**70}, OverflowError), ({"type": 5}, TypeError),
        ({"type": list}, TypeError), ({"collect": None}, TypeError),
    ],
)  # fmt: skip
def test_invalid_arguments_of_parse_samples_are_rejected(changes, error):
    with pytest.raises(error):
        parse(plain(), **changes)


def test_parse_samples_requires_bytes_and_all_arguments():
    with pytest.raises(TypeError):
        parse(bytearray(plain()))
    with pytest.raises(TypeError, match=r"parse_samples\(\) takes 8 arguments, not 1"):
        compiled.parse_samples(b"")


def add_locations(table, /, **changes):
    arguments = {
        "frames": [FRAME], "at": 0, "start": 0, "end": 9, "mapping": b"\x05",
        "attributes": b"\x22\x01\x06", "functions": {KEY: b"\x02"}, "entries": [], "tokens": {},
        **changes,
    }  # fmt: skip
    return table.add_locations(*arguments.values())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"frames": (FRAME,)}, TypeError), ({"start": -1}, OverflowError), ({"at": ""}, TypeError),
        ({"end": 2**64}, OverflowError), ({"mapping": ""}, TypeError), ({"tokens": []}, TypeError),
        ({"attributes": None}, TypeError), ({"functions": None}, TypeError),
        ({"entries": ()}, TypeError), ({"tokens": {ENTRY: "2"}}, TypeError),
        ({"tokens": {ENTRY: b""}}, ValueError),
        ({"frames": [FRAME._replace(lines=(LINE,))], "functions": {KEY: "2"}}, TypeError),
    ],
)  # fmt: skip
def test_invalid_arguments_of_add_locations_are_rejected(changes, error):
    tokens = compiled.FrameTokens()
    with pytest.raises(error):
        add_locations(tokens, **changes)
    assert tokens.get(FRAME) is None


def test_add_locations_requires_all_arguments():
    with pytest.raises(TypeError, match=r"add_locations\(\) takes 9 arguments, not 1"):
        compiled.FrameTokens().add_locations([])


@pytest.mark.parametrize(
    "frame",
    [
        5, (), (None, 1), FRAME._replace(address=9), FRAME._replace(address=-1),
        FRAME._replace(address=None), FRAME._replace(lines=None), FRAME._replace(lines=(5,)),
        FRAME._replace(lines=(LINE[:4],)), FRAME._replace(lines=(LINE._replace(line=-1),)),
        FRAME._replace(lines=(LINE._replace(function="no token"),)),
        FRAME._replace(lines=(LINE,) * 5), FRAME._replace(lines=(LINE._replace(line=None),)),
    ],
)  # fmt: skip
def test_frames_that_cannot_be_encoded_are_left_to_the_caller(frame):
    tokens, entries, indices = compiled.FrameTokens(), [b"first"], {}
    simple, again = (FRAME._replace(lines=(LINE,)) for _ in range(2))
    entry = b"\x12\x0d\x08\x05\x10\x01\x1a\x04\x08\x02\x10\x03\x22\x01\x06"
    fields = {"frames": [simple, frame, again, frame], "entries": entries, "tokens": indices}
    assert add_locations(tokens, **fields) == (1, 15)
    assert add_locations(tokens, **fields) == (1, 0)
    assert add_locations(tokens, **fields, at=2) == (3, 0)
    assert add_locations(tokens, **fields, at=4) == (4, 0)
    tokens[frame] = b"5"
    assert add_locations(tokens, **fields) == (4, 0)
    assert (entries, indices) == ([b"first", entry], {entry: b"\2"})
    assert [tokens.get(frame) for frame in (simple, again)] == [b"\2", b"\2"]


def add_samples(table, /, **changes):
    arguments = {
        "samples": [SAMPLE], "at": 0, "stacks": {}, "statuses": {}, "shortcuts": {KIND: b"attr"},
        "entries": [], "tokens": {}, "times": {}, "sizes": [], "size": 1000, "tables_size": 100,
        "limit": 10_000, **changes,
    }  # fmt: skip
    return table.add_samples(*arguments.values())


def test_samples_are_added_up_to_the_limit():
    tokens, sizes, times = use(FRAME)[1], [], {}
    fields = {"samples": [SAMPLE] * 100, "sizes": sizes, "times": times}
    assert add_samples(tokens, **fields) == (64, 1000 + 64 * 8 + 10, 5, 64)
    assert sizes == [1000 + at * 8 + 10 + 105 for at in range(1, 65)]
    assert times == {b"\x08\x01attr": b"\7\0\0\0\0\0\0\0" * 64}
    assert add_samples(tokens, **fields, at=64, limit=1125)[0] == 67
    assert sizes[64:] == [1113, 1121, 1129]
    assert add_samples(tokens, at=1) == (1, 1000, 0, 0)
    assert add_samples(tokens, at=-1) == (-1, 1000, 0, 0)


def test_a_stack_without_an_index_is_encoded_without_the_field():
    times = {}
    assert add_samples(compiled.FrameTokens(), stacks={STACK: b""}, times=times)[0] == 1
    assert list(times) == [b"attr"]


@pytest.mark.parametrize(
    "sample",
    [
        5, (), SAMPLE[:8], (*SAMPLE, 9), list(SAMPLE), SAMPLE._replace(link=b""),
        SAMPLE._replace(timestamps_unix_ns=()), SAMPLE._replace(timestamps_unix_ns=[]),
        SAMPLE._replace(timestamps_unix_ns=[7, -1]), SAMPLE._replace(timestamps_unix_ns=[2**64]),
        SAMPLE._replace(timestamps_unix_ns=["7"]), SAMPLE._replace(tid=2),
        SAMPLE._replace(stack=Stack()), SAMPLE._replace(stack=Stack([])),
        SAMPLE._replace(stack=Stack((Side(KERNEL_SIDE, (FRAME,), StackStatus(1)),))),
        SAMPLE._replace(stack=Stack((Side(KERNEL_SIDE, (FRAME, FRAME._replace()), 0),))),
        SAMPLE._replace(stack=Stack((Side(KERNEL_SIDE, [FRAME]),))),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_encoded_are_left_to_the_caller(sample):
    tokens, sizes, times = use(FRAME)[1], [], {}
    fields = {"samples": [SAMPLE, sample, SAMPLE], "sizes": sizes, "times": times}
    assert add_samples(tokens, **fields)[0] == 1
    assert add_samples(tokens, **fields, at=1)[0] == 1
    assert add_samples(tokens, **fields, at=2)[0] == 3
    assert len(sizes) == 2
    assert times == {b"\x08\x01attr": b"\7\0\0\0\0\0\0\0" * 2}


def test_samples_with_a_status_are_left_to_the_caller():
    assert add_samples(use(FRAME)[1], stacks={STACK: b"5"}, statuses={STACK: ()})[0] == 0
    assert add_samples(use(FRAME)[1], stacks={STACK: b"5"}, statuses={5: ()})[0] == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"samples": (SAMPLE,)}, TypeError), ({"at": "0"}, TypeError), ({"stacks": []}, TypeError),
        ({"at": 2**70}, OverflowError), ({"statuses": ()}, TypeError),
        ({"shortcuts": None}, TypeError),
        ({"entries": {}}, TypeError), ({"tokens": []}, TypeError), ({"times": []}, TypeError),
        ({"sizes": {}}, TypeError), ({"size": ""}, TypeError), ({"tables_size": None}, TypeError),
        ({"limit": 2**70}, OverflowError), ({"stacks": {STACK: "5"}}, TypeError),
        ({"shortcuts": {KIND: "attr"}}, TypeError), ({"times": {b"\x08\x01attr": 5}}, TypeError),
        ({"samples": [SAMPLE._replace(stack=[])]}, TypeError),
        ({"samples": [SAMPLE._replace(stack=[])], "statuses": {5: 5}}, TypeError),
        ({"samples": [SAMPLE._replace(stack=5)]}, AttributeError),
        ({"samples": [SAMPLE._replace(wait=[])]}, TypeError),
        ({"tokens": {b"\x3a\x03\x0a\x010": "5"}}, TypeError),
    ],
)  # fmt: skip
def test_invalid_arguments_of_add_samples_are_rejected(changes, error):
    with pytest.raises(error):
        add_samples(use(FRAME)[1], **changes)


def test_add_samples_requires_all_arguments():
    with pytest.raises(TypeError, match=r"add_samples\(\) takes 12 arguments, not 1"):
        compiled.FrameTokens().add_samples([])


def test_large_stacks_and_samples_are_encoded():
    stack = Stack((Side(KERNEL_SIDE, (FRAME,) * 50_000),))
    entries, times = [], {}
    sample = SAMPLE._replace(stack=stack, timestamps_unix_ns=[2**63] * 30_000)
    assert add_samples(use(FRAME)[1], samples=[sample], entries=entries, times=times)[3] == 30_000
    writer = ProtobufWriter()
    assert entries == [writer.stack(b"0" * 50_000)]
    written = b"".join([writer.sample(head, packed, b"") for head, packed in times.items()])
    assert compiled.encode_samples(times) == written


@pytest.mark.parametrize("arguments", [(), ({}, {}), ([],), ({5: b""},), ({b"": "5"},)])
def test_invalid_arguments_of_encode_samples_are_rejected(arguments):
    with pytest.raises(TypeError):
        compiled.encode_samples(*arguments)


def test_samples_may_have_no_timestamps():
    assert compiled.encode_samples({}) == b""
    times = {b"head": b"", b"": b"12345678", b"h" * 200: b"t" * 200}
    writer = ProtobufWriter()
    written = [writer.sample(head, packed, b"") for head, packed in times.items()]
    assert compiled.encode_samples(times) == b"".join(written)


def test_a_stack_limit_beyond_32_bits_does_not_overflow():
    samples = []
    parse(plain(), samples=samples, limit=1 << 32)
    assert samples[0].sides[0].status == 0


def count(*items):
    """Returns the reference counts of objects that are not shared between interpreters."""
    return [sys.getrefcount(item) for item in items]


def test_tables_release_all_references():
    items = [object() for _ in range(1000)]
    everything = (*items, compiled.FrameCache, compiled.FrameTokens)
    first = count(*everything)
    for _ in range(3):
        cache, tokens = use(*items)
        for at, item in enumerate(reversed(items)):
            cache[at] = item  # replaces another frame
        sides = ((5, tuple(items)),)
        tokens.count(sides * 2)
        found = cache.find(b"".join(map(word, range(1000))), 0, FILES, str)
        other = compiled.FrameCache()
        files = ((cache, 2**64 - 1, None), *FILES[1:])
        found += other.find(b"".join(word(BY_TABLE | at) for at in range(1000)), 0, files, str)
        assert len(other) == 1000
        joined = tokens.join(sides, b",", str)
        assert joined == b",".join(b"%d" % at for at in range(1000))
        stack = Stack(sides)
        samples = [SAMPLE._replace(stack=stack)] * 3
        assert add_samples(tokens, samples=samples, tokens={}, stacks={})[0] == 3
        uses = tokens.most_used(1000)
        assert uses == [(item, 2) for item in items]
        del cache, tokens, other, files, found, uses, item, sides, stack, samples
        assert count(*everything) == first


def test_failures_release_all_references():
    items = [object() for _ in range(5)]
    first = count(*items)
    for _ in range(100):
        use_in_failing_calls(items)
    gc.collect()
    assert count(*items) == first


def use_in_failing_calls(items):
    cache, tokens = use(*items)
    tokens.count(((5, ((*items, *FRAME[:3]),)),))

    def fail_later(value):
        if value == 7:
            raise LookupError
        return items[0]

    def fail_to_collect(*_):
        raise LookupError(items[0])

    for call in (
        lambda: cache.find(word(0) + word(6) + word(7), 0, FILES, fail_later),
        lambda: tokens.join(((1, (*items, object())),), b"", lambda _: items[0]),
        lambda: tokens.join(((1, (*items, object())),) * 1000, b"", lambda _: items[0]),
        lambda: tokens.group({(id(items[0]), items[4], *FRAME[:3]): items[2]}),
        lambda: tokens.__setitem__(items[0], b""),
        lambda: cache.__setitem__(-1, items[0]),
        lambda: parse(plain(), kinds={1: items[0]}, collect=fail_to_collect),
        lambda: parse(plain(), kinds={1: items[0]}, type=items[1]),
        lambda: add_locations(
            tokens, frames=[FRAME, items[0], (items[1], 1, (LINE,))], functions={KEY: items[2]}
        ),
        lambda: add_locations(compiled.FrameTokens(), tokens={ENTRY: items[0]}),
        lambda: add_samples(tokens, stacks={STACK: items[0]}),
        lambda: add_samples(tokens, stacks={STACK: b"5"}, shortcuts={KIND: items[0]}),
        lambda: add_samples(tokens, stacks={STACK: b""}, times={b"attr": items[0]}),
        lambda: add_samples(tokens, samples=[SAMPLE._replace(wait=items)], stacks={STACK: b""}),
        lambda: compiled.encode_samples({b"": items[0]}),
    ):
        with pytest.raises((LookupError, ValueError, OverflowError, TypeError)):
            call()


def test_samples_own_the_references_that_parsing_took():
    kind, collected, shared = object(), (object(),), {}
    first = count(kind, collected, RawSample)
    samples = []
    chunk = plain() * 10
    kinds = {1: kind}
    parse(chunk, samples=samples, shared=shared, kinds=kinds, collect=lambda *_: collected)
    kinds.clear()
    parts = [part for part in shared if len(part) > 1]
    assert count(kind, collected, RawSample) == [number + 10 for number in first]
    references = count(*parts)
    samples.clear()
    assert count(kind, collected, RawSample) == first
    assert count(*parts) == [number - 10 for number in references]
    shared.clear()
    assert count(*parts) == count(*[bytes(9) for _ in parts])


def test_the_kind_may_be_replaced_while_a_sample_is_parsed():
    kinds = {1: ON_CPU._replace(name="temporary")}

    def collect(*_):
        kinds.clear()
        gc.collect()
        return ()

    samples = []
    parse(plain(), samples=samples, kinds=kinds, collect=collect)
    assert samples[0].kind.name == "temporary"


def test_missing_may_use_the_table_that_it_is_called_for():
    cache, tokens = compiled.FrameCache(), compiled.FrameTokens()

    def add(value):
        for at in range(1000):
            cache[value * 1000 + at] = (value, at)
        return cache.find(word(value * 1000 + 5), 0, FILES, str)[0]

    def add_token(frame):
        many = tuple(object() for _ in range(1000))
        tokens.count(((1, many),))
        tokens[frame] = b"%d" % frame
        return tokens.join(((1, (*many[:2], frame)),), b"", store)[2:]

    def store(item):
        tokens[item] = b"x"
        return b"x"

    raw = b"".join(map(word, range(50, 100)))
    assert cache.find(raw, 0, FILES, add) == tuple((value, 5) for value in range(50, 100))
    frames = tuple(range(1000, 1500))
    joined = tokens.join(((1, frames),), b",", add_token)
    assert joined == b",".join(b"%d" % frame for frame in frames)


def test_deleting_a_frame_may_use_the_table_that_contained_it():
    cache = compiled.FrameCache()

    class Deleted:
        def __del__(self):
            for at in range(100):
                cache[at] = at

    cache[5] = Deleted()
    cache[5] = "replaced"
    assert (cache.get(5), len(cache)) == (5, 100)


@pytest.mark.system
def test_parsing_and_looking_up_leaks_no_memory():
    cache, tokens = use(*map(str, range(50)))
    chunk, raw = plain() * 3 + plain(owner=7), b"".join(map(word, range(50)))
    sides = ((KERNEL_SIDE, cache.find(raw, 0, FILES, str)),)
    located = [FRAME, FRAME._replace(lines=(LINE,)), FRAME._replace(address=-1)]
    samples = [SAMPLE._replace(stack=Stack(sides))] * 3 + [SAMPLE._replace(stack=Stack())]
    kinds = compiled.FrameTokens()
    kinds.count(((KERNEL_SIDE, (*located, FRAME._replace(found_by="guess"))),))
    pattern = pure.FramePattern(Frame, ((0, 1 << 40, 1 << 50, LINE),), LINE, FRAME[2:])
    stack = user_stack(5, 6, 7)
    known = cache, ((compiled.FrameCache(), 0, pattern), *FILES[1:])
    tables = {stack[8:32]: known}

    def work():
        for _ in range(10_000):
            parse(chunk)
            cache.find(raw, 0, FILES, str)
            tokens.join(sides, b",", str)
            tokens.count(sides)
            tokens.most_used(5)
            kinds.group({})
            add_locations(compiled.FrameTokens(), frames=located)
            add_samples(tokens, samples=samples, times=(times := {}))
            compiled.encode_samples(times)
            compiled.FrameCache()[5] = "frame"
            compiled.FrameTokens()["frame"] = b"7"
            file = compiled.FrameCache()
            compiled.FrameCache().find(raw, 0, ((file, 0, pattern), *FILES[1:]), str)
            file.age()
            file.get(7)
            find_user_frames(stack, tables)
            compiled.find_line(b"\xd8\xf2\x02", 5, 9)
            compiled.interleave((7, 8, 9), b"\0\1\1", (5, 6), (1,), Side, ("n", "p"), (0,))

    # A leak of a byte in each round would exceed this.
    assert measure_growth(work) < 10_000


FALLBACK = """
import os, sys, types
machine = types.SimpleNamespace(machine=sys.argv[1])
os.uname = lambda: machine
from otel_kprofiler import speedups
from otel_kprofiler.speedups import pure
is_python = speedups.FrameCache is pure.FrameCache
assert is_python == (speedups.parse_samples is None)
print(speedups.library_problem)
assert is_python == (speedups.library_problem is not None)
"""


@pytest.mark.system
@pytest.mark.skipif(not SUPPORTED, reason="there is no library for this processor")
@pytest.mark.parametrize(
    ("machine", "choice", "expected"),
    [
        (platform.machine(), "", "None"),
        (platform.machine(), "off", "KPROFILER_SPEEDUPS is off"),
        ("riscv64", "", "No module named .*_speedups_riscv64"),
        ("aarch64" if platform.machine() == "x86_64" else "x86_64", "", ".*_speedups_.*"),
    ],
    ids=["library", "disabled", "missing library", "library for another processor"],
)
def test_the_python_version_replaces_a_library_that_cannot_be_loaded(machine, choice, expected):
    environ = {**os.environ, "KPROFILER_SPEEDUPS": choice, "PYTHONPATH": str(HERE.parents[2])}
    assert re.match(expected, run_python(FALLBACK, machine, env=environ))


@pytest.mark.system
@pytest.mark.parametrize("minor", VERSIONS[:4])
def test_both_versions_agree_in_each_python(minor):
    for python in require_pythons(minor):
        done = python.run(HERE / "agree.py")
        assert (done.stdout, done.stderr) == ("600\n", ""), python


@pytest.mark.system
@pytest.mark.parametrize("minor", VERSIONS[1:4])
def test_subinterpreters_with_a_separate_gil_use_the_python_version(minor):
    for python in require_pythons(minor):
        done = python.run(HERE / "isolated.py")
        expected = "True True False False" if minor >= "3.13" else "True True"
        assert (done.stdout.strip(), done.stderr) == (expected, ""), python


@pytest.mark.system
@pytest.mark.long
def test_both_versions_agree_on_arm64():
    assert run_on_arm64(HERE / "agree.py") == "600\n"
