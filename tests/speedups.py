"""Loads the C version of the speedups, to compare it with the Python version."""

import importlib.util
import os
import platform
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
