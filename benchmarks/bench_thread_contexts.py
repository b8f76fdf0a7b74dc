"""Measures the cost of reading thread contexts, and of publishing them at span changes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.bench_unwinding import program_times, program_usage
from benchmarks.rows import Row
from otel_kprofiler.bpf import ContextPlace
from otel_kprofiler.host import Access
from otel_kprofiler.processes import ProcessContexts
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from tests.thread_contexts import NODEJS_SCHEMA, SOURCES, build, compile_with, write_payload

NODEJS: Final = "nodejs"
"""A C program that imitates V8's heap, with two entries in the searched hash bucket."""
GO: Final = "Go"
"""A Go program whose goroutine has three labels."""
MODELS: Final = ("local_exec", "descriptor", "opened_descriptor", NODEJS, GO)
STATES: Final = ("nobody publishes", "another process publishes", "it publishes")
LATEST_S: Final = 30.0
GOAL_NS: Final = 300
GOAL_OF_CHANGES_NS: Final = 200
GOAL_OF_SWITCHES_NS: Final = 400
"""The target cost of a switch between contexts (``Context.run``, greenlets), in nanoseconds."""


class _Place:
    """A reader that only records the arguments of ``register``."""

    words: tuple[int, int, int, ContextPlace] | None = None

    def register(self, tgid: int, start: int, stack_start: int, place: ContextPlace) -> None:
        self.words = (tgid, start, stack_start, place)

    def release(self, tgid: int) -> bool:
        return False


def _find_place(sampler: EbpfSampler) -> tuple[int, int, int, ContextPlace]:
    kept, until = _Place(), time.monotonic() + LATEST_S
    contexts = ProcessContexts(Access(), first_look_s=0)
    contexts.follow_threads(kept)
    try:
        while kept.words is None:
            if time.monotonic() > until:
                raise TimeoutError("the process publishes no thread contexts")
            time.sleep(0.1)
            processes = {sample.process for sample in sampler.drain()}
            for process in processes:
                contexts.expect(process)
            contexts.look(processes)
    finally:
        contexts.close()
    return kept.words


def _start(model: str, directory: Path) -> subprocess.Popen[bytes]:
    words: list[Path | str]
    if model == NODEJS:
        program = directory / "program"
        words = ["gcc", "-O2", "-rdynamic", "-pthread", "-o", program, SOURCES / "heap.c"]
        compile_with(words)
        words = [program, write_payload(directory, NODEJS_SCHEMA), "whole"]
    elif model == GO:
        program = directory / "program"
        words = ["go", "build", "-C", SOURCES / "go", "-o", program, "./steady"]
        compile_with(words)
        words = [program]
    else:
        program, libraries = build(directory, model, source="steady.c")
        words = [program, write_payload(directory), *libraries]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def _measure(model: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Measures the BPF program's run time, in nanoseconds, in each state of :data:`STATES`."""
    with tempfile.TemporaryDirectory() as directory, program_times():
        process = _start(model, Path(directory))
        config = SamplerConfig(
            samples_per_second=999, stacks="user", user_unwinding="frame_pointers",
            target_pids=(process.pid,),
        )  # fmt: skip
        sampler = EbpfSampler(config)
        sampler.start()
        try:
            mine = _find_place(sampler)
            costs: dict[str, list[float]] = {state: [] for state in STATES}
            for _ in range(rounds):
                for state, values in costs.items():
                    if state == STATES[1]:
                        sampler.contexts.register(mine[0] ^ 64, *mine[1:])
                    elif state == STATES[2]:
                        sampler.contexts.register(*mine)
                    start = program_usage()
                    time.sleep(seconds)
                    end = program_usage()
                    values.append((end[0] - start[0]) / max(1, end[1] - start[1]))
                    sampler.drain()
                    for tgid in (mine[0], mine[0] ^ 64):
                        sampler.contexts.release(tgid)
        finally:
            sampler.close()
            process.kill()
            process.wait()
    return costs


def _measure_changes(rounds: int) -> Iterator[Row]:
    """Measures the cost of context changes in Python processes that publish their spans."""
    command = [sys.executable, "-m", "benchmarks.span_changes"]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(rounds)]
    for kind in runs[0]:
        added = statistics.median(run[kind][1] - run[kind][0] for run in runs)
        plain = statistics.median(run[kind][0] for run in runs)
        goal_ns = GOAL_OF_CHANGES_NS if kind.startswith("attach") else GOAL_OF_SWITCHES_NS
        yield Row(
            f"thread contexts, Python: {kind}",
            f"{added:+.0f} ns a change",
            f"without {plain:.0f} ns",
            goal=f"≤ {goal_ns} ns",
        )


def rows(quick: bool) -> Iterator[Row]:
    yield from _measure_changes(3 if quick else 9)
    for model in MODELS:
        costs = _measure(model, 9 if quick else 25, 0.6)
        plain = costs[STATES[0]]
        for state, goal in ((STATES[1], "≤ 20 ns"), (STATES[2], f"≤ {GOAL_NS} ns")):
            pairs = zip(costs[state], plain, strict=True)
            added = statistics.median(with_it - without for with_it, without in pairs)
            yield Row(
                f"thread contexts, {model}: {state}",
                f"{added:+.0f} ns a sample",
                f"without {statistics.median(plain):.0f} ns",
                goal=goal,
            )
