"""The BPF program reads this process's CPython frames, which match the running functions."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from python_frames import LAYOUT, PROCESS, frames, functions, sampling, stacks, take
from samplers import spawned

from otel_kprofiler.bpf import PythonProcess
from otel_kprofiler.bpf.python_maps import PYTHON_OUTCOMES
from otel_kprofiler.errors import SamplerError
from otel_kprofiler.model import (
    PYTHON_SIDE,
    STACK_OK,
    STACK_TRUNCATED,
    USER_SIDE,
    KnownCodes,
    PythonEnd,
    parse_python_stack,
)
from otel_kprofiler.sampling import attachment
from tests.needs import LIBBPF

pytestmark = [pytest.mark.live, LIBBPF]


def leaf():
    return os.listdir("/usr/bin")


def generate():
    yield leaf()


def middle(_):
    return list(generate())


def outer():
    return list(map(middle, range(2)))


def recurse(depth):
    return recurse(depth - 1) if depth else os.listdir("/usr/bin")


CHAIN = [("leaf", False), ("generate", True), ("middle", True), ("outer", True)]
"""The functions of the call chain, each with a flag that is set if C calls the function."""


def own_part(found):
    return [(name, is_from_c) for name, _, is_from_c in found][: len(CHAIN)]


def in_leaf(sampler, samples):
    """Returns the stacks with :func:`leaf` on top, which excludes stacks of the test itself."""
    return [stack for stack in stacks(sampler, samples) if stack[0][0] == "leaf"]


@pytest.mark.parametrize("sides", ["kernel", "user", "both"])
def test_python_frames_match_the_running_functions(sides):
    with sampling(stacks=sides) as sampler:
        samples = take(sampler, outer)
        result = in_leaf(sampler, samples)
        codes = {code.function: code for code in sampler.python_codes}
    assert len(result) >= 20
    assert Counter(map(str, map(own_part, result))) == {str(CHAIN): len(result)}
    assert {functions(one[len(CHAIN) :])[:2] for one in result} == {
        ("take", "test_python_frames_match_the_running_functions")
    }
    for function in (leaf, generate, middle, outer):
        code, known = function.__code__, codes[function.__qualname__]
        assert known.line_table == code.co_linetable
        assert (known.file, known.first_line) == (code.co_filename, code.co_firstlineno)
        assert (known.process, known.address) == (os.getpid(), id(code))
    positions = list(leaf.__code__.co_positions())
    assert {positions[one[0][1]][0] for one in result} == {leaf.__code__.co_firstlineno + 1}
    assert {dict(sample.collected).get(PYTHON_SIDE, STACK_OK) for sample in samples} == {STACK_OK}
    assert any(sample.words(USER_SIDE) for sample in samples) == (sides != "kernel")


def test_each_thread_has_its_own_frames():
    going = True

    def work(function):
        while going:
            function()

    def first():
        leaf()

    def second():
        leaf()

    threads = {
        name: threading.Thread(target=work, args=(function,))
        for name, function in (("first", first), ("second", second))
    }
    with sampling() as sampler:
        for thread in threads.values():
            thread.start()
        try:
            samples = take(sampler, threading.Event().wait, 0.05, least=100)
        finally:
            going = False
            for thread in threads.values():
                thread.join()
        callers = {
            name: Counter(
                functions(one)[1].rpartition(".")[2]
                for one in in_leaf(
                    sampler, [sample for sample in samples if sample.tid == thread.native_id]
                )
            )
            for name, thread in threads.items()
        }
    assert {name: set(result) for name, result in callers.items()} == {
        "first": {"first"}, "second": {"second"},
    }  # fmt: skip


def test_only_samples_from_registered_processes_have_python_frames():
    with sampling(register=False) as sampler:
        samples = take(sampler, outer)
        assert not any(sample.words(PYTHON_SIDE) for sample in samples)
        assert not sampler.python.counts()
        assert not sampler.python.release(os.getpid())
        assert sampler.python.register(os.getpid(), LAYOUT, PROCESS)
        assert in_leaf(sampler, take(sampler, outer))
        assert sampler.python.release(os.getpid())
        samples = take(sampler, outer)
        sampler.drain()
        assert not any(sample.words(PYTHON_SIDE) for sample in take(sampler, outer))


def test_every_python_stack_is_counted_exactly_once():
    with sampling() as sampler:
        samples = take(sampler, outer)
        sampler.stop()
        samples += sampler.drain()
        counts = sampler.python.counts()
    assert sum(bool(sample.words(PYTHON_SIDE)) for sample in samples) == counts["complete"]
    of_stacks = PYTHON_OUTCOMES[: PYTHON_OUTCOMES.index("described")]
    assert sum(counts.get(name, 0) for name in of_stacks) == len(samples)
    assert counts["described"] == len(sampler.python_codes)


def test_deep_stacks_are_truncated_at_the_limit():
    with sampling(python_frames=30) as sampler:
        deep = [
            (
                parse_python_stack(sample.words(PYTHON_SIDE)),
                dict(sample.collected)[PYTHON_SIDE],
                one,
            )
            for sample in take(sampler, recurse, 50)
            if sample.words(PYTHON_SIDE)
            and (one := functions(frames(sampler, sample)))[0] == "recurse"
        ]
    assert ("recurse",) * 30 in {one for _, _, one in deep}
    for stack, status, one in deep:
        assert (stack.end, len(stack.frames), stack.tag) == (PythonEnd.FRAME_LIMIT, 30, 7)
        assert status == STACK_TRUNCATED
        assert "recurse" not in one[one.count("recurse") :]


def test_the_frame_limit_can_change_while_the_sampler_runs():
    with sampling(python_frames=5) as sampler:
        assert max(map(len, stacks(sampler, take(sampler, outer)))) == 5
        sampler.reconfigure(replace(sampler.config, python_frames=0))
        sampler.drain()
        assert not any(sample.words(PYTHON_SIDE) for sample in take(sampler, outer))


def test_code_objects_evicted_from_the_cache_are_described_again():
    """The cache holds only one description, so two descriptions evict each other on each sample."""
    with sampling(codes=KnownCodes(max_bytes=2500)) as sampler:
        take(sampler, outer, seconds=1)
        sampler.stop()
        sampler.drain()
        described = sampler.python.counts()["described"]
        known = list(sampler.python_codes)
        dropped = sampler.python_codes.dropped
    assert dropped > 20
    assert described == dropped + len(known)


def test_different_code_at_the_same_address_is_a_different_function():
    """Code objects are created and freed, and usually reuse the previous object's memory."""
    source = "import os\ndef f{0}():\n{1} return os.listdir('/usr/bin')\n"
    addresses = Counter()

    numbers = count()

    def churn():
        number, space = next(numbers), {}
        exec(source.format(number, "\n" * (number % 7)), space)
        function = space[f"f{number}"]
        addresses[id(function.__code__)] += 1
        function()
        space.clear()  # frees the code immediately, not in a later garbage collection

    with sampling() as sampler:
        tops = {
            sampler.python_codes.get(parse_python_stack(words).frames[0].code)
            for words in (sample.words(PYTHON_SIDE) for sample in take(sampler, churn, seconds=2))
            if words
        }
    results = [code for code in tops if code.file == "<string>" and code.function[1:].isdecimal()]
    assert len(results) >= 20
    assert max(addresses.values()) > 1
    for code in results:
        number = int(code.function[1:])
        whole = compile(source.format(number, "\n" * (number % 7)), "<string>", "exec")
        (inner,) = [const for const in whole.co_consts if hasattr(const, "co_linetable")]
        assert (code.first_line, code.line_table) == (2, inner.co_linetable)


