"""Compiles BPF programs for tests, and copies sources for mutation."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from otel_kprofiler.bpf import PROGRAMS


class Mutation(NamedTuple):
    """Replaces the first occurrence of ``old`` in a source file, unless ``new`` equals ``old``.

    Attributes:
        minor: Python version in which a mutation of the Python reader is detectable.
        churn: whether a mutation of the Python reader is tested with short-lived functions.
    """

    name: str
    file: str
    old: str
    new: str
    minor: str = "3.11"
    churn: bool = False


def copy_sources(folder: Path, mutation: Mutation | None) -> Path:
    include = folder / "include"
    shutil.rmtree(include, ignore_errors=True)
    shutil.copytree(PROGRAMS, include)
    if mutation:
        path = include / mutation.file
        text = path.read_text()
        if mutation.old not in text:
            raise SystemExit(f"{mutation.name}: the text to replace is not in {mutation.file}")
        path.write_text(text.replace(mutation.old, mutation.new, 1))
    return include


def compile_program(source: Path, include: Path, target: Path) -> Path:
    """Compiles a BPF program with BTF and without other debug information.

    Returns the path of the object file.
    """
    command = [
        "clang-14", "-target", "bpfel", "-mcpu=v2", "-O2", "-g", "-nostdinc", "-std=gnu11",
        f"-I{include}", "-c", str(source), "-o", str(target),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    subprocess.run(["llvm-strip-14", "--strip-debug", str(target)], check=True)
    return target
