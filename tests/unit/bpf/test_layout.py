"""Python and the compiled program agree on the layout of records and structs."""

import errno
import shutil
import struct
import subprocess

import pytest

from otel_kprofiler.bpf import (
    PROGRAMS,
    RECORD_HEADER_BYTES,
    KernelTypes,
    ProgramConfig,
    SpanClass,
    SpanLayout,
    SpanPath,
    parse_records,
)
from otel_kprofiler.bpf.events import EventOffsets
from otel_kprofiler.bpf.layout import (
    _BUSY_WORD,
    _COUNTERS,
    _CPU_LINE_BYTES,
    _IN_FLIGHT_WORD,
    _MISSED_WORD,
    ProgramCounts,
)
from otel_kprofiler.bpf.python_span import pack_span_path
from otel_kprofiler.bpf.task_offsets import ProgramOffsets
from otel_kprofiler.bpf.thread_contexts import PLACE_BYTES
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    PYTHON_SIDE,
    STACK_OK,
    STACK_TRUNCATED,
    TRUNCATED_STACKS,
    USER_SIDE,
    FrameSource,
    PythonEnd,
    RawSample,
    SpanLink,
    StackEnd,
    pack_python_stack,
    pack_user_stack,
)
from tests.bpf_object import check_adjacent, object_btf
from tests.records import in_ring, pack_record

TRACE, SPAN = 0x000102030405060708090A0B0C0D0E0F, 0x08090A0B0C0D0E0F


def pack(frames=(), *, start=5, kernel=0, user=0, **fields):
    fields = {"cgroup": 7, "tgid": 100, "tid": 101, "cpu": 3, "comm": b"name\0junk", **fields}
    return pack_record(11, frames, start_ns=start, kernel=kernel, user=user, **fields)


def parse(payload, *limit):
    (sample,) = parse_records(in_ring(payload), *limit)
    return sample


def words(*values):
    return struct.pack(f"<{len(values)}Q", *values)


USER_STACK = pack_user_stack(StackEnd.COMPLETE, [(3, None, FrameSource.REGISTERS)])


def test_a_record_is_parsed_into_a_sample():
    packed = pack((1, 2), trace=TRACE, span=SPAN, kernel=16, user=16, labels=0x8000_0001)
    sample = parse(packed + USER_STACK)
    assert isinstance(sample, RawSample)
    assert sample == RawSample(
        kind=ON_CPU, value=1,
        time_ns=11, cpu=3, tgid=100, tid=101, start_time_ns=5, cgroup_id=7, comm=b"name",
        collected=((KERNEL_SIDE, STACK_OK), (USER_SIDE, STACK_OK)),
        stacks=(words(1, 2), USER_STACK),
        link=SpanLink(bytes(range(16)), bytes(range(8, 16))),
        labels=0x8000_0001,
    )  # fmt: skip


def test_the_thread_context_follows_the_stacks_in_a_record():
    head = bytes(range(16)) + bytes(range(8, 16)) + struct.pack("<BBH", 1, 3, 2)
    sample = parse(pack((1,), kernel=8, user=-32768, trace=7, span=8, context=head + b"\0\0"))
    assert sample.link == SpanLink(bytes(range(16)), bytes(range(8, 16)))
    assert (sample.context, sample.stacks) == (b"\1\3\0\0", (words(1),))


@pytest.mark.parametrize("ids", [bytes(24), bytes(16) + b"s" * 8, b"t" * 16 + bytes(8)])
def test_a_thread_context_without_trace_and_span_id_has_no_span(ids):
    sample = parse(pack((1,), kernel=8, context=ids + struct.pack("<BBH", 1, 0, 3) + b"\0\1x"))
    assert (sample.link, sample.context) == (None, b"\1\0\0\1x")


GO = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331", "user": "x"}


def pack_go(labels):
    entries = [
        bytes((len(name), len(value))) + name.encode() + value.encode()
        for name, value in labels.items()
    ]
    return bytes(24) + struct.pack("<BBH", 2, 0, len(b"".join(entries))) + b"".join(entries)


def test_goroutine_labels_with_a_trace_id_and_a_span_id_yield_a_link():
    sample = parse(pack((1,), kernel=8, context=pack_go(GO)))
    assert sample.link == SpanLink(*(bytes.fromhex(GO[name]) for name in ("trace_id", "span_id")))
    assert sample.context[:2] == b"\2\0"


