"""Samples a program and compares its stacks with the reference."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

from otel_kprofiler.model import StackEnd
from tests.truth import dumps
from tests.truth.compare import Report, compare
from tests.truth.programs import Program, make
from tests.truth.reference import Maps

_HZ, _CHUNK, _TIMEOUT_S = 997, 500, 20.0


def measure(program: Program, built: Path, folder: Path, stacks: int) -> Report:
    """Checks at least ``stacks`` stacks of a program, sampled once its unwind tables are loaded."""
    command = make(program, folder)
    total = Report(Counter(), Counter(), [], 0)
    with dumps.Dumps(built) as dumper:
        while total.total < stacks:
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as process:
                try:
                    _wait_for_tables(dumper, process.pid)
                    while total.total < stacks and process.poll() is None:
                        wanted = min(_CHUNK, stacks - total.total)
                        go = Maps(process.pid).go_offsets()
                        result = dumper.take(process.pid, _HZ, wanted, go=go, timeout_s=_TIMEOUT_S)
                        total = total.plus(compare(result, Maps(process.pid)))
                finally:
                    process.kill()
    return total


def _wait_for_tables(dumper: dumps.Dumps, pid: int) -> None:
    for _ in range(20):
        result = dumper.take(pid, _HZ, 60, timeout_s=_TIMEOUT_S)
        if result and all(dump.stack.end is not StackEnd.PENDING for dump in result):
            return
