"""Checks stacks of programs or C libraries without unwind tables against the actual calls.

All programs are stripped, and run until they are killed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from otel_kprofiler.model import FrameSource, StackEnd, UserStack
from tests.truth.calls import Calls, describe_wrong, find_libraries, take_stacks
from tests.truth.programs import FOLDER

COMPLETE = 0.98
"""Minimum fraction of complete stacks."""


class Program(NamedTuple):
    """A program to build, with its code at fixed addresses."""

    name: str
    libc: str
    make: Sequence[str]
    arguments: Sequence[str] = ("all",)
    is_dynamic: bool = False


class Result(NamedTuple):
    """A program's stacks, and the number of wrong stacks by description."""

    stacks: list[UserStack]
    wrong: Counter[str]

    @property
    def ends(self) -> Counter[StackEnd]:
        return Counter(stack.end for stack in self.stacks)

    @property
    def is_good(self) -> bool:
        """True if no stack is wrong, enough are complete, and code-derived rules were used."""
        complete = self.ends[StackEnd.COMPLETE] >= COMPLETE * len(self.stacks)
        sources = {source for stack in self.stacks for source in stack.sources}
        return not self.wrong and complete and FrameSource.DISASSEMBLY in sources

    def describe(self) -> str:
        total = len(self.stacks)
        share = self.ends[StackEnd.COMPLETE] / max(total, 1)
        return f"{total} stacks: {self.wrong.total()} wrong, {share:.2%} complete"


_PLAIN, _RUST = str(FOLDER / "plain.c"), str(FOLDER / "work.rs")
_WITHOUT_TABLES = ("-fno-asynchronous-unwind-tables", "-fomit-frame-pointer")
PROGRAMS = (
    Program("C, static", "musl", ("musl-gcc", "-O2", "-static", _PLAIN)),
    Program("C without tables, static", "musl",
            ("musl-gcc", "-Os", *_WITHOUT_TABLES, "-static", _PLAIN)),
    Program("C, dynamic", "musl", ("musl-gcc", "-O2", "-no-pie", _PLAIN), is_dynamic=True),
    Program("C without tables, static", "glibc",
            ("gcc", "-O2", *_WITHOUT_TABLES, "-static", _PLAIN)),
    Program("Rust without tables, static", "glibc",
            ("rustc", "-O", "-Cpanic=abort", "-Cforce-unwind-tables=no",
             "-Ctarget-feature=+crt-static", "-Crelocation-model=static", _RUST), ()),
)  # fmt: skip


def find_missing(program: Program) -> str:
    """Returns why a program cannot be built here, or an empty string if nothing is missing."""
    needs = (program.make[0], "objdump", "nm", "strip")
    missing = [need for need in needs if shutil.which(need) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def measure(program: Program, built: Path, folder: Path, count: int) -> Result:
    """Takes at least ``count`` stacks from a program built in ``folder``, and checks them."""
    named, stripped = folder / "named", folder / "stripped"
    subprocess.run([*program.make, "-o", named], check=True)
    subprocess.run(["strip", named, "-o", stripped], check=True)
    command = [str(stripped), *program.arguments]
    libraries: dict[Path, int] = {}
    if program.is_dynamic:
        command = ["setarch", "-R", *command]
        libraries = find_libraries(command, stripped)
    stacks = take_stacks(built, command, count)
    return Result(stacks, describe_wrong(stacks, Calls(named, libraries)))
