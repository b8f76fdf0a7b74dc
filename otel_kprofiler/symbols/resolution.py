"""The resolver protocol and its result types, for kernel and user code."""

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
"""Lowest kernel address on any 64-bit machine."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The result of resolving an address. Names are never guessed.

    Attributes:
        address: the requested address, which is a runtime address in the process or kernel, or an
            address in a file.
        frame: module, address in the module's file, functions and source lines. If no function was
            found, ``frame.unresolved`` is the reason.
        process: pid and start time; None for the kernel, and for a file without a process.
        path: path of the file as seen by the process; empty if there is no file, or if the path is
            unknown.
        file_offset: the address as a file offset, for uprobes; None if not in a file.
    """

    address: int
    frame: Frame
    process: ProcessKey | None = None
    path: str = ""
    file_offset: int | None = None

    @property
    def module(self) -> Module | None:
        """Returns the module containing the code; None if unknown."""
        return self.frame.module

    @property
    def build_id(self) -> BuildId | None:
        """Returns the file's GNU build id; None if the file or its build id is unknown."""
        return self.frame.module.build_id if self.frame.module else None

    @property
    def module_address(self) -> int | None:
        """Returns the address in the file: SVMA (user) or RVA (kernel); None if there is no module.

        ELF symbols and debug information also contain SVMAs, not file offsets.
        """
        return self.frame.address if self.frame.module else None

    @property
    def lines(self) -> tuple[Line, ...]:
        """Returns the functions at the address, innermost first; empty if unresolved."""
        return self.frame.lines

    @property
    def function(self) -> str:
        """Returns the name of the physical (not inlined) function; empty if unresolved."""
        return self.frame.function

    @property
    def offset(self) -> int:
        """Returns the distance in bytes from the start of the physical function; 0 if unknown."""
        return self.frame.offset

    @property
    def unresolved(self) -> Unresolved | None:
        """Returns why the address has no function name; None if it was resolved."""
        return self.frame.unresolved

    def __str__(self) -> str:
        name = f"{self.function}+{self.offset:#x}" if self.lines else ""
        if self.unresolved:
            name = f"[{self.unresolved.value}]"
        place = f" {self.module.name}+{self.frame.address:#x}" if self.module else ""
        return f"{self.address:#x} {name}{place}"


class Resolver(Protocol):
    """Resolves addresses to functions, and names to addresses. Thread-safe.

    Unknown addresses and processes are not errors. An unresolved result states the reason.
    """

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Returns a result for each address, in the same order.

        Args:
            addresses: instruction addresses, not return addresses; see
                :func:`lookup_addresses`.
            pid: the process whose addresses are resolved; None for the kernel, or for a file
                without a process.
        """

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds all functions with this linkage name or displayed name."""

    def close(self) -> None:
        """Release all resources; idempotent."""


def make_unknown(
    address: int, reason: Unresolved, process: ProcessKey | None = None, path: str = ""
) -> Resolution:
    """Returns the result for an address that cannot be resolved."""
    side = KERNEL_SIDE if address >= FIRST_KERNEL_ADDRESS else USER_SIDE
    return Resolution(address, Frame(None, address, (), 0, side, reason), process, path)