@pytest.mark.parametrize(
    "changes",
    [
        {"span_id": ""}, {"trace_id": "0" * 32}, {"span_id": "0" * 16}, {"span_id": "B" * 16},
        {"trace_id": "0x" + "1" * 30}, {"span_id": "1" * 15}, {"span_id": "1" * 17},
        {"trace_id": "1" * 30 + "_1"}, {"span_id": " " * 16},
    ],
)  # fmt: skip
def test_goroutine_labels_without_trace_and_span_id_yield_no_link(changes):
    assert parse(pack((1,), kernel=8, context=pack_go(GO | changes))).link is None


def test_a_truncated_thread_context_is_rejected():
    with pytest.raises(ValueError, match="a thread context has an invalid size of 27 bytes"):
        parse(pack((1,), kernel=8, context=bytes(27)))


def test_a_record_of_an_unknown_kind_is_rejected():
    with pytest.raises(ValueError, match="unknown sample kind 77"):
        parse(pack(kind=77))


def test_a_start_time_of_zero_is_parsed_as_unknown():
    assert parse(pack(start=0)).start_time_ns is None


def test_a_failed_stack_capture_does_not_affect_the_other_stack():
    sample = parse(pack((1,), kernel=8, user=-errno.EFAULT))
    assert sample.sides == ((KERNEL_SIDE, words(1), STACK_OK), (USER_SIDE, b"", -errno.EFAULT))
    sample = parse(pack(kernel=-errno.EFAULT, user=16) + USER_STACK)
    assert sample.sides == ((KERNEL_SIDE, b"", -errno.EFAULT), (USER_SIDE, USER_STACK, STACK_OK))


@pytest.mark.parametrize("user", [(), (USER_STACK,)])
@pytest.mark.parametrize(
    ("end", "status"), [(PythonEnd.COMPLETE, STACK_OK), (PythonEnd.FRAME_LIMIT, STACK_TRUNCATED)]
)
def test_python_frames_are_parsed_as_a_separate_stack(user, end, status):
    stack = pack_python_stack(end, [(7, 2, True)], tag=3)
    sizes = {"kernel": 8, "user": len(USER_STACK) if user else -32768, "python": len(stack)}
    sample = parse(pack((1,), **sizes) + b"".join(user) + stack)
    assert sample.sides[-1] == (PYTHON_SIDE, stack, status)
    assert [side.words for side in sample.sides] == [words(1), *user, stack]


def test_an_inconsistent_python_stack_is_rejected():
    stack = pack_python_stack(PythonEnd.COMPLETE, [(7, 2, True)])[:-8]
    with pytest.raises(ValueError, match="Python stack in the record at byte 8 is malformed"):
        parse(pack(python=len(stack)) + stack)


@pytest.mark.parametrize("end", StackEnd)
def test_a_user_stack_records_why_it_ends(end):
    stack = pack_user_stack(end, [(3, None, FrameSource.REGISTERS)])
    status = parse(pack(user=len(stack)) + stack).sides[-1].status
    assert (status == STACK_OK) == (end is StackEnd.COMPLETE)
    assert TRUNCATED_STACKS.get(status, StackEnd.COMPLETE) is end


@pytest.mark.parametrize("damage", [b"\0\2", b"\0\0\2", b"\0\0\1\0\2"])
def test_an_inconsistent_user_stack_is_rejected(damage):
    stack = damage + USER_STACK[len(damage) :]
    with pytest.raises(ValueError, match="user stack in the record at byte 8 is malformed"):
        parse(pack(user=len(stack)) + stack)


def test_unrequested_stacks_are_omitted_and_stacks_at_the_limit_are_marked_truncated():
    sample = parse(pack((1, 2), kernel=16, user=-32768), 16)
    assert [(side.kind, side.status) for side in sample.sides] == [(KERNEL_SIDE, STACK_TRUNCATED)]
    assert parse(pack((1,), kernel=8), 16).sides[0].status == STACK_OK


@pytest.mark.parametrize(("trace", "span"), [(0, SPAN), (TRACE, 0)])
def test_an_invalid_span_yields_no_link(trace, span):
    """A span context with an all-zero id is invalid (OpenTelemetry trace API)."""
    assert parse(pack(trace=trace, span=span)).link is None


@pytest.mark.parametrize(
    "payload",
    [pack()[:-8], pack((1,)), pack((1,), kernel=16), pack((1,), user=16)],
    ids=["short header", "stack unannounced", "kernel stack cut", "user stack cut"],
)
def test_an_inconsistent_record_is_rejected(payload):
    with pytest.raises(ValueError, match="record at byte 8"):
        parse(payload)


