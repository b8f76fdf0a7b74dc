"""The package's sources as syntax trees, parsed once in a test run."""

import ast
import functools
import gc
from collections.abc import Mapping
from pathlib import Path

import otel_kprofiler

PACKAGE = Path(otel_kprofiler.__file__).parent


@functools.cache
def syntax_trees() -> Mapping[Path, ast.Module]:
    """Syntax trees of all modules by path, in the order of their paths; callers change none."""
    gc.disable()  # trees have no cycles, and would be traversed as they grow
    try:
        return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    finally:
        gc.enable()
        gc.freeze()
