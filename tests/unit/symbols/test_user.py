"""User stacks as files and addresses in them, while the files become known."""

import pytest

from otel_kprofiler.model import (
    STACK_OK,
    USER_SIDE,
    BuildId,
    FileDetails,
    FileId,
    FileKey,
    FrameSource,
    KnownFiles,
    ModuleKind,
    RawSide,
    Segment,
    Side,
    StackEnd,
    StackMapping,
    Unresolved,
    pack_user_stack,
)
from otel_kprofiler.symbols import UserResolver

LIBC, PROGRAM, UNKNOWN = (FileKey(inode, 8 << 20 | 1, 7) for inode in (100, 200, 300))
BIAS = {LIBC: 0x7F12_0000_0000, PROGRAM: 0x55AA_0000_0000, UNKNOWN: 0x7F99_0000_0000}
REGISTERS, TABLE, POINTER, GUESS, SIGNAL = (
    FrameSource.REGISTERS, FrameSource.TABLE, FrameSource.FRAME_POINTER, FrameSource.GUESS,
    FrameSource.SIGNAL,
)  # fmt: skip
DETAILS = {
    LIBC: FileDetails(
        "/usr/lib/libc.so.6", BuildId("0a" * 20), FileId("1" * 32),
        (Segment(0x26000, 0x155000, 0x26000),),
    ),
    # Two executable segments, whose addresses are not their offsets.
    PROGRAM: FileDetails(
        "/usr/bin/program", None, FileId("2" * 32),
        (Segment(0x1800, 0x2000, 0x402800), Segment(0x8000, 0x1000, 0x600000)),
    ),
}  # fmt: skip


def raw(*frames, keys=None, biases=BIAS, status=STACK_OK):
    """A user stack; a frame is an offset in a file, the file or None, and how it was found."""
    if keys is None:
        keys = tuple(dict.fromkeys(key for _, key, _ in frames if key))
    mappings = tuple(StackMapping(key, biases[key]) for key in keys)
    packed = [
        (offset + (biases[key] if key else 0), keys.index(key) if key else None, source)
        for offset, key, source in frames
    ]
    return RawSide(USER_SIDE, pack_user_stack(StackEnd.COMPLETE, packed, mappings), status)


@pytest.fixture
def known():
    files = KnownFiles()
    for key, details in DETAILS.items():
        files.add(key, details)
    return files


@pytest.fixture
def resolve(known):
    resolver, answers = UserResolver(known), {}

    def resolve_side(side):
        """As :class:`StackResolver` does, which caches answers."""
        answer = answers.setdefault(side, None) or resolver.resolve(side, None)
        answers[side] = answer
        return answer if isinstance(answer, Side) else answer.at(1)

    return resolve_side


def test_addresses_are_those_of_the_elf_file(resolve):
    side = resolve(
        raw(
            (0x30000, LIBC, REGISTERS),
            (0x30010, LIBC, TABLE),
            (0x1900, PROGRAM, SIGNAL),
            (0x8010, PROGRAM, TABLE),
        )
    )
    assert [(frame.module.name, frame.address) for frame in side.frames] == [
        ("libc.so.6", 0x30000),
        ("libc.so.6", 0x3000F),  # in the call, not behind it
        ("program", 0x402900),  # where the signal hit
        ("program", 0x60000F),
    ]
    assert (side.kind, side.status, side.is_provisional) == (USER_SIDE, STACK_OK, False)


def test_modules_are_segments_in_whole_pages(resolve):
    first, second = resolve(raw((0x1900, PROGRAM, REGISTERS), (0x8010, PROGRAM, TABLE))).frames
    extents = [
        (frame.module.extent[:2], frame.module.file_offset, frame.module.kind)
        for frame in (first, second)
    ]
    assert extents == [
        ((0x402000, 0x405000), 0x1000, ModuleKind.USER),
        ((0x600000, 0x601000), 0x8000, ModuleKind.USER),
    ]


def test_a_place_that_no_segment_loads_is_an_offset_in_the_file(resolve):
    (frame,) = resolve(raw((0x7000, PROGRAM, REGISTERS))).frames
    assert (frame.address, frame.module.name, frame.module.extent[:2]) == (
        0x7000,
        "program",
        (0, 0),
    )


