"""``python -m benchmarks.peer PROGRAM``: compares this agent with opentelemetry-ebpf-profiler.

Both profilers sample the same load at the same time and send to a receiver in this process, so that
other load affects both equally. Build the program in a clone of opentelemetry-ebpf-profiler::

    go build -o ebpf-profiler .

The program needs tracefs (``mount -t tracefs tracefs /sys/kernel/tracing``), and CAP_SYS_RESOURCE
to raise the memlock limit, which kernels from 5.11 on ignore. Without CAP_SYS_RESOURCE, patch
``MaximizeMemlock`` in ``rlimit/rlimit.go`` to return a function that does nothing.
"""

import argparse
import contextlib
import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from random import Random
from typing import NamedTuple

from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from benchmarks.__main__ import print_rows
from benchmarks.bench_agent import AgentRun, mixed_load
from benchmarks.bench_unwinding import program_times
from benchmarks.entry_points import Files
from benchmarks.node_load import node_load
from benchmarks.peer_load import PROGRAMS, user_load
from benchmarks.receiver import Receiver
from benchmarks.rows import Row
from benchmarks.usage import children_cpu_seconds, cpu_seconds
from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.model import USER_SIDE, Frame
from otel_kprofiler.otlp import check_payload, decode_windows
from otel_kprofiler.processes import Grain

RATE = 99
WARM_UP_S = 10.0
_TRIES = 5
LEAST_SAMPLES = 100


