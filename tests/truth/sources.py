"""Compiles BPF programs for tests, and copies sources for mutation."""

import shutil
import subprocess
from pathlib import Path
from typing import Protocol

from otel_kprofiler.bpf import PROGRAMS


class Change(Protocol):
    """A change to a source file, at the first occurrence of ``old``."""

    name: str
    file: str
    old: str
    new: str


def copy_sources(folder: Path, mutation: Change | None) -> Path:
    """Copies the BPF programs' sources, one of them changed; returns the directory."""
    include = folder / "include"
    shutil.rmtree(include, ignore_errors=True)
    shutil.copytree(PROGRAMS, include)
    if mutation:
        path = include / mutation.file
        text = path.read_text()
        if mutation.old not in text:
            raise SystemExit(f"{mutation.name}: its place is gone from {mutation.file}")
        path.write_text(text.replace(mutation.old, mutation.new, 1))
    return include


def compile_program(source: Path, include: Path, target: Path) -> Path:
    """Compile a BPF program for its BTF and code alone; returns the object."""
    command = [
        "clang-14", "-target", "bpfel", "-mcpu=v2", "-O2", "-g", "-nostdinc", "-std=gnu11",
        f"-I{include}", "-c", str(source), "-o", str(target),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    subprocess.run(["llvm-strip-14", "--strip-debug", str(target)], check=True)
    return target
