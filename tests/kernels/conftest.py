"""Tests marked ``kernel`` run only inside the guests that ``run.py`` boots."""

import os
import sys
from pathlib import Path

import pytest

# The packages harness and guest are imported from here.
sys.path.insert(0, str(Path(__file__).parent))

GUEST = os.environ.get("OTEL_KPROFILER_GUEST", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("kernel") is not None:
            promise = (item.function.__doc__ or item.name).splitlines()[0].rstrip(".")
            item.user_properties.append(("feature", promise))
    if GUEST:
        if "MATRIX_PROGRAMS" not in os.environ:  # tests/live covers them on the host's machine type
            items[:] = [item for item in items if not item.get_closest_marker("built_programs")]
        for item in items:
            if item.get_closest_marker("one_boot") and not GUEST.endswith(" kaslr"):
                item.add_marker(pytest.mark.skip(reason="unaffected by what differs in this boot"))
        return
    outside = [item for item in items if item.get_closest_marker("kernel")]
    if outside:
        items[:] = [item for item in items if item not in set(outside)]
        config.hook.pytest_deselected(items=outside)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    deselected = terminalreporter.stats.get("deselected", [])
    if not GUEST and any(item.get_closest_marker("kernel") for item in deselected):
        terminalreporter.line("tests of kernels run in guests only: make test-kernels")
