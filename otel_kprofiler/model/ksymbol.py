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
        program_id: BPF program that it is a function of, 0 if none or unknown.
    """

    start: int
    length: int
    name: str
    kind: ModuleKind
    since_ns: int = 0
    program_id: int = 0


class KsymbolAction(enum.Enum):
    """The event of code outside of vmlinux and modules."""

    ADDED = "added"
    REMOVED = "removed"
    PROGRAMS_READ = "programs_read"
    """All BPF functions there are were read; trampolines and pages were not looked at."""
    ALL_READ = "all_read"
    """All that there is was read."""
    LOST = "lost"
    """Changes were missed, and what is there is not known until it is read again."""


class KsymbolChange(NamedTuple):
    """One change of code outside of vmlinux and modules, or what was there when it was read.

    Attributes:
        time_ns: boot time; of a reading its beginning, of a loss the last time before it.
        action: what happened.
        symbols: which were added, removed or there.
        until_ns: of a loss, the boot time at which it was noticed.
    """

    time_ns: int
    action: KsymbolAction
    symbols: tuple[Ksymbol, ...] = ()
    until_ns: int = 0


class KsymbolBatch(NamedTuple):
    """Changes in the order of time, and the boot time up to which there will be no others."""

    changes: Sequence[KsymbolChange]
    complete_until_ns: int


class KsymbolDetails(NamedTuple):
    """More about one function of a BPF program.

    Attributes:
        program: the program.
        lines: source lines as (offset in the function, file, line), ascending.
    """

    program: BpfProgram
    lines: tuple[tuple[int, str, int], ...] = ()
