"""Runs the tests marked ``kernel`` on every kernel in the matrix.

    python tests/kernels/run.py                        # all; writes docs/kernels.md if it passes
    python tests/kernels/run.py --kernel 6.12 -k spin  # one kernel, some tests
    python tests/kernels/run.py --arm64                # kernels for arm64

Exit status: 0 if all tests passed, 1 if a test failed or a guest died, 2 if the matrix cannot run.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from harness import programs, spin_module
from harness.errors import MatrixError
from harness.kernels import KERNELS, DebianKernel, Kernel, KernelFiles, get_kernel, install_tools
from harness.machines import AARCH64, X86_64, Machine
from harness.places import CHECKOUT, cache_dir
from harness.qemu import BOOTS, Boot, Outcome, run_guest
from harness.results import FAILED, PASSED, Column, Result, read_junit, render_table

sys.path.append(str(CHECKOUT))
from tests.platforms.report import save_guest

TABLE = CHECKOUT / "docs/kernels.md"
PARTS = {
    "test_boot": "system boot",
    "test_sampler": "samples on all CPUs",
    "test_symbols": "kernel names",
    "test_spin": "module names",
    "test_unwinding": "user stacks",
    "test_python_frames": "Python frames",
    "test_waits": "waits",
    "test_thread_contexts": "spans",
    "test_dump": "thread dumps",
    "test_locks": "kernel locks",
    "test_events": "perf events",
    "test_agent": "delivery from agent to receiver",
    "test_record": "callers in recordings",
}
"""The parts of the profiler that each test file covers, as named on the platforms page."""
ENDED = (0, 1)
"""Pytest exit statuses which mean that all tests were run."""
TRIES = 2
"""The maximum number of boot attempts for a guest that crashes due to an emulator bug."""
BOOT_TIMEOUT_S = 3600
"""The time limit for a boot; on a busy machine, emulated CPUs take more than half an hour."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", action="append", help=f"{', '.join(KERNELS)} or a directory")
    parser.add_argument("--arm64", action="store_true", help="kernels for arm64 instead of x86-64")
    parser.add_argument("--boot", action="append", choices=BOOTS, help="default: all")
    parser.add_argument("-k", default="", help="pytest's expression")
    parser.add_argument("--cycles", type=int, help="number of module loads in the leak test")
    parser.add_argument("--timeout", type=float, default=BOOT_TIMEOUT_S, help="seconds per boot")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="concurrent guests")
    parser.add_argument("--overlay", type=Path, help="package to test in place of the checkout's")
    parser.add_argument("--prepare", action="store_true", help="only download and build")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the console")
    return parser.parse_args(arguments)


