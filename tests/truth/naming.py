"""Compares frame names with the logs of programs that record which function they are running.

``python -m tests.truth.naming [SECONDS]`` runs workloads longer than the test, and prints a table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import Window
from otel_kprofiler.pipeline import WindowSchedule, open_live, open_resources, open_symbols
from otel_kprofiler.sampling import SamplerConfig
from otel_kprofiler.symbols import UserSymbolSettings, open_user_names

VARIANTS = 12
_PROGRAMS = Path(__file__).with_name("programs")
_SOURCE = _PROGRAMS / "variants.c"
_SHORTEST = "400000"  # about 1 ms
_SHORT = "1000000"
_LONG = "5000000"
_SAYS = re.compile(r"v(\d+)$")
_WORKS = re.compile(r"work_(\d+)$")
_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
_HIGHEST_PID = Path("/proc/sys/kernel/pid_max")
_PER_SECOND = 500
_ENDED = ("short processes", "reused pid")  # processes exit before their frames are named
_LEAST_NAMED = 0.95


class Tally(NamedTuple):
    """Frame and sample counts of a workload.

    Attributes:
        frames: number of user frames in samples from threads that log their functions.
        wrong: the frames named after a function that was not running, as (logged, name).
        samples: the number of samples that have a user frame and are from a logging thread.
        named: the number of counted samples whose leaf frame is named.
        unnamed: the number of counted samples with an unnamed leaf, by reason and module.
    """

    frames: int
    wrong: list[tuple[str, str]]
    samples: int
    named: int
    unnamed: dict[str, int]


def build(directory: Path) -> None:
    common = ("gcc", "-O1", "-fomit-frame-pointer")
    for at in range(VARIANTS):
        what = (f"-DVARIANT={at}", _SOURCE)
        subprocess.run([*common, *what, "-o", directory / f"p{at}"], check=True)
        library = directory / f"lib{at}.so"
        subprocess.run([*common, "-shared", "-fPIC", *what, "-o", library], check=True)
    subprocess.run([*common, _SOURCE, "-o", directory / "host", "-ldl"], check=True)
    subprocess.run([*common, _PROGRAMS / "launcher.c", "-o", directory / "launcher"], check=True)


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[None]:
    with subprocess.Popen(command) as process:
        try:
            yield
            assert process.poll() is None, f"{command} ended with {process.poll()}"
        finally:
            process.kill()


@contextlib.contextmanager
def repeating(step: Callable[[], object]) -> Iterator[None]:
    """Calls a function repeatedly in a thread, at most 500 times a second."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def repeat() -> None:
        try:
            while not stop.is_set():
                began = time.monotonic()
                step()
                stop.wait(max(0.0, began + 1 / _PER_SECOND - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - asserted below
            failures.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


def libraries(how: str) -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Returns a workload: one process that loads and unloads libraries."""
    return lambda directory: running(directory / "host", directory, how, str(VARIANTS), _LONG)


def execs(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Runs one process that executes one program after another."""
    return running(directory / "p0", _SHORT, "1000000", directory, str(VARIANTS))


def short(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Starts 500 short-lived processes per second, if the host is fast enough."""
    return running(directory / "launcher", directory, str(VARIANTS), _SHORTEST, str(_PER_SECOND))


def reused_pid(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Starts short-lived processes of different programs, all with the same pid."""
    programs = itertools.cycle(directory / f"p{at}" for at in range(VARIANTS))
    highest = int(_HIGHEST_PID.read_text())
    pid = (int(_LAST_PID.read_text()) + highest // 2) % (highest - 1000) + 1000

    def step() -> None:
        _LAST_PID.write_text(str(pid - 1))
        subprocess.run([next(programs), _SHORT], check=True)

    return repeating(step)


def namespaces(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Runs different programs at the same path, each in a separate mount namespace."""
    (directory / "program").touch(mode=0o755)
    programs = itertools.cycle(f"p{at}" for at in range(VARIANTS))
    script = f"mount --bind $0 program && exec ./program {_LONG}"

    def step() -> None:
        command = ["unshare", "-m", "sh", "-c", script, next(programs)]
        subprocess.run(command, check=True, cwd=directory)

    return repeating(step)


WORKLOADS: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "libraries": libraries("own"),
    "replaced library": libraries("new"),
    "overwritten library": libraries("same"),
    "deleted library": libraries("gone"),
    "exec": execs,
    "short processes": short,
    "reused pid": reused_pid,
    "mount namespaces": namespaces,
}


def sample_host(seconds: float) -> list[Window]:
    """Samples and symbolizes user stacks, as ``record`` does."""
    access, clock, windows = Access(), Clock(), list[Window]()
    pipeline = open_live(
        SamplerConfig(samples_per_second=1999, stacks="user"),
        WindowSchedule(2**62),
        windows.append,
        access=access,
        clock=clock,
        resources=open_resources(access, clock, {}),
        symbolizer=open_symbols(access),
        user_names=open_user_names(UserSymbolSettings(detail="names", cpu_share=1.0)),
    )
    try:
        pipeline.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pipeline.step()
        pipeline.stop()
    finally:
        pipeline.close()
    return windows


def run(workload: str, directory: Path, seconds: float) -> Tally:
    with WORKLOADS[workload](directory):
        return tally(sample_host(seconds))


def tally(windows: list[Window]) -> Tally:
    """Compares frame names with the names of their threads, and returns the counts."""
    frames = samples = named = 0
    wrong = []
    unnamed: dict[str, int] = {}
    for window in windows:
        for _, sample in window.samples:
            said = _SAYS.match(sample.thread_name)
            if not said or not sample.stack.frames:
                continue
            samples += sample.weight
            frames += sample.weight * len(sample.stack.frames)
            leaf = sample.stack.frames[0]
            if leaf.lines:
                named += sample.weight
            else:
                module = leaf.module.name if leaf.module else ""
                reason = f"{leaf.unresolved and leaf.unresolved.name} {module}"
                unnamed[reason] = unnamed.get(reason, 0) + sample.weight
            for frame in sample.stack.frames:
                ran = _WORKS.match(frame.function)
                if ran and ran[1] != said[1]:
                    wrong += [(sample.thread_name, frame.function)] * sample.weight
    return Tally(frames, wrong, samples, named, unnamed)


def main() -> None:
    """Runs all workloads. Fails if names are wrong, or if many exited processes lack names."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    frames = wrong = per_second = 0
    least = 1.0
    print(f"{'workload':22} {'frames':>8} {'wrong':>6} {'leaf named':>10}  unnamed leaves")
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory))
        for workload in WORKLOADS:
            began = time.monotonic()
            result = run(workload, Path(directory), seconds)
            frames, wrong = frames + result.frames, wrong + len(result.wrong)
            share = result.named / max(1, result.samples)
            print(f"{workload:22} {result.frames:8} {len(result.wrong):6} {share:10.1%}", end="  ")
            print(result.unnamed, flush=True)
            if workload in _ENDED:
                least = min(least, share)
            if workload == "short processes":
                started = int((Path(directory) / "started").read_text())
                per_second = round(started / (time.monotonic() - began))
    print(f"{per_second} short processes per second")
    print(f"{frames:,} frames, {wrong} wrong; of exited processes {least:.1%} of leaves are named")
    sys.exit(bool(wrong) or least < _LEAST_NAMED)


if __name__ == "__main__":
    os.nice(-5)
    main()
