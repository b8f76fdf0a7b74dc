"""Measures the memory that each import adds, in the order of the agent's imports."""

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.rows import Row

_SYMBOLS = """
from otel_kprofiler.host import Access
from otel_kprofiler.symbols import KernelSymbolizer
kept = KernelSymbolizer.live(Access())
"""
_METRICS = """
import otel_kprofiler.agent.metrics
"""
_UEVENTS = """
from otel_kprofiler.host import Uevents
kept_events = Uevents()
"""
STEPS = (
    ("interpreter", "pass"),
    ("click", "import click"),
    ("otel_kprofiler.agent", "from otel_kprofiler.agent import Agent"),
    ("kernel symbols of this host", _SYMBOLS),
    ("h2", "import h2.connection"),
    ("otlp_grpc exporter", "import otel_kprofiler.export.grpc"),
    ("own metrics (opentelemetry-sdk)", _METRICS),
    ("uevents of modules (pyroute2)", _UEVENTS),
)
ONLY_AT_START = (
    ("reading the configuration (pydantic, ruamel.yaml)", "import otel_kprofiler.config.load"),
)
_SCRIPT = """
import sys
def kib():
    with open("/proc/self/status") as status:
        return int(status.read().split("VmRSS:")[1].split()[0])
before = 0
for step in {steps!r}:
    exec(step)
    now = kib()
    print(now - before, now)
    before = now
"""


def measure(steps: tuple[str, ...]) -> list[tuple[int, int]]:
    """Returns the KiB that each step adds to the process's memory, and the total after the step."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(steps=steps)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [(int(more), int(total)) for more, total in map(str.split, done.stdout.splitlines())]


def rows(_quick: bool) -> Iterator[Row]:
    """Yields the memory that each step adds to a process after the previous steps."""
    measured = measure(tuple(code for _, code in STEPS))
    for (name, _), (more, total) in zip(STEPS, measured, strict=True):
        yield Row(f"import: {name}", f"+{more / 1024:.1f} MiB", f"{total / 1024:.1f} MiB in all")
    for name, code in ONLY_AT_START:
        more, _ = measure(("pass", code))[-1]
        yield Row(f"import: {name}", f"+{more / 1024:.1f} MiB", "in another process, which ends")