SERVICE = """
import os, sys
sys.path[:0] = [sys.argv[1]]
from python_frames import PROCESS

def serve():
    while not os.path.exists(sys.argv[2]):
        os.listdir("/usr/bin")

print(*PROCESS, flush=True)
serve()
os.execv(sys.executable, [sys.executable, "-c", sys.argv[3], sys.argv[1], sys.argv[2] + "2", ""])
"""


def test_a_process_must_be_registered_again_after_an_exec(tmp_path):
    """The new program's frames are not read until its ``_PyRuntime`` address is registered."""
    switch = tmp_path / "switch"
    command = [sys.executable, "-c", SERVICE, os.path.dirname(__file__), str(switch), SERVICE]
    with (
        spawned(*command, stdout=subprocess.PIPE, text=True) as service,
        sampling(pid=service.pid) as sampler,
    ):
        process = PythonProcess(*map(int, service.stdout.readline().split()))
        assert sampler.python.register(service.pid, LAYOUT, process)
        before = stacks(sampler, take(sampler, time.sleep, 0.05))
        assert {functions(one)[-2:] for one in before} == {("serve", "<module>")}
        switch.touch()
        process = PythonProcess(*map(int, service.stdout.readline().split()))
        sampler.drain()
        after = take(sampler, time.sleep, 0.05)
        assert not stacks(sampler, after)
        assert sampler.python.counts()["other_image"] >= len(after)
        assert sampler.python.register(service.pid, LAYOUT, process)
        again = stacks(sampler, take(sampler, time.sleep, 0.05))
        assert functions(again[-1])[-2:] == ("serve", "<module>")
        assert len({code.image for code in sampler.python_codes}) == 2


def test_a_forked_child_does_not_touch_its_parents_sampler():
    with sampling() as sampler:
        take(sampler, outer)
        pid = os.fork()
        if not pid:
            os._exit(sampler.python is not None if sampler._attached else 0)
        assert os.waitpid(pid, 0)[1] == 0
        assert in_leaf(sampler, take(sampler, outer))
        assert {code.process for code in sampler.python_codes} == {os.getpid()}


def test_closing_the_sampler_leaves_no_descriptor_or_mapping_open():
    def is_open():
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        maps = Path("/proc/self/maps").read_text()
        return Counter(os.readlink(link) for link in links if os.path.lexists(link)), maps.count(
            "bpf-map"
        )

    with sampling() as sampler:
        take(sampler, outer)
    before = is_open()
    with sampling() as sampler:
        take(sampler, outer)
    counts = sampler.python_codes
    assert is_open() == before
    assert counts.on_dropped is None


def test_sampling_continues_without_python_frames_if_the_program_is_rejected(monkeypatch, caplog):
    load = attachment.load_spec

    def refuse(spec, *settings):
        if any(name.endswith(attachment.PYTHON_SUFFIX) for name in spec.programs):
            raise SamplerError("refused", log="", hint="")
        return load(spec, *settings)

    monkeypatch.setattr(attachment, "load_spec", refuse)
    with sampling(register=False) as sampler:
        assert sampler.python is None
        assert sampler.python_problem == "this kernel does not accept the program"
        assert take(sampler, outer)
    messages = [record.message for record in caplog.records if "Python frames" in record.message]
    assert messages == [
        "stacks will have no Python frames: this kernel does not accept the program"
    ]