def open_lock() -> BinaryIO:
    """Waits for other runs, because their guests would use the same directories and CPUs."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    lock = (cache_dir() / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another run of the matrix", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def check_collection() -> None:
    """Imports the tests on the host, to compile them for the guest and detect errors early."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "kernel"]
    done = subprocess.run(
        [*command, "tests/kernels"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 5):  # 5: all tests deselected, as expected on the host
        raise MatrixError(f"the tests cannot be collected:\n{done.stdout}{done.stderr}")


@dataclass
class Session:
    """Prepares each kernel once, and boots it any number of times. Only one session can exist."""

    timeout_s: float
    verbose: bool = False
    cycles: int | None = None
    _ready: dict[str, KernelFiles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = open_lock()
        check_collection()

    def get_files(self, name: str) -> KernelFiles:
        """Returns a kernel's files, with built modules and programs, or raises MatrixError."""
        if name not in self._ready:
            kernel = get_kernel(name)
            install_tools([kernel.machine])
            self._ready[name] = kernel.get()
            spin_module.build(self._ready[name])
            if kernel.machine is not X86_64:
                programs.build(self._ready[name])
        return self._ready[name]

    def boot(
        self,
        kernel: KernelFiles,
        boot: Boot,
        *,
        tests: Sequence[str] = (),
        expression: str = "",
        overlay: Path | None = None,
    ) -> Outcome:
        """Boots a kernel, and runs the tests in ``tests`` (or all) that match ``expression``."""
        plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
        plugins.append(f"--timeout={self.timeout_s / 3:.0f}")  # emulated CPUs are slow
        places = [f"tests/kernels/test_{name}.py" for name in tests] or ["tests/kernels"]
        arguments = ["-m", "kernel", "-k", expression, "-v", *plugins, *places]
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        if self.cycles:
            environment["MATRIX_CYCLES"] = str(self.cycles)
        if overlay:
            environment["MATRIX_OVERLAY"] = str(overlay.absolute())
        for _ in range(TRIES):
            outcome = run_guest(
                kernel, boot, arguments, environment, timeout_s=self.timeout_s, verbose=self.verbose
            )
            if not outcome.emulator_failed:
                break
            print(f"Linux {kernel.name}, {boot.title}: the emulator failed", flush=True)
        return outcome


def find_promises(results: Sequence[Result]) -> list[str]:
    """Returns the profiler components for which at least one test passed and none failed."""
    outcomes: dict[str, set[str]] = {}
    for result in results:
        module = result.test.partition("::")[0]
        if module in PARTS:
            outcomes.setdefault(PARTS[module], set()).add(result.outcome)
    return [part for part, seen in outcomes.items() if PASSED in seen and FAILED not in seen]


def report(title: str, outcome: Outcome) -> bool:
    """Prints the outcome of a boot, and returns whether all its tests passed."""
    results = read_junit(outcome.junit)
    failed = [result for result in results if result.outcome == FAILED]
    good = outcome.status == 0 and bool(results) and not failed
    print(f"{title}: {'ok' if good else 'FAILED'}, {len(results)} tests, {outcome.seconds:.0f} s")
    for result in failed:
        print(f"  {result.test}: {result.message}")
    if not good:
        print(f"  {outcome.reason or f'pytest exit {outcome.status}'}; see {outcome.run_dir}")
        print("  console:\n" + outcome.console_tail)
    sys.stdout.flush()
    return good


def get_kernels(
    session: Session, names: list[str] | None, machine: Machine
) -> tuple[list[tuple[Kernel, KernelFiles]], bool]:
    """Returns a machine type's kernels with their files, and whether the matrix is complete.

    If no reachable archive provides a kernel of another release, the kernel is skipped and the
    reason is printed, unless the user requested the kernel.
    """
    result, complete = [], not names
    for name in names or [row.name for row in KERNELS.values() if row.machine is machine]:
        kernel = get_kernel(name)
        try:
            result.append((kernel, session.get_files(name)))
        except MatrixError as error:
            if names or not kernel.release:
                raise
            print(f"Linux {name}: NOT RUN: {error}", flush=True)
            complete = False
    return result, complete


def run_matrix(options: argparse.Namespace) -> bool:
    session = Session(options.timeout, options.verbose, options.cycles)
    machine = AARCH64 if options.arm64 else X86_64
    kernels, complete = get_kernels(session, options.kernel, machine)
    boots = [] if options.prepare else [BOOTS[name] for name in options.boot or BOOTS]
    # Start with the slowest boots.
    planned = [
        (kernel, files, boot)
        for boot in boots
        for kernel, files in kernels
        if options.boot or boot.name in (kernel.boots or BOOTS)
    ]

    guests: dict[tuple[str, str], list[Result]] = {}

    def run(planned: tuple[Kernel, KernelFiles, Boot]) -> tuple[bool, Column]:
        kernel, files, boot = planned
        outcome = session.boot(
            files, boot, tests=kernel.tests, expression=options.k, overlay=options.overlay
        )
        title = f"Linux {files.name} ({files.version}), {boot.title}"
        results = read_junit(outcome.junit)
        if isinstance(kernel, DebianKernel) and outcome.status in ENDED:
            guests.setdefault((files.machine.name, files.title), []).extend(results)
        return report(title, outcome), Column(title, results)

    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(run, planned))
    if not (options.k or options.overlay):
        for (machine_name, kernel_title), results in guests.items():
            save_guest(machine_name, kernel_title, find_promises(results))
    good = all(passed for passed, _ in done)
    partly = options.arm64 or options.kernel or options.boot or options.k or options.overlay
    if good and done and complete and not partly:
        TABLE.write_text(render_table([column for _, column in done]))
        print(f"wrote {TABLE}")
    return good


def main() -> int:
    try:
        return 0 if run_matrix(parse_arguments()) else 1
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"fix: {error.hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
