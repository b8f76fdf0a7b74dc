"""User stack frames are resolved to files and addresses, even before file details are available."""

import gc

import pytest

from otel_kprofiler.model import (
    IN_MOVED_TEXT,
    ON_CPU,
    STACK_OK,
    USER_SIDE,
    BuildId,
    FileDetails,
    FileId,
    FileKey,
    Frame,
    FrameSource,
    KnownFiles,
    Line,
    ModuleKind,
    RawSample,
    RawSide,
    Segment,
    Side,
    StackEnd,
    StackMapping,
    Unresolved,
    pack_user_stack,
)
from otel_kprofiler.symbols import UserResolver
from otel_kprofiler.symbols.user.file import NO_FILE, PENDING, NamedAddress
from otel_kprofiler.symbols.user.loader_files import DROPPED, EVICTED

SAMPLE = RawSample(ON_CPU, 1, 1, 0, 70, 71, 5, 0, b"worker", (), (), None)
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
    # PROGRAM has two executable segments whose addresses differ from their file offsets.
    PROGRAM: FileDetails(
        "/usr/bin/program", None, FileId("2" * 32),
        (Segment(0x1800, 0x2000, 0x402800), Segment(0x8000, 0x1000, 0x600000)),
    ),
}  # fmt: skip


def raw(*frames, keys=None, biases=BIAS, status=STACK_OK):
    """Builds a user stack from (file offset, file or None, unwind method) tuples."""
    if keys is None:
        keys = tuple(dict.fromkeys(key for _, key, _ in frames if key))
    mappings = tuple(StackMapping(key, biases[key]) for key in keys)
    packed = [
        (offset + (biases[key] if key else 0), keys.index(key) if key else None, source)
        for offset, key, source in frames
    ]
    return RawSide(USER_SIDE, pack_user_stack(StackEnd.COMPLETE, packed, mappings), status)


def moved(number, offset=0x30000):
    """Returns a stack from a process that maps LIBC at an address determined by ``number``."""
    return raw((offset, LIBC, REGISTERS), biases={**BIAS, LIBC: BIAS[LIBC] + 4096 * number})


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
        """Caches results, as :class:`StackResolver` does."""
        answer = answers.setdefault(side, None) or resolver.resolve(side, None)
        answers[side] = answer
        return answer if isinstance(answer, Side) else answer.of(SAMPLE)

    return resolve_side


def test_frame_addresses_are_elf_virtual_addresses(resolve):
    of_libc = [(0x30000, LIBC, REGISTERS), (0x30010, LIBC, TABLE), (0x30020, LIBC, TABLE)]
    side = resolve(raw(*of_libc, (0x1900, PROGRAM, SIGNAL), (0x8010, PROGRAM, TABLE)))
    assert [(frame.module.name, frame.address) for frame in side.frames] == [
        ("libc.so.6", 0x30000),
        ("libc.so.6", 0x3000F),  # inside the call instruction, not after it
        ("libc.so.6", 0x30020),  # a trampoline, not a return address
        ("program", 0x402900),  # interrupted by the signal
        ("program", 0x60000F),
    ]
    assert (side.kind, side.status, side.is_provisional) == (USER_SIDE, STACK_OK, False)


def test_modules_are_page_aligned_segments(resolve):
    first, second = resolve(raw((0x1900, PROGRAM, REGISTERS), (0x8010, PROGRAM, TABLE))).frames
    extents = [
        (frame.module.extent[:2], frame.module.file_offset, frame.module.kind)
        for frame in (first, second)
    ]
    assert extents == [
        ((0x402000, 0x405000), 0x1000, ModuleKind.USER),
        ((0x600000, 0x601000), 0x8000, ModuleKind.USER),
    ]


def test_an_address_outside_all_segments_is_shown_as_a_file_offset(resolve):
    (frame,) = resolve(raw((0x7000, PROGRAM, REGISTERS))).frames
    assert (frame.address, frame.module.name) == (0x7000, "program")
    assert frame.module.extent[:2] == (0, 0)


def test_frames_are_shared_by_all_processes(resolve):
    frames = (0x30000, LIBC, REGISTERS), (0x30020, LIBC, TABLE)
    first = resolve(raw(*frames)).frames
    second = resolve(raw(*frames, biases={**BIAS, LIBC: 0x7F77_0000_0000})).frames
    assert list(map(id, first)) == list(map(id, second))
    assert [frame.address for frame in second] == [0x30000, 0x3001F]
    assert resolve(raw((0x30000, LIBC, REGISTERS))) is resolve(raw((0x30000, LIBC, REGISTERS)))


