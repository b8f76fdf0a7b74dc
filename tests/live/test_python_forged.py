"""Forged interpreter objects that change during reads cause neither errors nor lost samples."""

import array
import ctypes
import os
import random
import threading
import time

import pytest
from python_frames import LAYOUT, sampling

from benchmarks.bench_unwinding import program_times, program_usage
from otel_kprofiler.bpf import PYTHON_CFRAME, PythonProcess
from otel_kprofiler.model import PYTHON_SIDE, RawSide, Unresolved
from otel_kprofiler.symbols import PythonResolver
from otel_kprofiler.text import escape_controls
from tests.further import further
from tests.needs import LIBBPF

pytestmark = [pytest.mark.live, LIBBPF]

SECONDS = 4
WORDS = 1 << 14
FRAMES, CODES, STRINGS = 300, 40, 20
_TYPE, _SIZE, _STATE = 8, 16, 32


class Forgery:
    """Memory that imitates an interpreter's data. ``spoil`` overwrites parts of this memory."""

    def __init__(self, generator, tid):
        self._generator = generator
        self._memory = array.array("Q", bytes(8 * WORDS))
        self._start, _ = self._memory.buffer_info()
        self._next = 0
        self.runtime, interpreter, thread, cframe = (self._take(8192) for _ in range(4))
        self.code_type = self._take(8)
        self._frames = [self._take(96) for _ in range(FRAMES)]
        self._codes = [self._take(256) for _ in range(CODES)]
        self._strings = [self._take(128) for _ in range(STRINGS)]
        self._put(self.runtime + LAYOUT.interpreters_head, interpreter)
        self._put(interpreter + LAYOUT.interpreter_threads, thread)
        self._put(thread + LAYOUT.thread_interpreter, interpreter)
        self._put(thread + LAYOUT.thread_native, tid)
        current = cframe if LAYOUT.flags & PYTHON_CFRAME else self._frames[0]
        self._put(thread + LAYOUT.thread_frame, current)
        self._put(cframe + LAYOUT.cframe_frame, self._frames[0])
        for number in range(FRAMES):
            self.make_frame(number)
        for code in self._codes:
            self.make_code(code)
        for string in self._strings:
            self.make_string(string)

    def _take(self, size):
        at = self._start + self._next
        self._next += size
        assert self._next <= 8 * WORDS
        return at

    def _put(self, at, value, kind=ctypes.c_uint64):
        kind.from_address(at).value = value

    def make_frame(self, number):
        """Creates a frame whose caller is the next frame or, rarely, any frame, even itself."""
        choose, at = self._generator.choice, self._frames[number]
        following = [*self._frames, 0][number + 1]
        self._put(at + LAYOUT.frame_previous, choose((following,) * 30 + (choose(self._frames), 0)))
        code = choose(self._codes)
        self._put(at + LAYOUT.frame_code, code)
        instruction = code + LAYOUT.code_bytes + 2 * choose((3,) * 90 + (0, 40, 1 << 30))
        self._put(at + LAYOUT.frame_instruction, instruction)
        self._put(at + LAYOUT.frame_owner, choose((0, 0, 0, 2, 3, 255)), ctypes.c_uint8)
        self._put(at + LAYOUT.frame_entry, number % 7 == 0, ctypes.c_uint8)

    def make_code(self, at):
        choose = self._generator.choice
        self._put(at + _TYPE, self.code_type)
        self._put(at + _SIZE, choose((10, 1000, 1 << 40)))
        for place in (LAYOUT.code_file, LAYOUT.code_name, LAYOUT.code_table):
            self._put(at + place, choose(self._strings))

    def make_string(self, at):
        """Builds strings of any length and kind, with characters that are invalid in names."""
        choose = self._generator.choice
        ctypes.memmove(at + 40, b"\x1b[31m\n\0\xff\xd8\x00\xdc<script>;\t\r\x7f" * 3, 70)
        self._put(at + _SIZE, choose((0, 1, 20, 500, 1 << 20, 1 << 62, (1 << 64) - 1)))
        self._put(at + _STATE, self._generator.getrandbits(32), ctypes.c_uint32)

    def spoil(self):
        choose, bits = self._generator.choice, self._generator.getrandbits
        if bits(3):
            self.make_frame(self._generator.randrange(FRAMES))
            self.make_code(choose(self._codes))
            self.make_string(choose(self._strings))
            return
        kind = choose((self._frames, self._codes, self._strings))
        value = choose((0, 1, bits(64), self._start + bits(15), 0xFFFFFFFF81000000, (1 << 47) - 8))
        self._put(choose(kind) + 8 * self._generator.randrange(10), value)


@pytest.mark.parametrize("seed", [1, *further(2)])
def test_forged_python_frames_neither_slow_the_program_nor_cause_sample_loss(seed):
    forgery = Forgery(random.Random(seed), threading.get_native_id())
    process = PythonProcess(forgery.runtime, forgery.code_type, 0, 0)
    samples, with_frames, names = 0, 0, set()
    with (
        program_times(),
        sampling(register=False, samples_per_second=4999, stacks="both") as sampler,
    ):
        assert sampler.python.register(os.getpid(), LAYOUT, process)
        resolver = PythonResolver(sampler.python_codes)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or samples < 1000:
            for _ in range(200):
                forgery.spoil()
            os.listdir("/")
            for sample in sampler.drain():
                samples += 1
                words = sample.words(PYTHON_SIDE)
                if words:
                    with_frames += 1
                    for frame in resolver.make_side(RawSide(PYTHON_SIDE, words)).frames:
                        assert frame.lines or frame.unresolved is Unresolved.CODE_UNKNOWN
                        names |= {(line.function, line.file) for line in frame.lines}
        sampler.stop()
        sampler.drain()
        counts = sampler.python.counts()
        ns, runs = program_usage()
        accounted = sampler.counts()["on_cpu"]
    assert samples > 500  # the sampler kept running
    assert with_frames
    assert ns / runs < 2_000_000  # 50 µs on an idle host; a hypervisor may pause the CPU
    assert counts["described"]
    assert {"not_code", "outside"} <= counts.keys()
    assert accounted.taken == accounted.received + sum(accounted.lost.values())
    for pair in names:
        for name in pair:
            assert escape_controls(name).isprintable()
            assert len(name) <= 511
