"""Samples programs with the package's sampler, and compares the stacks with the expected stacks."""

from __future__ import annotations

import bisect
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from otel_kprofiler.bpf import PROGRAMS, LibbpfLoader, LoadedObject, ObjectSpec, update_map
from otel_kprofiler.host import Access
from otel_kprofiler.interpreters import PythonTracking
from otel_kprofiler.model import KERNEL_SIDE, PYTHON_SIDE, RawSample, RawSide
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.symbols import PythonResolver
from tests.interpreters import Python, environment
from tests.truth.python.chains import STYLES, Chains
from tests.truth.python.judge import ChurnJudge, Judge, Report, Seen
from tests.truth.sources import compile_program

HZ = 4999
SOURCE = Path(__file__).with_name("marked.bpf.c")
PROGRAM, CHURN = (Path(__file__).with_name(name) for name in ("program.py", "churn.py"))
AnyJudge = Judge | ChurnJudge
_MARK = (1 << 63) - 1
_WAIT_S = 0.05
SEED = 7


def build(folder: Path, sources: Path = PROGRAMS) -> Path:
    """Compiles a sampler that also reads the threads' marks."""
    return compile_program(SOURCE, sources, folder / "marked.bpf.o")


class MarkingLoader(LibbpfLoader):
    """Loads a build of the sampler that also reads the threads' marks."""

    def __init__(self, built: Path) -> None:
        super().__init__()
        self._built = built

    def load(self, spec: ObjectSpec) -> LoadedObject:
        self.loaded = super().load(spec._replace(object=self._built))
        return self.loaded


class Target(NamedTuple):
    """A running program: its process, its thread ids in samples, and the judge of its stacks."""

    process: subprocess.Popen[str]
    threads: dict[int, int]
    judge: AnyJudge
    pid: int


@contextlib.contextmanager
def running(
    python: Python,
    *wrapper: str,
    program: Path = PROGRAM,
    styles: tuple[str, ...] = STYLES,
    **options: Any,
) -> Iterator[Target]:
    """Runs ``program`` with an interpreter. ``wrapper`` precedes the command."""
    command = [*wrapper, str(python.command), str(program)]
    with running_command(command, styles=styles, **options) as target:
        yield target


@contextlib.contextmanager
def running_command(
    command: list[str], *, styles: tuple[str, ...] = STYLES, **options: Any
) -> Iterator[Target]:
    """Runs a command that runs the program, such as an application that embeds the program."""
    with _started([*command, str(SEED), ",".join(styles)], options) as (process, started):
        judge = Judge(Chains(SEED, styles), started["threads"][0][2])
        yield _make_target(process, started, judge)


@contextlib.contextmanager
def churning(python: Python) -> Iterator[Target]:
    with _started([str(python.command), str(CHURN)], {}) as (process, started):
        yield _make_target(process, started, ChurnJudge())


def _make_target(process: subprocess.Popen[str], started: Any, judge: AnyJudge) -> Target:
    pid, tids = find_outer_ids(process.pid, started["pid"])
    return Target(process, {tids[inner]: at for inner, at, _ in started["threads"]}, judge, pid)


@contextlib.contextmanager
def _started(command: list[str], options: Any) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Runs a program during the block, and yields the process and the description it prints."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        **options,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def find_outer_ids(pid: int, inner: int) -> tuple[int, dict[int, int]]:
    """Returns the host pid and tids of ``pid``'s descendant with namespace pid ``inner``."""
    for one in (pid, *_descendants(pid)):
        if _read_ids(one, one) == inner:
            tasks = [int(name) for name in Access().list_dir(f"/proc/{one}/task")]
            return one, {_read_ids(one, task): task for task in tasks}
    raise AssertionError(f"{pid} has no descendant {inner}")


def _descendants(pid: int) -> Iterator[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _read_ids(pid: int, task: int) -> int:
    status = Path(f"/proc/{pid}/task/{task}/status").read_text()
    return int(status.partition("NSpid:")[2].partition("\n")[0].split()[-1])


class KernelNames:
    """The names of kernel functions by address, read from kallsyms."""

    def __init__(self) -> None:
        rows = (line.split() for line in Path("/proc/kallsyms").read_text().splitlines())
        symbols = sorted((int(address, 16), name) for address, _, name, *_ in rows)
        self._addresses = [address for address, _ in symbols]
        self._names = [name for _, name in symbols]

    def find(self, address: int) -> str:
        at = bisect.bisect_right(self._addresses, address) - 1
        return self._names[at] if self._addresses[at] else ""  # addresses are 0 without CAP_SYSLOG


def measure(
    built: Path, targets: list[Target], samples: int, *, timeout_s: float = 60
) -> list[Report]:
    """Samples programs until each has ``samples`` samples or the timeout expires."""
    loader, names = MarkingLoader(built), KernelNames()
    config = SamplerConfig(
        samples_per_second=HZ,
        target_pids=tuple(target.pid for target in targets),
        python_frames=127,
        stacks="both",  # also sample in user mode, where Python creates frames
        user_unwinding="frame_pointers",
    )
    sampler = EbpfSampler(config, loader=loader)
    resolver = PythonResolver(sampler.python_codes)
    judges = {tid: target.judge for target in targets for tid in target.threads}
    with contextlib.closing(sampler), contextlib.ExitStack() as undo:
        sampler.start()
        assert sampler.python is not None, sampler.python_problem
        tracking = PythonTracking(sampler.python, [target.pid for target in targets])
        tracking.start()
        undo.callback(tracking.close)
        end = time.monotonic() + timeout_s
        while tracking.counts().processes < len(targets):
            assert time.monotonic() < end, tracking.counts()
            time.sleep(_WAIT_S)
        marks = loader.loaded.map_fd("marks")
        sampler.drain()  # drops samples without frames
        for target in targets:
            for tid, at in target.threads.items():
                update_map(marks, tid.to_bytes(4, "little"), at.to_bytes(8, "little"))
        while any(target.judge.report.total < samples for target in targets):
            if time.monotonic() > end:
                break
            time.sleep(_WAIT_S)
            for sample in sampler.drain():
                judge = judges.get(sample.tid)
                if judge is not None and sample.link is not None:
                    judge.take(_see(sample, resolver, names))
        sampler.stop()
        counts = sampler.python.counts()
    for target in targets:
        target.judge.report.outcomes = counts
    return [target.judge.report for target in targets]


def _see(sample: RawSample, resolver: PythonResolver, names: KernelNames) -> Seen:
    assert sample.link is not None
    mark = int.from_bytes(sample.link.trace_id[:8], "big") & _MARK
    kernel = tuple(
        names.find(address)
        for address in RawSide(KERNEL_SIDE, sample.words(KERNEL_SIDE)).addresses()
    )
    words = sample.words(PYTHON_SIDE)
    frames = resolver.make_side(RawSide(PYTHON_SIDE, words)).frames if words else ()
    return Seen(mark, frames, kernel)


@contextlib.contextmanager
def building() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield build(Path(folder))
