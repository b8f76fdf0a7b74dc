"""Resolvers and their answers: one result for kernel and user code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from otel_kprofiler.model import (
    KERNEL_SIDE,
    USER_SIDE,
    BuildId,
    Frame,
    Line,
    Module,
    ProcessKey,
    Unresolved,
)

FIRST_KERNEL_ADDRESS: Final = 1 << 63
"""Runtime addresses from here on are the kernel's, on all 64-bit machines."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The answer for one address. Nothing is ever guessed: what is not known has a reason.

    Attributes:
        address: as it was asked for: an address of the process, or of the running kernel. Of a
            file alone, the address in it.
        frame: module (name, build id), address in the module's file, functions with file and line,
            distance from the function's start; or the reason for having no function.
        process: pid and start time; None for the kernel, and for a file alone.
        path: of the file as its process sees it; empty if there is none or it is not known.
        file_offset: of the address in the file, in bytes, as uprobes want it; None if no bytes of
            the file are loaded there.
    """

    address: int
    frame: Frame
    process: ProcessKey | None = None
    path: str = ""
    file_offset: int | None = None

    @property
    def module(self) -> Module | None:
        """The module of the code; None if it is not known."""
        return self.frame.module

    @property
    def build_id(self) -> BuildId | None:
        """GNU build id of the file; None if it has none, or is not known."""
        return self.frame.module.build_id if self.frame.module else None

    @property
    def module_address(self) -> int | None:
        """Address in the file: SVMA of user code, RVA of kernel code; None without a module.

        It is what ELF symbols and debug information are about, and not an offset in the file.
        """
        return self.frame.address if self.frame.module else None

    @property
    def lines(self) -> tuple[Line, ...]:
        """Functions at the address, the innermost inlined one first; empty if there is no name."""
        return self.frame.lines

    @property
    def function(self) -> str:
        """Name of the physical function, in which others may be inlined; empty without a name."""
        return self.frame.function

    @property
    def offset(self) -> int:
        """Distance in bytes from the start of the physical function; 0 if that is not known."""
        return self.frame.offset

    @property
    def unresolved(self) -> Unresolved | None:
        """Why there is no name; None if there is one."""
        return self.frame.unresolved

    def __str__(self) -> str:
        name = f"{self.function}+{self.offset:#x}" if self.lines else ""
        if self.unresolved:
            name = f"[{self.unresolved.value}]"
        place = f" {self.module.name}+{self.frame.address:#x}" if self.module else ""
        return f"{self.address:#x} {name}{place}"


class Resolver(Protocol):
    """Resolves addresses, and finds those of names.

    Thread-safe. For no address and no process is there an error: the answer says why nothing is
    known. What one resolver cannot know, the next one of a chain may.
    """

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves addresses.

        Args:
            addresses: of instructions, not return addresses: see :func:`lookup_addresses`.
            pid: process that they belong to; None for the kernel, or for a file alone.

        Returns:
            One answer for each address, in their order.
        """

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """All places with a linker's name, or a name as it is displayed."""

    def close(self) -> None:
        """Release all resources; idempotent."""


def make_unknown(
    address: int, reason: Unresolved, process: ProcessKey | None = None, path: str = ""
) -> Resolution:
    """The answer for an address of which nothing else is known."""
    side = KERNEL_SIDE if address >= FIRST_KERNEL_ADDRESS else USER_SIDE
    return Resolution(address, Frame(None, address, (), 0, side, reason), process, path)
