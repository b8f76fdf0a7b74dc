"""Python frames are resolved even if the description of their code arrives after the sample."""

import tracemalloc
from pathlib import Path

import pytest

from otel_kprofiler.model import (
    KERNEL_SIDE,
    NO_CODE,
    NO_INSTRUCTION,
    ON_CPU,
    PYTHON_SIDE,
    STACK_TRUNCATED,
    KnownCodes,
    Line,
    PythonCode,
    PythonEnd,
    RawSample,
    RawSide,
    Unresolved,
    pack_python_stack,
)
from otel_kprofiler.symbols import PythonResolver, RawAddresses, StackResolver
from tests.further import further


def handler(request):
    request.read()
    return request


LINES = [line for _, _, line in handler.__code__.co_lines()]
FIRST = handler.__code__.co_firstlineno
LAST_INSTRUCTION = len(handler.__code__.co_code) // 2 - 1


def describe(code_id, code=handler.__code__, **changes):
    made = PythonCode(
        code_id, 7, 0x1000, 1, code.co_filename, code.co_qualname, code.co_firstlineno, 0,
        code.co_linetable,
    )  # fmt: skip
    return made._replace(**changes)


def raw(*frames, end=PythonEnd.COMPLETE):
    words = pack_python_stack(end, [(*frame, False)[:3] for frame in frames])
    return RawSide(PYTHON_SIDE, words, STACK_TRUNCATED if end else 0)


def sample(side):
    return RawSample(
        ON_CPU, 1, 0, 0, 7, 7, None, 0, b"", ((side.kind, side.status),), (side.words,), None
    )


@pytest.fixture
def codes():
    return KnownCodes()


@pytest.fixture
def resolver(codes):
    return PythonResolver(codes)


@pytest.fixture
def stacks(resolver):
    return StackResolver({KERNEL_SIDE: RawAddresses(KERNEL_SIDE), PYTHON_SIDE: resolver})


def test_a_frame_has_a_function_a_file_and_lines(codes, resolver):
    codes.add(describe(1))
    side = resolver.resolve(raw((1, LAST_INSTRUCTION), end=PythonEnd.FRAME_LIMIT), None)
    (frame,) = side.frames
    assert frame.lines == (Line("handler", "", __file__, FIRST + 2, FIRST),)
    assert (frame.side, frame.module, frame.address) == (PYTHON_SIDE, None, 0)
    assert (side.status, side.is_provisional) == (STACK_TRUNCATED, False)


@pytest.mark.parametrize("instruction", [NO_INSTRUCTION, LAST_INSTRUCTION + 1])
def test_an_unknown_instruction_has_no_line_number(codes, resolver, instruction):
    codes.add(describe(1))
    (frame,) = resolver.resolve(raw((1, instruction)), None).frames
    assert frame.lines == (Line("handler", "", __file__, 0, FIRST),)


def test_identical_lines_share_one_frame_across_processes(codes, resolver):
    codes.add(describe(1))
    codes.add(describe(2, process=8, address=0x2000, file=str(Path(__file__))))
    side = resolver.resolve(
        raw((1, LAST_INSTRUCTION), (1, LAST_INSTRUCTION - 1, True), (2, LAST_INSTRUCTION)), None
    )
    assert len({id(frame) for frame in side.frames}) == 1


def test_a_frame_is_provisional_until_its_description_arrives(codes, stacks):
    codes.add(describe(1))
    taken = sample(raw((1, 0), (2, 0)))
    before = stacks.resolve(taken)
    assert [frame.unresolved for frame in before.frames] == [None, Unresolved.CODE_UNKNOWN]
    assert before.is_provisional
    assert stacks.resolve(taken) is before
    codes.add(describe(3))
    assert stacks.resolve(taken) is before, "another description does not matter"
    codes.add(describe(2, function="late"))
    after = stacks.resolve(taken)
    assert [frame.function for frame in after.frames] == ["handler", "late"]
    assert not after.is_provisional
    assert stacks.resolve(taken) is after


def test_a_frame_whose_code_cannot_be_described_is_not_provisional(codes, stacks):
    codes.add(describe(1))
    stack = stacks.resolve(sample(raw((NO_CODE, 5), (1, 0))))
    assert stack.frames[0].unresolved is Unresolved.CODE_UNKNOWN
    assert not stack.is_provisional


def test_evicting_descriptions_never_removes_a_resolved_name(stacks, resolver, codes):
    codes.add(describe(1))
    taken = sample(raw((1, 0), (2, 0)))
    before = stacks.resolve(taken)
    codes._max_bytes = 1  # the next description exceeds this limit, so all descriptions are evicted
    codes.add(describe(5))
    assert not list(codes)
    resolver.close()  # clears its cache
    assert stacks.resolve(taken) is before


def test_a_code_description_without_a_line_table_still_yields_the_function_name(codes, resolver):
    codes.add(describe(1, line_table=b"", first_line=0))
    (frame,) = resolver.resolve(raw((1, 0)), None).frames
    assert frame.lines == (Line("handler", "", __file__, 0, 0),)


@pytest.mark.system
@pytest.mark.parametrize(
    ("shape", "most_mib"),
    [*further(((20_000, 240, 0), 18)), ((700, 1, 4000), 7)],
    ids=["names", "tables"],
)
def test_memory_usage_is_bounded_for_any_number_of_code_objects(codes, resolver, shape, most_mib):
    """Descriptions contain either the longest wide-character names or tables with the most runs."""
    count, text, table_bytes = shape
    table = bytes((0x80 | 11 << 3, 0)) * (table_bytes // 2)
    tracemalloc.start()
    try:
        for number in range(1, count):
            name = f"{number:x}" + "\u1234" * text
            own = table + bytes((0x80 | 15 << 3,))
            codes.add(
                describe(number, function=name, file=name[::-1], line_table=own, first_line=number)
            )
            (frame,) = resolver.resolve(raw((number, 0)), None).frames
            assert frame.function == name
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < most_mib << 20
