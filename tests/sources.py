"""Provides the package's sources as syntax trees, parsed once per test run."""

import ast
import functools
import gc
from collections.abc import Mapping
from pathlib import Path

import otel_kprofiler

PACKAGE = Path(otel_kprofiler.__file__).parent


@functools.cache
def syntax_trees() -> Mapping[Path, ast.Module]:
    """Returns all modules as syntax trees, sorted by path. Callers must not change the trees."""
    gc.disable()  # collections would traverse the growing trees without finding garbage
    try:
        return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    finally:
        gc.enable()
        gc.freeze()