class Usage(NamedTuple):
    """CPU seconds of a process, its children and its BPF programs; the process's resident bytes."""

    process_s: float
    children_s: float
    programs_s: float
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        programs = {}
        for path in Path(f"/proc/{pid}/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                values = dict(re.findall(r"^(\w+):\s+(\d+)$", path.read_text(), re.MULTILINE))
                if "run_time_ns" in values:
                    programs[values["prog_id"]] = int(values["run_time_ns"])
        return cls(
            cpu_seconds(pid),
            children_cpu_seconds(pid),
            sum(programs.values()) / 1e9,
            read_resident_bytes(pid),
        )


class Peer:
    """opentelemetry-ebpf-profiler, with the given tracers and otherwise default settings."""

    def __init__(self, program: str, endpoint: str, tracers: str) -> None:
        words = [program, "-collection-agent", endpoint, "-disable-tls",
                 "-samples-per-second", str(RATE), "-tracers", tracers]  # fmt: skip
        for _ in range(_TRIES):  # the peer's analysis of kernel structs fails at random
            self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
                continue
            return
        raise SystemExit(f"{program} does not start: {self.process.stderr.read()}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Stacks:
    """The user stacks that one profiler sent, by program."""

    def __init__(self, requests: Iterable[bytes]) -> None:
        self.requests = list(requests)
        self.samples = self.frames = 0
        self.by_program: defaultdict[str, Counter[tuple[Frame, ...]]] = defaultdict(Counter)
        for window in decode_windows(self.requests):
            for resource, sample in window.samples:
                count = len(sample.timestamps_unix_ns)
                self.samples += count
                self.frames += count * len(sample.stack.frames)
                frames = tuple(
                    frame
                    for side in sample.stack.sides
                    if side.kind is USER_SIDE
                    for frame in side.frames
                )
                program = str(resource.attributes.get("process.executable.name", ""))
                self.by_program[program][frames] += count if frames else 0

    def resource_keys(self) -> set[str]:
        windows = decode_windows(self.requests)
        return {key for window in windows for resource, _ in window.samples
                for key in resource.attributes}  # fmt: skip

    def without(self, keys: AbstractSet[str]) -> list[bytes]:
        """Returns copies of the requests without the resource attributes in ``keys``."""
        results = []
        for request in map(ExportProfilesServiceRequest.FromString, self.requests):
            for group in request.resource_profiles:
                kept = [
                    attribute
                    for attribute in group.resource.attributes
                    if attribute.key not in keys
                ]
                del group.resource.attributes[:]
                group.resource.attributes.extend(kept)
            results.append(request.SerializeToString())
        return results

    def complete(self, program: str, files: Files) -> float:
        """Returns the fraction of user stacks that end in a function without a caller."""
        stacks = self.by_program[program]
        whole = sum(
            count for frames, count in stacks.items() if frames and _ends(frames[-1], files)
        )
        return whole / max(1, stacks.total())

    def leaves(self, program: str, files: Files) -> Counter[tuple[str, int]]:
        """Counts samples per leaf function, identified by file id and start address."""
        result = Counter[tuple[str, int]]()
        for frames, count in self.by_program[program].items():
            if frames and frames[0].module:
                file_id = frames[0].module.file_id
                functions = files.get(file_id)
                address = frames[0].address
                result[file_id, functions.start(address) if functions else address] += count
        return result

    def callers(self, program: str) -> Counter[tuple[str, int]]:
        """Counts the samples that contain each caller, identified by file id and address."""
        result = Counter[tuple[str, int]]()
        for frames, count in self.by_program[program].items():
            for key in {(f.module.file_id, f.address) for f in frames[1:] if f.module}:
                result[key] += count
        return result


def _ends(frame: Frame, files: Files) -> bool:
    functions = files.get(frame.module.file_id) if frame.module else None
    return functions is not None and functions.is_outermost(frame.address)


def overlap(one: Counter, other: Counter) -> float:
    """Returns the overlap of two distributions, from 0 to 1."""
    a, b = max(1, one.total()), max(1, other.total())
    return sum(min(count / a, other[key] / b) for key, count in one.items())


def expected_overlap(one: Counter, other: Counter) -> float:
    """Returns the expected overlap of two counters drawn from the same distribution."""
    pool = [*one.elements(), *other.elements()]
    Random(1).shuffle(pool)
    return overlap(Counter(pool[: one.total()]), Counter(pool[one.total() :]))


def known(callers: Counter, others: Counter) -> float:
    """Returns the sample-weighted fraction of frequent ``callers`` that are also in ``others``."""
    frequent = Counter({key: count for key, count in callers.items() if count >= 5})
    return sum(c for key, c in frequent.items() if key in others) / max(1, frequent.total())


def compare(ours: Stacks, theirs: Stacks, files: Files) -> Iterator[Row]:
    """Yields rows that compare complete stacks, leaves and caller addresses for each program."""
    for program in sorted(PROGRAMS & ours.by_program.keys() & theirs.by_program.keys()):
        counts = [side.by_program[program].total() for side in (ours, theirs)]
        if min(counts) < LEAST_SAMPLES:
            continue
        shares = [side.complete(program, files) for side in (ours, theirs)]
        yield Row(
            f"complete user stacks, {program}",
            f"{shares[0]:.2%} of {counts[0]}",
            f"{shares[1]:.2%} of {counts[1]}",
            shares[0] / shares[1] if shares[1] else None,
            ">= 1x",
        )
        leaves = [side.leaves(program, files) for side in (ours, theirs)]
        yield Row(
            f"overlap of leaf functions, {program}",
            f"{overlap(*leaves):.1%}",
            f"{expected_overlap(*leaves):.1%} if equal",
            overlap(*leaves) / expected_overlap(*leaves),
        )
        callers = [side.callers(program) for side in (ours, theirs)]
        yield Row(
            f"callers at the same file and address, {program}",
            f"{known(callers[0], callers[1]):.1%} of ours",
            f"{known(callers[1], callers[0]):.1%} of theirs",
        )


def cost(name: str, usages: list[tuple[Usage, Usage]], seconds: float) -> Iterator[Row]:
    used = [
        [(end - start) / seconds for end, start in zip(later[:3], earlier[:3], strict=True)]
        for earlier, later in usages
    ]
    process, children, programs = zip(*used, strict=True)
    parts = {
        "CPU of the process": process,
        "CPU of its children": children,
        "CPU in BPF programs": programs,
        "CPU of all": tuple(map(sum, used)),
    }
    for what, values in parts.items():
        yield Row(f"{what}, {name}", f"{values[0]:.2%} of a core", f"{values[1]:.2%}",
                  values[0] / values[1] if values[1] else None)  # fmt: skip
    sizes = [after.resident_bytes / 2**20 for _, after in usages]
    yield Row(f"RSS, {name}", f"{sizes[0]:.1f} MiB", f"{sizes[1]:.1f} MiB",
              sizes[0] / sizes[1], "<= 60 MB")  # fmt: skip


def _raw_bytes(requests: list[bytes]) -> int:
    return sum(map(len, requests))


def _gzip_bytes(requests: list[bytes]) -> int:
    return sum(len(gzip.compress(request, 6)) for request in requests)


def sizes(ours: Stacks, theirs: Stacks) -> Iterator[Row]:
    """Yields wire bytes per sample and per frame; deeper stacks need more bytes per sample."""
    keys = ours.resource_keys(), theirs.resource_keys()
    only = keys[0] - keys[1], keys[1] - keys[0]
    yield Row("attributes of resources", *(f"also {', '.join(sorted(some))}" for some in only))
    common = ours.without(only[0]), theirs.without(only[1])
    for content, requests in (("", (ours.requests, theirs.requests)),
                              (", common attributes", common)):  # fmt: skip
        for what, size in (("raw", _raw_bytes), ("gzip", _gzip_bytes)):
            sent = [size(some) for some in requests]
            for unit, counts in (("sample", (ours.samples, theirs.samples)),
                                 ("frame", (ours.frames, theirs.frames))):  # fmt: skip
                one, other = (n / max(1, count) for n, count in zip(sent, counts, strict=True))
                yield Row(f"wire bytes per {unit}, {what}{content}", f"{one:.2f} of {counts[0]:,}",
                          f"{other:.2f} of {counts[1]:,}", one / other, "<= 0.9x")  # fmt: skip


def run(
    program: str,
    seconds: float,
    *,
    python: str,
    tracers: str,
    without: Collection[str],
    keep: str,
    grain: str,
    load: str,
    from_start: bool,
) -> Iterator[Row]:
    """Runs both profilers side by side under a load, then compares their requests."""
    receivers = Receiver(), Receiver()
    files = Files()
    whole = WARM_UP_S + seconds + 150
    with tempfile.TemporaryDirectory() as folder, _run_load(load, whole, without), program_times():
        python_frames = 64 if "python" in tracers else 0
        agent = AgentRun(
            folder,
            receivers[0].endpoint,
            python=python,
            samples_per_second=RATE,
            stacks="both",
            user_symbols="off",  # the other profiler does not symbolize native code either
            python_frames=python_frames,
            resources=grain,
        )
        peer = Peer(program, receivers[1].endpoint, tracers)
        pids = (agent.process.pid, peer.process.pid)
        earlier, began = [Usage(0.0, 0.0, 0.0, 0)] * 2, time.monotonic()
        sent = [0, 0]
        if not from_start:
            for receiver in receivers:
                receiver.wait_first(60)
            time.sleep(WARM_UP_S)
            sent = [len(receiver.requests) for receiver in receivers]
            earlier, began = [Usage.of(pid) for pid in pids], time.monotonic()
        while time.monotonic() < began + seconds:
            files.look()
            time.sleep(2)
        took = time.monotonic() - began
        usages = list(zip(earlier, [Usage.of(pid) for pid in pids], strict=True))
        peer.stop()
        agent.stop()
    for receiver in receivers:
        receiver.close()
    ours, theirs = (
        Stacks(request for _, request in receiver.requests[first:])
        for receiver, first in zip(receivers, sent, strict=True)
    )
    yield from cost(f"{RATE} Hz", usages, took)
    most = took * RATE * (os.cpu_count() or 1)
    yield Row("samples of all ticks", f"{ours.samples / most:.1%}", f"{theirs.samples / most:.1%}",
              ours.samples / max(1, theirs.samples))  # fmt: skip
    yield from sizes(ours, theirs)
    yield from compare(ours, theirs, files)
    for name, stacks in (("ours", ours), ("theirs", theirs)):
        rules = Counter(v.rule for request in stacks.requests for v in check_payload(request))
        yield Row(f"check, {name}", str(dict(rules) or "no violation"), goal="no violation")
        for number, request in enumerate(stacks.requests if keep else ()):
            Path(keep, f"{name}-{number:03}.otlp").write_bytes(request)


def _run_load(
    load: str, seconds: float, without: Collection[str]
) -> contextlib.AbstractContextManager[object]:
    if load == "idle":
        return contextlib.nullcontext()
    if load == "node":
        return node_load()
    return mixed_load(seconds) if load == "churn" else user_load(seconds, without)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__)
    parser.add_argument("program", help="opentelemetry-ebpf-profiler's binary")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--python",
        default="",
        metavar="PYTHON",
        help="interpreter with an installed package to measure, such as a compiled wheel, "
        "instead of this clone",
    )
    parser.add_argument(
        "--tracers", default="native", help="interpreters whose frames both profilers report"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        metavar="PROGRAM",
        help="programs to leave out of the load",
    )
    parser.add_argument("--keep", default="", metavar="DIR", help="directory to keep requests in")
    parser.add_argument(
        "--resources",
        default=Grain.PROCESS.value,
        choices=[grain.value for grain in Grain],
        help="grain of the Resources in our requests",
    )
    parser.add_argument(
        "--load",
        default="steady",
        choices=["steady", "churn", "node", "idle"],
        help="steady: busy programs; churn: short-lived ones too; node: many services, "
        "mostly idle; idle: none",
    )
    parser.add_argument(
        "--from-start",
        action="store_true",
        help="measure from start-up, when both read the programs that are already running",
    )
    given = parser.parse_args()
    print("measuring …", file=sys.stderr, flush=True)
    result = run(
        given.program,
        given.seconds,
        python=given.python,
        tracers=given.tracers,
        without=given.without,
        keep=given.keep,
        grain=given.resources,
        load=given.load,
        from_start=given.from_start,
    )
    print_rows(list(result))


if __name__ == "__main__":
    main()
