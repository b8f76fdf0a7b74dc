"""Tests interpreters, and binaries that lack unwind tables, and writes docs/platforms.md.

Tests every interpreter that is installed here or available from a package registry.

Usage: python -m tests.platforms [--samples N] [VERSION…]; exits with 1 if a stack is wrong.
"""
# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from otel_kprofiler.elf import FileSource
from otel_kprofiler.interpreters import InterpreterRefused, find_interpreter
from tests.interpreters import Python
from tests.platforms.report import NO, PROVED, Row, here, save
from tests.platforms.sources import NOT_HERE, PYTHON, find_all, freeze
from tests.truth import dumps, untabled
from tests.truth.python.__main__ import is_good
from tests.truth.python.measure import PROGRAM, Target, building, measure, running, running_command

SUBINTERPRETERS = PROGRAM.with_name("subinterpreters.py")
_REFUSED = "no Python frames for "
_BUSY = "while True: sum(range(1000))"


def find_refusal(python: Python) -> str:
    """Returns why ``record`` rejects an interpreter, as printed; empty if it is supported."""
    with python.command.open("rb") as file, contextlib.suppress(InterpreterRefused):
        find_interpreter(FileSource(file.fileno(), os.fstat(file.fileno()).st_size))
        return ""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "otel_kprofiler", "record", "-d", "3s", "-o"]
        command += [str(Path(folder, "record.folded")), "--", str(python.command), "-c", _BUSY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines():
        if line.startswith(_REFUSED):
            return line.rpartition(": ")[2]
    raise AssertionError(f"record does not print a reason for {python.command}:\n{done.stderr}")


def find_libc(python: Python) -> str:
    asked = python.run("-c", "import platform; print(*platform.libc_ver())", check=True)
    name = str(asked.stdout.strip())
    return name if name.startswith("glibc") else find_musl()


def find_musl() -> str:
    loader = f"/lib/ld-musl-{platform.machine()}.so.1"
    shown = subprocess.run([loader], capture_output=True, text=True, check=False).stderr
    return "musl " + shown.partition("Version ")[2].split()[0]


LARGE_PAGES = Row(
    "arm64", "glibc", "Linux, pages of 64 KiB", "any", NO, ("no Debian release has such a kernel",)
)


def judge(built: Path, target: Target, samples: int, row: Row) -> bool:
    """Compares a program's stacks with the code that ran, and saves the row if they are correct."""
    (report,) = measure(built, [target], samples, timeout_s=600)
    print(f"{row.program}: {report.describe()}", flush=True)
    good = is_good(report, samples)
    if good:
        save([row._replace(results=(report.describe(),))])
    return good


def judge_subinterpreters(built: Path, python: Python, samples: int, row: Row) -> bool:
    """Checks the stacks of threads that run subinterpreters, on CPython 3.13 and later."""
    if tuple(map(int, python.version.split(".")[:2])) < (3, 13):
        return True
    with running(python, program=SUBINTERPRETERS) as target:
        return judge(
            built, target, samples, row._replace(program=f"{row.program}, subinterpreters")
        )


def judge_programs(count: int) -> bool:
    """Checks stacks from compiled programs. Saves a row per passing program."""
    good = True
    for program in untabled.PROGRAMS:
        if missing := untabled.find_missing(program):
            print(f"{program.libc}, {program.name}: {missing}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = untabled.measure(program, dumps.build(Path(folder)), Path(folder), count)
        print(f"{program.libc}, {program.name}: {result.describe()}", flush=True)
        good &= result.is_good
        if result.is_good:
            libc = find_musl() if program.libc == "musl" else " ".join(platform.libc_ver())
            save([Row(*here(libc), f"{program.name}, stripped", PROVED, (result.describe(),))])
    return good


def judge_application(built: Path, samples: int) -> bool:
    """Checks stacks from a PyInstaller application, or prints the reason if it cannot be built."""
    python = Python(Path(PYTHON), "")
    asked = python.run("-c", "import platform; print(platform.python_version())", check=True)
    name = f"CPython {asked.stdout.strip()}, PyInstaller, one file"
    with tempfile.TemporaryDirectory() as folder:
        try:
            application = freeze(Path(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", flush=True)
            return True
        with running_command([str(application)]) as target:
            return judge(built, target, samples, Row(*here(find_libc(python)), name, PROVED, ()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000, help="with each")
    parser.add_argument(
        "versions", nargs="*", help="such as 3.12, pyinstaller or programs; default: all"
    )
    options = parser.parse_args()
    good = True
    not_here = [Row(*here(libc), name, NO, (reason,)) for libc, name, reason in NOT_HERE]
    not_here.append(LARGE_PAGES)
    save(not_here, replaced=lambda row: row.libc in {libc for libc, *_ in NOT_HERE})
    with building() as built:
        for python, origin in find_all():
            if options.versions and not python.version.startswith(tuple(options.versions)):
                continue
            name, place = f"CPython {python.version}, {origin}", here(find_libc(python))
            reason = find_refusal(python)
            if reason:
                print(f"{name}: {reason}", flush=True)
                save([Row(*place, name, NO, (f"`record` prints *{reason}*",))])
                continue
            row = Row(*place, name, PROVED, ())
            with running(python) as target:
                good &= judge(built, target, options.samples, row)
            good &= judge_subinterpreters(built, python, options.samples, row)
        if not options.versions or "pyinstaller" in options.versions:
            good &= judge_application(built, options.samples)
    if not options.versions or "programs" in options.versions:
        good &= judge_programs(options.samples)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
