"""Builds, outside the checkout, the programs that guests of another machine type profile.

Guests of the host's machine type need none, since tests/live covers these programs.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from harness.archive import call
from harness.kernels import KernelFiles
from harness.places import CHECKOUT

sys.path.append(str(CHECKOUT))
from tests import thread_contexts
from tests.truth.python import measure

_C = CHECKOUT / "tests/kernels/programs/chains.c"
_GO = CHECKOUT / "tests/truth/programs/work.go"


def build(kernel: KernelFiles) -> Path:
    """Builds every program that is older than its source; returns the programs' directory.

    Without the go command, the Go program is left out.

    Raises:
        MatrixError: a compiler failed; the message has its output.
    """
    machine, home = kernel.machine, kernel.work / "programs"
    home.mkdir(parents=True, exist_ok=True)
    for name, options in machine.variants.items():
        if _is_old(home / name, _C):
            command = [machine.compiler, "-O2", "-fomit-frame-pointer", *options]
            call([*command, "-o", str(home / name), str(_C)])
    for model in thread_contexts.GUEST_MODELS:
        target = home / "contexts" / model
        if _is_old(target / "program", thread_contexts.SOURCES / "program.c"):
            target.mkdir(parents=True, exist_ok=True)
            thread_contexts.build(target, model, compiler=machine.compiler)
    if _is_old(home / "marked.bpf.o", measure.SOURCE):
        measure.build(home)
    if shutil.which("go") and _is_old(home / "go", _GO):
        variables = {**os.environ, "GOARCH": machine.architecture, "CGO_ENABLED": "0"}
        call(["go", "build", "-o", str(home / "go"), str(_GO)], env=variables)
    return home


def _is_old(program: Path, source: Path) -> bool:
    return not program.exists() or program.stat().st_mtime < source.stat().st_mtime
