"""Copies of the kernel programs' sources, to be broken on purpose."""

import shutil
from pathlib import Path
from typing import Protocol

from otel_kprofiler.bpf import PROGRAMS


class Change(Protocol):
    """One change of a source file: the first place that has ``old``."""

    name: str
    file: str
    old: str
    new: str


def copy_sources(folder: Path, mutation: Change | None) -> Path:
    """A directory with the kernel programs' sources, one of them changed."""
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