def test_frames_unwound_without_tables_record_the_unwinding_method(resolve):
    side = resolve(
        raw((0x30000, LIBC, REGISTERS), (0x30020, LIBC, GUESS), (0x1900, PROGRAM, POINTER))
    )
    assert [frame.found_by for frame in side.frames] == ["", "guess", "frame_pointer"]


def test_return_addresses_at_the_start_of_a_file_keep_their_unwinding_methods(resolve):
    """The address to look up is the byte before the file, whose offset is negative."""
    side = resolve(raw((0, LIBC, GUESS), (0, LIBC, POINTER), (0, LIBC, TABLE)))
    assert [frame.found_by for frame in side.frames] == ["guess", "frame_pointer", ""]


def test_frames_in_moved_text_are_marked_but_resolved_as_usual(resolve):
    moved = resolve(
        raw((0x30000, LIBC, REGISTERS | IN_MOVED_TEXT), (0x30020, LIBC, GUESS | IN_MOVED_TEXT))
    )
    plain = resolve(raw((0x30000, LIBC, REGISTERS), (0x30020, LIBC, GUESS)))
    assert [frame.found_by for frame in moved.frames] == ["moved_text", "guess"]
    assert [frame.address for frame in moved.frames] == [frame.address for frame in plain.frames]


def test_code_not_backed_by_a_file_keeps_its_runtime_address(resolve):
    leaf, caller = resolve(raw((0x7FFF0000, None, REGISTERS), (0x30010, LIBC, TABLE))).frames
    assert (leaf.module, leaf.address, leaf.unresolved) == (None, 0x7FFF0000, Unresolved.NO_FILE)
    assert caller.unresolved is Unresolved.USER_ADDRESS


def test_code_is_reported_as_having_no_file_only_if_all_mappings_were_recorded(resolve):
    """Mappings are recorded only by the unwinder, and at most 15 per stack."""
    by_frame_pointers = UserResolver(KnownFiles())
    (frame,) = by_frame_pointers.resolve(raw((0x7FFF0000, None, REGISTERS), keys=()), None).frames
    assert (frame.address, frame.unresolved) == (0x7FFF0000, Unresolved.USER_ADDRESS)
    (frame,) = resolve(raw((0x7FFF0000, None, REGISTERS), keys=())).frames
    assert frame.unresolved is Unresolved.NO_FILE
    keys = tuple(FileKey(number, 1, 1) for number in range(15))
    (frame,) = resolve(
        raw((0x7FFF0000, None, REGISTERS), keys=keys, biases=dict.fromkeys(keys, 0))
    ).frames
    assert frame.unresolved is Unresolved.USER_ADDRESS


def test_a_provisional_user_stack_is_completed_once_its_missing_file_is_located(known, resolve):
    stack = raw((0x30000, LIBC, REGISTERS), (0x5010, UNKNOWN, TABLE))
    before = resolve(stack)
    frame = before.frames[1]
    assert before.is_provisional
    assert (frame.address, frame.unresolved) == (BIAS[UNKNOWN] + 0x500F, Unresolved.FILE_UNKNOWN)
    known.add(FileKey(1, 1, 1), DETAILS[LIBC])  # not the stack's file
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
def test_module_names_are_derived_from_file_paths(known, resolve, path, deleted, name):
    known.add(UNKNOWN, DETAILS[LIBC]._replace(path=path, deleted=deleted))
    (frame,) = resolve(raw((0x26000, UNKNOWN, REGISTERS))).frames
    assert frame.module.name == name


def test_addresses_in_a_file_that_is_not_elf_are_file_offsets(known, resolve):
    known.add(UNKNOWN, FileDetails("/tmp/perf.jit", None, FileId("3" * 32)))
    (frame,) = resolve(raw((0x10, UNKNOWN, REGISTERS))).frames
    assert (frame.module.name, frame.address, frame.module.ranges) == ("perf.jit", 0x10, ())


def count_words(resolver):
    return sum(len(words.frames) for words in resolver._words.values())


def test_the_memory_of_a_resolver_is_bounded(known):
    resolver = UserResolver(known, max_frames=50)
    for number in range(1000):
        (frame,) = resolver.resolve(moved(number, 0x30000 + number), None).frames
        assert frame.address == 0x30000 + number
        assert count_words(resolver) + len(resolver._mapped) <= 60


