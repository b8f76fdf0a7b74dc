"""Arbitrary data in the memory of a sampled interpreter causes no errors and no lost samples."""

import ctypes
import os
import random
import threading
import time

import pytest
from python_frames import LAYOUT, PROCESS, sampling

from otel_kprofiler.model import PYTHON_SIDE, parse_python_stack
from tests.further import further
from tests.needs import LIBBPF

pytestmark = [pytest.mark.live, LIBBPF]

WORDS = 1 << 13
RUNTIME, INTERPRETER, THREAD, FRAMES, CODES = 0, 1024, 2048, 2560, 4096
FRAME_WORDS, CODE_WORDS = 16, 32
HUGE = (0, 1, 127, 1 << 20, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
LONGEST_TEXT = 508
SECONDS = 2


class FakeInterpreter:
    """Memory that contains a thread state, and frames and code objects with random pointers."""

    def __init__(self, tid, seed):
        self._words = (ctypes.c_uint64 * WORDS)()
        self._at = ctypes.addressof(self._words)
        self._random = random.Random(seed)
        self.process = PROCESS._replace(
            runtime_at=self._at, code_type=self.address(8), eval_bytes=0
        )
        self.put(RUNTIME, LAYOUT.interpreters_head, self.address(INTERPRETER))
        self.put(INTERPRETER, LAYOUT.interpreter_threads, self.address(THREAD))
        self.put(THREAD, LAYOUT.thread_interpreter, self.address(INTERPRETER))
        self.put(THREAD, LAYOUT.thread_native, tid)
        self.scribble()

    def address(self, word):
        return self._at + 8 * word

    def put(self, start, offset, value):
        self._words[start + offset // 8] = value

    def scribble(self):
        """Overwrites the frames and code objects reachable from the thread state."""
        choose = self._random.choice
        frames = [FRAMES + FRAME_WORDS * n for n in range(64)]
        codes = [CODES + CODE_WORDS * n for n in range(64)]
        start = self.address(choose(frames))
        self.put(THREAD, LAYOUT.thread_frame, start)
        if LAYOUT.flags:
            self.put(THREAD, LAYOUT.thread_frame, self.address(THREAD + 60) - LAYOUT.cframe_frame)
            self._words[THREAD + 60] = start
        for frame in self._random.sample(frames, 16):
            code = choose(codes)
            at = self.address(code) + LAYOUT.code_bytes + 2 * self._random.randrange(-2, 200)
            for offset in range(0, 8 * FRAME_WORDS, 8):
                self.put(frame, offset, choose(HUGE))
            self.put(frame, LAYOUT.frame_previous, self.address(choose(frames)))
            self.put(frame, LAYOUT.frame_code, self.address(code))
            self.put(frame, LAYOUT.frame_instruction, at)
            self.put(frame, LAYOUT.frame_owner, choose((0, 0, 0, 0, 1, 1 << 40)))
            self._make_code(code)

    def _make_code(self, code):
        choose = self._random.choice
        for offset in range(0, 8 * CODE_WORDS, 8):
            self.put(code, offset, choose(HUGE))
        self.put(code, 8, self.process.code_type)
        self.put(code, 16, 1000)
        # String and table pointers lead into code objects, so lengths and states are arbitrary.
        for offset in (LAYOUT.code_file, LAYOUT.code_name, LAYOUT.code_table):
            self.put(code, offset, self.address(choose((CODES, CODES + 700, WORDS - 4))))
        self.put(code, LAYOUT.code_traceable, 0)
        self.put(code, 32, self._random.getrandbits(10))


@pytest.mark.parametrize("seed", [0, *further(1, 2)])
def test_every_sample_is_counted_while_a_process_overwrites_its_python_frames(seed):
    going = threading.Event()
    fake = FakeInterpreter(threading.get_native_id(), seed)

    def scribble():
        while not going.is_set():
            fake.scribble()

    def own_work():
        return os.listdir("/usr/bin")

    scribbler = threading.Thread(target=scribble)
    with sampling(register=False, python_frames=127) as sampler:
        assert sampler.python.register(os.getpid(), LAYOUT, fake.process)
        scribbler.start()
        try:
            samples, end = [], time.monotonic() + SECONDS
            # On a busy machine, this process might not run for a while.
            while time.monotonic() < end or len(samples) < 1000:
                own_work()
                samples += sampler.drain()
        finally:
            going.set()
            scribbler.join()
        sampler.stop()
        samples += sampler.drain()
        counts, codes = sampler.python.counts(), list(sampler.python_codes)
    results = [
        parse_python_stack(words) for sample in samples if (words := sample.words(PYTHON_SIDE))
    ]
    assert results, counts
    assert codes, counts
    assert len(counts) >= 4, counts
    assert all(len(code.file) <= LONGEST_TEXT >= len(code.function) for code in codes)
    assert all(len(stack.frames) <= 127 for stack in results)
    count = sampler.counts()["on_cpu"]
    assert count.taken == count.received + sum(count.lost.values())
