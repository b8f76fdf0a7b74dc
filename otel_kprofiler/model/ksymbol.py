"""Kernel code outside vmlinux and modules."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from otel_kprofiler.model.stack import BpfProgram, ModuleKind


class Ksymbol(NamedTuple):
    """Kernel code outside vmlinux and modules: a BPF function, a trampoline or a probe page.

    Attributes:
        start: runtime address.
        length: length of the code in bytes; 0 if unknown.
        name: symbol name, as in kallsyms.
        kind: ``BPF`` or ``OUT_OF_LINE``.
        since_ns: boottime at which the code was loaded; 0 if unknown.
        program_id: id of the containing BPF program; 0 if none or unknown.
    """

    start: int
    length: int
    name: str
    kind: ModuleKind
    since_ns: int = 0
    program_id: int = 0


class KsymbolAction(enum.Enum):
    """Events concerning code outside vmlinux and modules."""

    ADDED = "added"
    REMOVED = "removed"
    PROGRAMS_READ = "programs_read"
    """All BPF functions were read, but not the trampolines and probe pages."""
    ALL_READ = "all_read"
    """All code outside vmlinux and modules was read."""
    LOST = "lost"
    """Changes were lost. Until the next snapshot, it is unknown which code exists."""


class KsymbolChange(NamedTuple):
    """A change to kernel code outside vmlinux and modules, or a snapshot of that code.

    Attributes:
        time_ns: boottime of the change or of the snapshot's start; for a loss, boottime of the last
            change before the loss.
        symbols: functions that were added or removed; for a snapshot, all functions present.
        until_ns: for a loss, the ``CLOCK_BOOTTIME`` at which it was detected.
    """

    time_ns: int
    action: KsymbolAction
    symbols: tuple[Ksymbol, ...] = ()
    until_ns: int = 0


class KsymbolBatch(NamedTuple):
    """Changes in time order, and the ``CLOCK_BOOTTIME`` up to which they are complete."""

    changes: Sequence[KsymbolChange]
    complete_until_ns: int


class KsymbolDetails(NamedTuple):
    """The program and the source lines (offset in the function, file, line) of a BPF function."""

    program: BpfProgram
    lines: tuple[tuple[int, str, int], ...] = ()