def test_the_number_of_cached_frames_per_mapping_is_bounded(known):
    """A process that executes all parts of a large library has many frames in one mapping."""
    resolver = UserResolver(known, max_frames=50)
    for number in range(1000):
        (frame,) = resolver.resolve(raw((0x30000 + number, LIBC, REGISTERS)), None).frames
        assert frame.address == 0x30000 + number
    alive = [one for one in gc.get_objects() if isinstance(one, Frame)]
    assert sum(0x30000 <= one.address < 0x30000 + 1000 for one in alive) <= 60


def test_frames_in_use_are_kept_while_processes_start_and_exit(known):
    """Each run of a program uses different addresses, but yields the same frames."""
    resolver = UserResolver(known, max_frames=50)
    first = None
    for number in range(1000):
        (frame,) = resolver.resolve(moved(number), None).frames
        first = first or frame
        assert frame is first
        assert count_words(resolver) <= 50


def test_symbols_that_were_dropped_are_looked_up_again(known):
    names = Names()
    names.files[LIBC] = {0x30000: DROPPED}
    resolver = UserResolver(known, names, max_frames=50)
    stack = moved(0)
    assert resolver.resolve(stack, None).frames[0].unresolved is Unresolved.SYMBOLS_DROPPED
    names.files[LIBC][0x30000] = READ
    for number in range(100):
        resolver.resolve(moved(number), None)
    assert resolver.resolve(stack, None).frames[0].function == "read"


def test_functions_receive_source_lines_once_their_file_system_responds(known):
    names = Names()
    stack = raw((0x30000, LIBC, REGISTERS), (0x31000, LIBC, REGISTERS))
    resolved = UserResolver(known, names).resolve(stack, None)
    interim = READ._replace(is_interim=True)
    names.files[LIBC] = {0x30000: interim, 0x31000: NO_NAME._replace(is_interim=True)}
    names.version = 1
    side = resolved.of(SAMPLE)
    assert side.frames[0].lines == READ.lines
    assert side.is_provisional
    names.files[LIBC] = {0x30000: DROPPED, 0x31000: DROPPED}
    names.version = 2
    assert resolved.of(SAMPLE) is side, "an evicted file loses its functions"
    with_lines = READ._replace(lines=(Line("read", file="read.c", line=7),))
    names.files[LIBC] = {0x30000: with_lines, 0x31000: NO_NAME}
    names.version = 3
    side = resolved.of(SAMPLE)
    assert [frame.lines for frame in side.frames] == [with_lines.lines, ()]
    assert not side.is_provisional


def test_functions_are_kept_if_their_file_is_evicted_before_source_lines_are_read(known):
    """A file may be evicted before its lines are read."""
    names = Names()
    names.files[LIBC] = {0x30000: READ._replace(is_interim=True)}
    resolver = UserResolver(known, names, max_frames=50)
    for number in range(200):
        assert resolver.resolve(moved(number), None).of(SAMPLE).frames[0].lines == READ.lines
        names.files[LIBC] = {0x30000: DROPPED}


def test_frames_in_an_evicted_file_are_named_after_the_file_is_read_again(known):
    """Naming the frames requires neither new stacks nor a lookup for each sample."""
    names = Names()
    names.files[LIBC] = {0x30000: EVICTED}
    resolved = UserResolver(known, names).resolve(raw((0x30000, LIBC, REGISTERS)), None)
    evicted = resolved.of(SAMPLE)
    assert evicted.frames[0].unresolved is Unresolved.SYMBOLS_DROPPED
    assert evicted.is_provisional
    assert [resolved.of(SAMPLE) for _ in range(100)] == [evicted] * 100
    assert len(names.asked) == 1
    names.files[LIBC] = {}
    names.version = 1
    assert resolved.of(SAMPLE) is evicted, "it is read again"
    names.files[LIBC] = {0x30000: READ}
    names.version = 2
    assert resolved.of(SAMPLE).frames[0].function == "read"
    assert not resolved.of(SAMPLE).is_provisional


def test_symbols_in_use_are_requested_repeatedly_to_prevent_their_eviction(known):
    """Symbols that are not requested are evicted first."""
    names = Names()
    names.files[LIBC] = {0x30000: READ}
    resolver = UserResolver(known, names, max_frames=50)
    for number in range(1000):
        resolver.resolve(moved(number), None)
    assert 1000 / 50 <= len(names.asked) <= 1000 / 10
    assert set(names.asked) == {(LIBC, 0x30000)}


