"""Benchmarks the resolvers: the first lookup in a process, whole stacks, single addresses."""

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.rows import Row
from otel_kprofiler.host import Access, parse_mappings, read_maps
from otel_kprofiler.symbols import ElfResolver, ProcessesResolver

STACK = 30
NEW_STACKS = 200


def least_us(ask: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


def stacks() -> list[list[int]]:
    """Returns deep stacks of random code addresses in this process."""
    rng = random.Random(1)
    code = [
        mapping
        for mapping in parse_mappings(read_maps(Access(), "self"))
        if mapping.is_executable and mapping.path.endswith(("libc.so.6", "python3.11", ".so.1.0"))
    ]
    return [
        [rng.randrange(mapping.start, mapping.end) for mapping in rng.choices(code, k=STACK)]
        for _ in range(NEW_STACKS)
    ]


def rows(quick: bool) -> Iterator[Row]:
    runs = 20 if quick else 200
    pid, asked = os.getpid(), stacks()
    processes = ProcessesResolver()
    began = time.perf_counter()
    processes.resolve(asked[0], pid)
    first_ms = (time.perf_counter() - began) * 1e3
    yield Row("first stack of a process, its files read", f"{first_ms:.1f} ms")
    began = time.perf_counter()
    for stack in asked[1:]:
        processes.resolve(stack, pid)
    new_us = (time.perf_counter() - began) / len(asked[1:]) * 1e6
    known_us = least_us(lambda: processes.resolve(asked[0], pid), runs)
    single_us = least_us(lambda: processes.resolve(asked[0][:1], pid), runs)
    yield Row(f"a stack of {STACK} addresses, all new", f"{new_us:.0f} us")
    yield Row(
        f"a stack of {STACK} addresses, seen before", f"{known_us:.0f} us",
        f"a single address: {single_us:.0f} us", known_us / single_us, "<= 5x",
    )  # fmt: skip
    processes.close()
    file = ElfResolver("/proc/self/exe")
    places = [place.address for place in file.find("main")] * 1000
    if places:
        each_us = least_us(lambda: file.resolve(places), 20) / len(places)
        yield Row("an address of a file, seen before", f"{each_us:.2f} us")
