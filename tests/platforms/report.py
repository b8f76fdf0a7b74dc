"""The results for all platforms, stored in results.json, and the page generated from them."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs/platforms.md"
MACHINES = {"x86_64": "x86-64", "aarch64": "arm64"}

PROVED = "proved"
EMULATED = "emulated"
NO = "no"
GUEST_LIBC, GUEST_PYTHON = "glibc 2.36", "CPython 3.11, Debian 12"
"""The C library and the interpreter in the guests that tests/kernels boots."""
HEAD = """# Platforms

`make test-platforms` generates this page from the results of its tests. *Proved* results are from
hardware of this kind. *Emulated* results are from a virtual machine with software emulation, which
shows whether the results are right, but not what profiling costs. *No* means that the platform is
unsupported or could not be tested, and is followed by the message that `record` prints, or by the
reason. Platforms that are not listed have not been tried. *From source* means that the program was
built from Debian's source package, because no binary package contains it.

*Wrong* samples of a Python program show frames that did not run. *Absent* samples lack Python
frames although Python code ran. *Frameless* samples lack them, too, but their threads may have had
none. Samples that are *not described* have a Python frame without function or line. Samples *in
system calls* also show which Python function made the call.

"""


class Row(NamedTuple):
    """The result for one platform.

    Attributes:
        libc: the C library used by the profiled programs, with its version.
        kernel: the version of the kernel, with the page size if that is not 4 KiB.
        program: the version and origin of the interpreter, or the compiled program.
        state: one of PROVED, EMULATED and NO.
        results: the observed results, or the reason for their absence.
    """

    machine: str
    libc: str
    kernel: str
    program: str
    state: str
    results: tuple[str, ...]

    @property
    def platform(self) -> tuple[str, ...]:
        """The row's key: machine, C library, kernel and program."""
        return self[:4]


def read_rows(path: Path = RESULTS) -> list[Row]:
    """Reads the earlier results; empty if the file does not exist."""
    if not path.exists():
        return []
    return [
        Row(**{**row, "results": tuple(row["results"])}) for row in json.loads(path.read_text())
    ]


def merge(rows: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Returns all rows, sorted by platform. A new row replaces the row for the same platform."""
    merged = {row.platform: row for row in rows}
    merged.update({row.platform: row for row in new})
    return [merged[key] for key in sorted(merged)]


def save(new: Iterable[Row], replaced: Callable[[Row], bool] = lambda row: False) -> None:
    """Adds results, replacing earlier results for the same platforms, and writes the page.

    ``replaced`` selects earlier results to remove even if no new result replaces them.
    """
    rows = merge((row for row in read_rows() if not replaced(row)), new)
    RESULTS.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    PAGE.write_text(render(rows))


def render(rows: Iterable[Row]) -> str:
    lines = ["| Machine | C library | Kernel | Program | Result |", "|---|---|---|---|---|"]
    for row in rows:
        result = f"*{row.state}*: {'; '.join(row.results)}"
        lines.append(f"| {' | '.join(row.platform)} | {result} |")
    return HEAD + "\n".join(lines) + "\n"


def here(libc: str) -> tuple[str, str, str]:
    """Returns a row's columns for this machine and kernel, and for the given C library."""
    series = ".".join(platform.release().split(".")[:2])
    return MACHINES[platform.machine()], libc, f"Linux {series}"


def save_guest(machine: str, kernel: str, promises: Iterable[str]) -> None:
    """Saves the components that passed in every boot of a kernel; if none did, changes nothing."""
    if results := tuple(sorted(promises)):
        save([Row(MACHINES[machine], GUEST_LIBC, kernel, GUEST_PYTHON, EMULATED, results)])
