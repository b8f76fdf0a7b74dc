"""Tests unwinding of Python frames on the running kernel."""

import os
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from guest.sampled import drain_until, finish, sampler

from otel_kprofiler.interpreters import open_own
from otel_kprofiler.model import PYTHON_SIDE, parse_python_stack
from tests.interpreters import Python
from tests.truth.python.measure import measure, running

pytestmark = [pytest.mark.kernel, pytest.mark.one_boot]

ENOUGH = 100
TRUTH_SAMPLES = 500


def leaf() -> list[str]:
    return os.listdir("/usr/bin")


def first() -> object:
    return sum(1 for _ in map(second, range(3)))


def second(_: int) -> object:
    return list(generate())


def generate():
    yield leaf()


def serve(going: threading.Event) -> None:
    while not going.is_set():
        first()


CHAIN = (
    ("leaf", False),
    ("generate", True),
    ("second", True),
    ("first.<locals>.<genexpr>", True),
    ("first", False),
    ("serve", True),
)
"""The call chain: each function, and whether C code calls the interpreter for it in Python 3.11."""


def read_stacks(running, samples):
    """Returns the frames in each Python stack, as (code object, whether C code called it)."""
    return [
        [
            (running.python_codes.get(frame.code), frame.is_from_c)
            for frame in parse_python_stack(sample.words(PYTHON_SIDE)).frames
        ]
        for sample in samples
    ]


def own_calls(stack):
    """Returns (function, whether C called it) for the frames in this file."""
    return tuple((code.function, by_c) for code, by_c in stack if code and code.file == __file__)


@pytest.mark.parametrize("stacks", ["kernel", "both"])
def test_python_frames_match_the_running_code(stacks):
    """Python frames of this process match its known call chain exactly."""
    own, stop = open_own(), threading.Event()
    worker = threading.Thread(target=serve, args=(stop,))

    def of_worker(samples):
        return [sample for sample in samples if sample.tid == worker.native_id]

    with sampler(stacks=stacks) as running:
        assert running.python is not None, running.python_problem
        assert running.python.register(os.getpid(), own.interpreter.layout, own.process)
        worker.start()
        try:
            samples = drain_until(running, lambda taken: len(of_worker(taken)) >= ENOUGH)
            samples += finish(running)
        finally:
            stop.set()
            worker.join()
        counts, result = running.python.counts(), read_stacks(running, of_worker(samples))
    calls = [own_calls(stack) for stack in result]
    in_leaf = [stack for stack in calls if stack[:1] == CHAIN[:1]]
    assert len(in_leaf) >= ENOUGH // 2, counts
    assert Counter(in_leaf) == {CHAIN: len(in_leaf)}
    assert {name for stack in calls for name in stack} <= set(CHAIN)
    assert {code.file for stack in result for code, _ in stack if code} <= {
        __file__, threading.__file__,
    }  # fmt: skip
    assert result.count([]) <= 0.02 * len(result) + 3, counts


@pytest.mark.built_programs
def test_python_frames_match_the_calls_in_generated_programs():
    """Python frames in random programs match the code that ran at the instant of the sample."""
    built = Path(os.environ["MATRIX_PROGRAMS"], "marked.bpf.o")
    with running(Python(Path(sys.executable), "")) as target:
        (report,) = measure(built, [target], TRUTH_SAMPLES, timeout_s=600)
    assert not report.wrong, report.examples
    assert report.total >= TRUTH_SAMPLES
    assert report.absent + report.unknown <= 0.05 * report.total, report.describe()
