"""Builds the test module for a kernel, outside the checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.archive import call
from harness.errors import MatrixError
from harness.kernels import KernelFiles

SOURCE = Path(__file__).parent.parent / "module"
VARIANTS = {"spin": "", "other": "1"}
"""Directory of a build → value of ``KPROF_OTHER``."""


def build(kernel: KernelFiles) -> Path:
    """Build every variant that is older than its source; returns the directory with all variants.

    Raises:
        MatrixError: no headers, or the compiler's output.
    """
    if kernel.headers is None:
        raise MatrixError(f"{kernel.name}: no headers to build the test module with")
    home = kernel.work / "module"
    newest = max(path.stat().st_mtime for path in SOURCE.iterdir())
    for variant, other in VARIANTS.items():
        target = home / variant
        module = target / "kprof_spin.ko"
        if module.exists() and module.stat().st_mtime > newest:
            continue
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(SOURCE, target)
        # BTF of modules would need pahole; nothing here reads it. Headers of an older release
        # name its compiler.
        options = [f"M={target}", f"KPROF_OTHER={other}", "CONFIG_DEBUG_INFO_BTF_MODULES="]
        options += [f"CC={kernel.machine.compiler}", *kernel.machine.make]
        jobs = f"-j{os.cpu_count()}"
        call(["make", "-s", jobs, "-C", str(kernel.headers), *options, "modules"])
    return home
