"""Kernel code outside of vmlinux and modules: BPF functions, trampolines, probe pages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from otel_kprofiler.model.stack import BpfProgram, ModuleKind


class Ksymbol(NamedTuple):
    """Kernel code outside of vmlinux and modules: a BPF function, a trampoline, a probe page.

    Attributes:
        start: runtime address.
        length: bytes, 0 if unknown.
        name: the kernel's, as in kallsyms.
        kind: ``BPF`` or ``OUT_OF_LINE``.
        since_ns: boot time at which it was loaded, 0 if unknown.
        program_id: id of the BPF program that contains it, 0 if none or unknown.
    """

    start: int
    length: int
    name: str
    kind: ModuleKind
    since_ns: int = 0
    program_id: int = 0


class KsymbolAction(enum.Enum):
    """Events of code outside of vmlinux and modules."""

    ADDED = "added"
    REMOVED = "removed"
    PROGRAMS_READ = "programs_read"
    """All BPF functions were read; trampolines and probe pages were not."""
    ALL_READ = "all_read"
    """All code was read."""
    LOST = "lost"
    """Changes were lost; the state is unknown until the next reading."""


class KsymbolChange(NamedTuple):
    """A change of code outside of vmlinux and modules, or its state at a reading.

    Attributes:
        time_ns: boot time; start of a reading, or last time before a loss.
        action: what happened.
        symbols: those added, removed or present.
        until_ns: for a loss, the boot time of its detection.
    """

    time_ns: int
    action: KsymbolAction
    symbols: tuple[Ksymbol, ...] = ()
    until_ns: int = 0


class KsymbolBatch(NamedTuple):
    """Changes in order of time, and the boot time up to which they are complete."""

    changes: Sequence[KsymbolChange]
    complete_until_ns: int


class KsymbolDetails(NamedTuple):
    """Program and source lines of a BPF function.

    Attributes:
        program: the program.
        lines: source lines as (offset in the function, file, line), ascending.
    """

    program: BpfProgram
    lines: tuple[tuple[int, str, int], ...] = ()
