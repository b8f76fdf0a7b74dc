"""Builds programs outside the checkout, for profiling in guests of another machine type.

Guests of the host's machine type need no programs, since tests/live covers that case.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from harness.archive import call
from harness.kernels import KernelFiles
from harness.places import CHECKOUT

sys.path.append(str(CHECKOUT))
from tests import thread_contexts
from tests.truth.python import measure

_C = CHECKOUT / "tests/kernels/programs/chains.c"
_GO = CHECKOUT / "tests/truth/programs/work.go"
_COLLECTOR_VERSION = "v0.165.0"
_COLLECTOR = CHECKOUT / f"tests/collector/builder-{_COLLECTOR_VERSION}.yaml"


def build(kernel: KernelFiles) -> Path:
    """Builds every program that is older than its source, and returns the programs' directory.

    Without the go command, the Go program is omitted. Raises MatrixError with a compiler's output.
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
    if shutil.which("go"):
        variables = {**os.environ, "GOARCH": machine.architecture, "CGO_ENABLED": "0"}
        if _is_old(home / "go", _GO):
            call(["go", "build", "-o", str(home / "go"), str(_GO)], env=variables)
        if _is_old(home / "otelcol", _COLLECTOR):
            _build_collector(home / "otelcol", variables)
    return home


def _build_collector(program: Path, variables: dict[str, str]) -> None:
    manifest = _COLLECTOR.read_text()
    with tempfile.TemporaryDirectory(dir=program.parent) as directory:
        config = Path(directory, "builder.yaml")
        config.write_text(manifest.replace("dist:\n", f"dist:\n  output_path: {directory}\n"))
        builder = f"go.opentelemetry.io/collector/cmd/builder@{_COLLECTOR_VERSION}"
        call(["go", "run", builder, "--skip-compilation", "--config", str(config)])
        call(["go", "build", "-C", directory, "-o", str(program), "."], env=variables)


def _is_old(program: Path, source: Path) -> bool:
    return not program.exists() or program.stat().st_mtime < source.stat().st_mtime
