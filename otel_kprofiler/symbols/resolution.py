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
"""Lowest kernel address on all 64-bit machines."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The answer for one address. Nothing is guessed: each missing part has a reason.

    Attributes:
        address: the requested address: of the process, of the running kernel, or in a file alone.
        frame: module (name, build id), address in the module's file, functions with file and line,
            distance from the function's start; or the reason for having no function.
        process: pid and start time; None for the kernel, and for a file alone.
        path: path of the file in its process; empty if there is none or unknown.
        file_offset: offset in the file, in bytes, as for uprobes; None if no bytes of the file are
            loaded there.
    """

    address: int
    frame: Frame
    process: ProcessKey | None = None
    path: str = ""
    file_offset: int | None = None

    @property
    def module(self) -> Module | None:
        """Returns the module of the code; None if unknown."""
        return self.frame.module

    @property
    def build_id(self) -> BuildId | None:
        """Returns the GNU build id of the file; None if it has none, or is unknown."""
        return self.frame.module.build_id if self.frame.module else None

    @property
    def module_address(self) -> int | None:
        """Returns the address in the file: SVMA (user) or RVA (kernel); None without a module.

        This is the address of ELF symbols and debug information, not an offset in the file.
        """
        return self.frame.address if self.frame.module else None

    @property
    def lines(self) -> tuple[Line, ...]:
        """Returns the functions at the address, innermost inlined first; empty if unresolved."""
        return self.frame.lines

    @property
    def function(self) -> str:
        """Returns the name of the physical, not inlined, function; empty if unresolved."""
        return self.frame.function

    @property
    def offset(self) -> int:
        """Returns the distance in bytes from the start of the physical function; 0 if unknown."""
        return self.frame.offset

    @property
    def unresolved(self) -> Unresolved | None:
        """Returns why there is no name; None if there is one."""
        return self.frame.unresolved

    def __str__(self) -> str:
        name = f"{self.function}+{self.offset:#x}" if self.lines else ""
        if self.unresolved:
            name = f"[{self.unresolved.value}]"
        place = f" {self.module.name}+{self.frame.address:#x}" if self.module else ""
        return f"{self.address:#x} {name}{place}"


class Resolver(Protocol):
    """Resolves addresses, and finds addresses of names.

    Thread-safe. Unknown addresses and processes are not errors: the answer has the reason, and a
    later resolver of a chain may know more.
    """

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves addresses.

        Args:
            addresses: addresses of instructions, not return addresses: see
                :func:`lookup_addresses`.
            pid: process of the addresses; None for the kernel, or for a file alone.

        Returns:
            One answer for each address, in their order.
        """

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds all places with a linker name or a displayed name."""

    def close(self) -> None:
        """Release all resources; idempotent."""


def make_unknown(
    address: int, reason: Unresolved, process: ProcessKey | None = None, path: str = ""
) -> Resolution:
    """Returns the answer for an unknown address."""
    side = KERNEL_SIDE if address >= FIRST_KERNEL_ADDRESS else USER_SIDE
    return Resolution(address, Frame(None, address, (), 0, side, reason), process, path)
