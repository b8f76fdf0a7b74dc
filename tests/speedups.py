"""Loads the C version of the speedups, to compare it with the Python version."""

import gc
import importlib.util
import os
import platform
import tracemalloc
from pathlib import Path

import pytest

from tests.sources import PACKAGE

LIBRARY = Path(
    os.environ.get("KPROFILER_SPEEDUPS_LIBRARY")  # a build with sanitizers
    or PACKAGE / f"speedups/_speedups_{platform.machine()}.abi3.so"
).absolute()


def load_compiled():
    """Returns the C version; skips the tests on processors for which there is none."""
    if not LIBRARY.exists():
        pytest.skip(f"there is no library for {platform.machine()}", allow_module_level=True)
    name = LIBRARY.name.partition(".")[0]
    spec = importlib.util.spec_from_file_location(f"otel_kprofiler.speedups.{name}", LIBRARY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_growth(work):
    """Returns by how many bytes the traced memory grows in a third call of a function."""
    work()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        start, _ = tracemalloc.get_traced_memory()
        work()
        gc.collect()
        end, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return end - start