def test_frames_are_the_same_in_all_processes(resolve):
    other = {**BIAS, LIBC: 0x7F77_0000_0000}
    (one,) = resolve(raw((0x30000, LIBC, REGISTERS))).frames
    (two,) = resolve(raw((0x30000, LIBC, REGISTERS), biases=other)).frames
    assert one is two
    assert resolve(raw((0x30000, LIBC, REGISTERS))) is resolve(raw((0x30000, LIBC, REGISTERS)))


def test_what_is_no_proof_is_marked(resolve):
    side = resolve(
        raw((0x30000, LIBC, REGISTERS), (0x30020, LIBC, GUESS), (0x1900, PROGRAM, POINTER))
    )
    assert [frame.found_by for frame in side.frames] == ["", "guess", "frame_pointer"]


def test_code_without_a_file_keeps_its_runtime_address(resolve):
    leaf, caller = resolve(raw((0x7FFF0000, None, REGISTERS), (0x30010, LIBC, TABLE))).frames
    assert (leaf.module, leaf.address, leaf.unresolved) == (None, 0x7FFF0000, Unresolved.NO_FILE)
    assert caller.unresolved is Unresolved.USER_ADDRESS


def test_nothing_is_said_of_a_file_where_none_was_recorded(resolve):
    """Without the unwinder no frame has a mapping; with more than 15, the last ones have not."""
    (frame,) = resolve(raw((0x7FFF0000, None, REGISTERS), keys=())).frames
    assert (frame.address, frame.unresolved) == (0x7FFF0000, Unresolved.USER_ADDRESS)
    keys = tuple(FileKey(number, 1, 1) for number in range(15))
    (frame,) = resolve(
        raw((0x7FFF0000, None, REGISTERS), keys=keys, biases=dict.fromkeys(keys, 0))
    ).frames
    assert frame.unresolved is Unresolved.USER_ADDRESS


def test_a_side_is_completed_when_its_file_becomes_known(known, resolve):
    stack = raw((0x30000, LIBC, REGISTERS), (0x5010, UNKNOWN, TABLE))
    before = resolve(stack)
    frame = before.frames[1]
    assert before.is_provisional
    assert (frame.address, frame.unresolved) == (BIAS[UNKNOWN] + 0x500F, Unresolved.FILE_UNKNOWN)
    known.add(FileKey(1, 1, 1), DETAILS[LIBC])  # another file
    assert resolve(stack) is before
    known.add(UNKNOWN, DETAILS[LIBC]._replace(path="/opt/late.so", texts=(Segment(0, 0x9000, 0),)))
    after = resolve(stack)
    assert not after.is_provisional
    assert (after.frames[1].module.name, after.frames[1].address) == ("late.so", 0x500F)
    assert after.frames[0] is before.frames[0]
    assert resolve(stack) is after


@pytest.mark.parametrize(
    ("path", "deleted", "name"),
    [
        ("/usr/bin/held", False, "held"),
        ("/usr/bin/held", True, "held (deleted)"),
        ("/memfd:held", True, "memfd:held"),
        ("[vdso]", False, "[vdso]"),
    ],
)
def test_files_are_named_as_what_they_are(known, resolve, path, deleted, name):
    known.add(UNKNOWN, DETAILS[LIBC]._replace(path=path, deleted=deleted))
    (frame,) = resolve(raw((0x26000, UNKNOWN, REGISTERS))).frames
    assert frame.module.name == name


def test_a_file_that_is_no_elf_file_has_offsets(known, resolve):
    known.add(UNKNOWN, FileDetails("/tmp/perf.jit", None, FileId("3" * 32)))
    (frame,) = resolve(raw((0x10, UNKNOWN, REGISTERS))).frames
    assert (frame.module.name, frame.address, frame.module.ranges) == ("perf.jit", 0x10, ())


def test_memory_is_bounded(monkeypatch, known):
    monkeypatch.setattr("otel_kprofiler.symbols.user.MAX_FRAMES_CACHED", 50)
    resolver = UserResolver(known)
    for number in range(1000):
        biases = {**BIAS, LIBC: BIAS[LIBC] + 4096 * number}
        stack = raw((0x30000 + number, LIBC, REGISTERS), biases=biases)
        (frame,) = resolver.resolve(stack, None).frames
        assert frame.address == 0x30000 + number
        assert sum(map(len, resolver._mapped.values())) <= 60
