"""Results of platforms, kept in results.json, and the page made from them."""

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
MACHINE = "this machine"
GUEST_LIBC, GUEST_PYTHON = "glibc 2.36", "CPython 3.11, Debian 12"
"""C library and interpreter of the guests of tests/kernels."""
HEAD = """# Platforms

`make test-platforms` generates this page from the results of its tests. *Proved* results are from
hardware of this kind. *Emulated* results are from a virtual machine with software emulation, which
shows whether results are right, but not the cost. *No* means that the platform is not supported,
with the message that `record` prints, or that it could not be tested, with the reason. Platforms
that are not listed have not been tried. *From source* means that the program was built from
Debian's source package, because no binary package contains it.

"""


class Row(NamedTuple):
    """The result for one platform.

    Attributes:
        machine: x86-64 or arm64.
        libc: C library of the profiled programs, with its version.
        kernel: version of the kernel, with the page size if it is not 4 KiB.
        program: version and origin of the interpreter, or what was compiled.
        state: PROVED, EMULATED or NO.
        results: what was seen, or the reason.
    """

    machine: str
    libc: str
    kernel: str
    program: str
    state: str
    results: tuple[str, ...]

    @property
    def platform(self) -> tuple[str, ...]:
        """Machine, C library, kernel and program: there is one row for each combination."""
        return self[:4]


def read_rows(path: Path = RESULTS) -> list[Row]:
    """Reads the results so far; none if there is no file."""
    if not path.exists():
        return []
    return [
        Row(**{**row, "results": tuple(row["results"])}) for row in json.loads(path.read_text())
    ]


def merge(rows: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Returns all rows, in order of platforms; a new row replaces the row of the same platform."""
    merged = {row.platform: row for row in rows}
    merged.update({row.platform: row for row in new})
    return [merged[key] for key in sorted(merged)]


def save(new: Iterable[Row], replaced: Callable[[Row], bool] = lambda row: False) -> None:
    """Add results, and write the page.

    Args:
        new: the results; each replaces the earlier result of its platform.
        replaced: whether an earlier result is to be removed in any case.
    """
    rows = merge((row for row in read_rows() if not replaced(row)), new)
    RESULTS.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    PAGE.write_text(render(rows))


def render(rows: Iterable[Row]) -> str:
    """Returns the page."""
    lines = ["| Machine | C library | Kernel | Program | Result |", "|---|---|---|---|---|"]
    for row in rows:
        result = f"*{row.state}*: {'; '.join(row.results)}"
        lines.append(f"| {' | '.join(row.platform)} | {result} |")
    return HEAD + "\n".join(lines) + "\n"


def here(libc: str) -> tuple[str, str, str]:
    """Returns this machine, a C library and this kernel, as in rows."""
    series = ".".join(platform.release().split(".")[:2])
    return MACHINES[platform.machine()], libc, f"Linux {series}"


def save_guest(machine: str, kernel: str, promises: Iterable[str]) -> None:
    """Save the parts that all boots of a kernel have proved; without any, keep the earlier result.

    Args:
        machine: as ``uname -m`` has it.
        kernel: release of the kernel.
        promises: parts of the profiler whose tests passed.
    """
    if results := tuple(sorted(promises)):
        save([Row(MACHINES[machine], GUEST_LIBC, kernel, GUEST_PYTHON, EMULATED, results)])
