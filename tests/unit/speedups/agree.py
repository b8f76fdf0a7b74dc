"""Compares the C version of the speedups with the Python version, without third-party packages.

Usage: agree.py. Prints the number of comparisons.
"""

import random
import struct
import sys
from array import array

from otel_kprofiler import speedups
from otel_kprofiler.bpf import layout
from otel_kprofiler.model import (
    Frame,
    FrameSource,
    Side,
    Stack,
    StackEnd,
    pack_python_stack,
    pack_user_stack,
)
from otel_kprofiler.speedups import pure
from tests.records import in_ring, pack_record

LAST_WORD = 2**64 - 1
FRAMES = [f"frame {at}" for at in range(500)]
PATTERN = pure.FramePattern(Frame, ((0, 20, 1 << 63, "text"),), "file", (5,) * 6)
chance = random.Random(7)


def use_cache(version, words, files):
    caches = [version.FrameCache() for _ in range(3)]
    for at, word in enumerate(words[::3]):
        caches[at % 3][word & (1 << 56) - 1 if at % 3 else word] = f"stored {word:x}"

    def add(word):
        frame = f"missing {word:x}"
        if word % 2:
            caches[0][word] = frame
        return frame

    places = tuple(None if file is None else (caches[file[0]], *file[1:]) for file in files)
    return [
        *caches[0].find(b"12" + array("Q", words).tobytes(), 2, places, add),
        *map(caches[1].get, words),
        *map(len, caches),
        caches[2].age(),
    ]


def use_tokens(version, frames):
    table = version.FrameTokens()

    def add(frame):
        table[frame] = token = frame[:11].encode()
        return token

    sides = (("kernel", frames[:100]), ("user", frames[100:], 0))
    counted = table.count((*sides, ("python", [])))
    joined = table.join(sides, b",", add)
    return counted, table.most_used(50), joined, [*map(table.get, frames)]


def parse(version, chunk):
    layout.parse_samples = getattr(version, "parse_samples", None)
    try:
        return layout.parse_records(chunk)
    except ValueError as error:
        return str(error)


def find_lines(version, table):
    return [version.find_line(table, len(table), at) for at in range(400)]


def interleave(version, native, marks, python, entries):
    kinds, rest = ("native", "python"), (0, False, ())
    return version.interleave(native, marks, python, entries, Side, kinds, rest)


def draw_chunk():
    records = []
    for _ in range(chance.randrange(10)):
        user = pack_user_stack(
            StackEnd(chance.randrange(12)), [(chance.randrange(9), None, FrameSource.TABLE)]
        )
        python = pack_python_stack(chance.randrange(3), [(1, 2, True)]) * chance.randrange(2)
        record = pack_record(
            chance.getrandbits(64), range(chance.randrange(5)), user=len(user),
            python=len(python) or -32768, kind=chance.choice([1, 1, 1, 77]),
            span=chance.choice([0, 0, 5]), owner=chance.choice([2**32 - 1, 1000]),
            start_ns=chance.choice([0, 5]), tgid=chance.getrandbits(32), comm=b"c" * 16,
        )  # fmt: skip
        records.append(in_ring(record + user + python))
    chunk = bytearray(b"".join(records))
    if chunk and chance.random() < 0.3:
        chunk[chance.randrange(len(chunk))] ^= 1 << chance.randrange(8)
    return bytes(chunk)


def same(function, *arguments):
    first, second = (function(version, *arguments) for version in (speedups, pure))
    assert first == second, function


def main():
    assert speedups.library_problem is None
    for _ in range(200):
        words = [
            chance.randrange(40) | chance.randrange(16) << 56 | chance.randrange(3) << 60
            for _ in range(chance.randrange(100))
        ]
        choices = [None, (1, 3, None), (2, LAST_WORD, None), (2, 5, PATTERN)]
        files = [chance.choice(choices) for _ in range(16)]
        same(use_cache, words, files)
        same(use_tokens, tuple(chance.choices(FRAMES, k=600)))
        same(parse, draw_chunk())
        table = bytes([0x80 | chance.getrandbits(7), *chance.randbytes(chance.randrange(99))])
        same(find_lines, table)
        marks, python = bytes(chance.choices([0, 0, 1, 2], k=30)), tuple(range(100, 120))
        entries = tuple(sorted(chance.sample(range(20), 4)))
        same(interleave, tuple(range(30)), marks, python, entries)
    samples, shared = [], {}
    chunk = in_ring(pack_record(1, (2, 3), user=8) + pack_user_stack(StackEnd.COMPLETE, []))
    arguments = (layout._OWN_KINDS, layout._collect, 1016, layout.RawSample)
    assert speedups.parse_samples(chunk, 0, samples, shared, *arguments) == len(chunk)
    assert samples[0].stacks[0] == struct.pack("<2Q", 2, 3)
    collected, raw, groups, stacks = samples[0].collected, samples[0].stacks, {}, []
    (kernel, _), (user, _) = collected
    side = Side(kernel, ())
    tables = {b"": (speedups.FrameCache(), (None,) * 16)}
    sides = {kernel: ({(raw[0], 0, 7): side}, 2), user: (tables, None)}
    find_state = (lambda sample: 7,)
    speedups.find_stacks(samples, find_state, {}, {}, sides, Side, Stack, stacks)
    assert stacks[0].sides[0] is side
    assert speedups.group_samples(samples, stacks, 0, groups) == (1, 1)
    assert list(groups.values()) == [[samples[0].time_ns, samples[0].value]]
    sys.stdout.write("600\n")


main()