def test_python_and_the_bpf_object_agree_on_every_struct_layout():
    types = KernelTypes(object_btf())

    def places(name, members):
        return tuple(types.offset(name, member) for member in members)

    assert places(
        "record",
        ("time_ns", "start_time_ns", "cgroup_id", "span", "value", "stack_start",
         "tgid", "tid", "exec_id", "owner", "cpu", "kind",
         "kernel_bytes", "user_bytes", "python_bytes", "phase", "labels", "comm",
         "context_bytes", "frames"),
    ) == (
        0, 8, 16, 24, 48, 56, 64, 68, 72, 76, 80, 82, 84, 86, 88, 90, 92, 96, 112,
        RECORD_HEADER_BYTES,
    )  # fmt: skip
    assert places("span", ("trace_id", "span_id")) == (0, 16)
    numbers = tuple(name for name in ProgramConfig._fields if name != "interrupt_ranges")
    assert places("config", numbers) == (*range(0, 128, 8), 160)
    check_adjacent(types, "span_layout", SpanLayout._fields)
    check_adjacent(types, "program_offsets", ProgramOffsets._fields)
    assert types.offset("config", "interrupt_text") == 160 + 8 * len(SpanLayout._fields)
    counters = places("cpu_line", ProgramCounts._fields)
    assert counters == (*range(0, 8 * _COUNTERS, 8), 8 * _MISSED_WORD, 8 * _BUSY_WORD)
    assert places("cpu_line", ("counted", "overflows", "unused")) == (72, 80, 96)
    assert _CPU_LINE_BYTES == 96 + 4 * 8
    check_adjacent(types, "event_layout", (*EventOffsets._fields, "cpus", "may_nest"))
    tracepoint = ("number", "period", "by", "python", "argument", "pointer", "member")
    tracepoint = (*tracepoint, "is_order", "unit", "calls")
    check_adjacent(types, "tracepoint", tracepoint)
    assert places("cpu_line", ("in_flight",)) == (8 * _IN_FLIGHT_WORD,)
    check_adjacent(types, "span_path", SpanPath._fields)
    check_adjacent(types, "span_class", SpanClass._fields)
    vector = ("length_at", "first_at", "entry_at")
    place = ("start_time_ns", "stack_start", "offset", "module", "generation", *vector)
    place = (*place, "kind", "wrap_at", "vector_at", "m_at", "current_at", "labels_at")
    check_adjacent(types, "context_place", place)
    assert 8 * len(place) == PLACE_BYTES


def test_at_most_four_span_classes_can_be_packed_into_a_span_path():
    path = SpanPath(
        *range(1, len(SpanPath._fields)), (SpanClass(50, 51, 52), SpanClass(60, 61, 62))
    )
    words = struct.unpack("<32Q", pack_span_path(path))
    assert words == (*range(1, 21), 50, 51, 52, 60, 61, 62, *[0] * 6)
    with pytest.raises(ValueError, match="more than 4 span classes"):
        pack_span_path(path._replace(classes=path.classes * 3))


def test_interrupt_ranges_are_packed_as_start_and_size():
    program = ProgramOffsets(*range(16, 21))
    spans = SpanLayout(*range(21, 29))
    numbers = 1, 2, 3, 4, 5, 6
    packed = ProgramConfig(*numbers, [(100, 130), (200, 201)], *range(7, 16), program, spans).pack()
    assert struct.unpack("<36Q", packed) == (*range(1, 29), 100, 30, 200, 1, *[0] * 4)


@pytest.mark.system
@pytest.mark.skipif(
    shutil.which("clang-14") is None or shutil.which("llvm-strip-14") is None,
    reason="clang-14 and llvm-14, which the committed object was made with, are not installed",
)
def test_the_committed_objects_match_their_sources(tmp_path):
    """The objects are rebuilt in a different directory to check that they do not embed paths."""
    for source in (*PROGRAMS.glob("*.bpf.[ch]"), PROGRAMS / "build.sh"):
        shutil.copy(source, tmp_path)
    version = subprocess.run(["clang-14", "--version"], capture_output=True, text=True, check=True)
    if "Debian clang version 14.0.6" not in version.stdout:
        pytest.skip(f"the compiler is not the pinned one: {version.stdout.splitlines()[0]}")
    subprocess.run([tmp_path / "build.sh"], cwd="/", check=True)
    built, committed = (
        {path.name: path.read_bytes() for path in folder.glob("*.o")}
        for folder in (tmp_path, PROGRAMS)
    )
    assert built == committed