class Names:
    """A stand-in for loaded symbols, which are only those in LIBC and in process 70's code."""

    def __init__(self):
        self.version = 0
        self.asked = []
        self.files = {}
        self.code = {}
        self.finished = self.closed = False

    def name(self, key, address):
        self.asked.append((key, address))
        return self.files.get(key, {}).get(address, PENDING)

    def name_code(self, process, address, at_ns):
        return self.code.get(process, {}).get(address, NO_FILE)

    def finish(self, timeout_s):
        self.finished = True

    def close(self):
        self.closed = True


READ = NamedAddress((Line("read"),), 0x2FFF0, None)
NO_NAME = NamedAddress((), 0x30000, Unresolved.NO_NAME)


def test_frames_are_resolved_after_the_symbols_of_their_file_have_been_read(known):
    names = Names()
    resolver = UserResolver(known, names)
    stack = raw((0x30000, LIBC, REGISTERS), (0x30010, LIBC, TABLE))
    answer = resolver.resolve(stack, None)
    before = answer.of(SAMPLE)
    assert before.is_provisional
    assert {frame.unresolved for frame in before.frames} == {Unresolved.SYMBOLS_PENDING}
    assert answer.of(SAMPLE) is before
    names.files[LIBC] = {0x30000: READ, 0x3000F: NO_NAME}
    names.version += 1
    after = answer.of(SAMPLE)
    assert not after.is_provisional
    leaf, caller = after.frames
    assert (leaf.function, leaf.offset, leaf.unresolved) == ("read", 0x10, None)
    assert (caller.lines, caller.offset, caller.unresolved) == ((), 0xF, Unresolved.NO_NAME)
    assert resolver.resolve(stack, None).frames == after.frames


def test_code_not_backed_by_a_file_is_symbolized_only_for_its_process(known):
    names = Names()
    names.files[LIBC] = {0x3000F: READ}
    names.code[SAMPLE.process] = {0x7000: NamedAddress((Line("hot"),), 0x6FF0, None)}
    answer = UserResolver(known, names).resolve(
        raw((0x7000, None, REGISTERS), (0x30010, LIBC, TABLE)), None
    )
    other = SAMPLE._replace(start_time_ns=6)  # a later process with the same pid
    named, unnamed = answer.of(SAMPLE), answer.of(other)
    assert [frame.function for frame in named.frames] == ["hot", "read"]
    assert named.frames[0].offset == 0x10
    assert [frame.function for frame in unnamed.frames] == ["", "read"]
    assert unnamed.frames[0].unresolved is Unresolved.NO_FILE
    assert answer.of(other) is unnamed


@pytest.mark.parametrize("path", ["/memfd:doublemapper", "/dev/zero"])
def test_generated_code_in_shared_memory_is_symbolized(known, path):
    """Some JIT compilers map their memory twice: to write code, and to execute it."""
    memory, names = FileKey(9, 9, 9), Names()
    known.add(memory, FileDetails(path, None, FileId("0" * 32)))
    names.code[SAMPLE.process] = {0x7004: NamedAddress((Line("hot"),), 0x7000, None)}
    stack = raw((4, memory, REGISTERS), biases={memory: 0x7000})
    side = UserResolver(known, names).resolve(stack, None).of(SAMPLE)
    assert [frame.function for frame in side.frames] == ["hot"]
    module = UserResolver(known).resolve(stack, None).frames[0].module
    assert module.name == path.rpartition("/")[2]


def test_frames_are_provisional_until_their_names_are_read(known):
    names = Names()
    names.files[LIBC] = {0x3000F: READ}
    names.code[SAMPLE.process] = {0x7000: PENDING}
    stack = raw((0x7000, None, REGISTERS), (0x30010, LIBC, TABLE))
    answer = UserResolver(known, names).resolve(stack, None)
    assert answer.of(SAMPLE).is_provisional
    names.code[SAMPLE.process] = {0x7000: NamedAddress((Line("hot"),), 0x7000, None)}
    assert not answer.of(SAMPLE).is_provisional
    assert answer.of(SAMPLE).frames[0].function == "hot"


def test_finish_and_close_are_forwarded_to_the_symbol_source(known):
    names = Names()
    resolver = UserResolver(known, names)
    resolver.finish(1)
    resolver.close()
    assert (names.finished, names.closed) == (True, True)
