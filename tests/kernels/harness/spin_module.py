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
"""The ``KPROF_OTHER`` value of each build, by directory name."""


def build(kernel: KernelFiles) -> Path:
    """Rebuilds outdated variants. Returns the variants' directory, or raises MatrixError."""
    if kernel.headers is None:
        raise MatrixError(f"{kernel.name}: the headers to build the test module are missing")
    home = kernel.work / "module"
    newest = max(path.stat().st_mtime for path in SOURCE.iterdir())
    for variant, other in VARIANTS.items():
        target = home / variant
        module = target / "kprof_spin.ko"
        if module.exists() and module.stat().st_mtime > newest:
            continue
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(SOURCE, target)
        # BTF for modules would need pahole, and no test reads it. Headers from an older release
        # specify the compiler used for that release, so override it.
        options = [f"M={target}", f"KPROF_OTHER={other}", "CONFIG_DEBUG_INFO_BTF_MODULES="]
        options += [f"CC={kernel.machine.compiler}", *kernel.machine.make]
        call(["make", "-s", f"-j{os.cpu_count()}", "-C", str(kernel.headers), *options, "modules"])
    return home
