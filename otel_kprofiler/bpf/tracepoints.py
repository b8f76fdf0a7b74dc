"""Attaches programs to raw tracepoints, and packs their constants (``tracepoint.bpf.h``)."""

import ctypes
import struct
from collections.abc import Container
from typing import Final, NamedTuple

from otel_kprofiler.bpf.call import bpf_call
from otel_kprofiler.bpf.mapped_words import MappedWords

TRACEPOINT_PROGRAM: Final = "kprofiler_tracepoint"
TRACEPOINT: Final = ".rodata.tracepoint"
"""Section that contains the ``tracepoint`` constant."""
NO_ARGUMENT: Final = 255
MAX_ARGUMENTS: Final = 6
_RAW_TRACEPOINT_OPEN: Final = 17  # enum bpf_cmd, include/uapi/linux/bpf.h
_CONSTANTS: Final = struct.Struct("=10Q")


class TracepointValue(NamedTuple):
    """Location and unit of the value in a tracepoint's events.

    Attributes:
        argument: index of the argument with the value; :data:`NO_ARGUMENT` if each event counts as
            1.
        member: byte offset of the 32-bit value in the struct that the argument points to; None if
            the argument itself is the value.
        is_order: whether the value is ``1 << argument``.
        unit: bytes per unit of the value.
    """

    argument: int = NO_ARGUMENT
    member: int | None = None
    is_order: bool = False
    unit: int = 1


class TracepointConstants(NamedTuple):
    """Mirrors ``struct tracepoint``, whose comments describe the fields.

    ``call`` is the number of the system call to count; None counts all system calls.
    """

    number: int
    period: int
    by: int
    python: bool
    value: TracepointValue
    call: int | None = None

    def pack(self) -> bytes:
        """Packs the struct."""
        argument, member, is_order, unit = self.value
        calls = 0 if self.call is None else self.call + 1
        return _CONSTANTS.pack(
            *self[:4], argument, member is not None, member or 0, is_order, unit, calls
        )


class TracedCpus(MappedWords):
    """The ``traced_cpus`` array, mapped so that changes need no system call."""

    def __init__(self, map_fd: int, cpus: int) -> None:
        super().__init__(map_fd, cpus, writable=True)

    def change(self, cpus: Container[int]) -> None:
        """Restrict the sampling of tracepoint events to the given CPUs."""
        for cpu in range(len(self.words)):
            self.words[cpu] = cpu in cpus


def attach_tracepoint(name: str, program_fd: int) -> int:
    """Attach a program to a raw tracepoint until the returned descriptor is closed.

    If the name is empty, the program's BTF determines the tracepoint. Raises ``OSError``, with
    ``ENOENT`` if the kernel has no such tracepoint.
    """
    text = ctypes.create_string_buffer(name.encode())
    # union bpf_attr for BPF_RAW_TRACEPOINT_OPEN: name, program
    address = ctypes.addressof(text) if name else 0
    return bpf_call(_RAW_TRACEPOINT_OPEN, (ctypes.c_uint64 * 2)(address, program_fd))


def count_recursions(program_fd: int) -> int:
    """Returns how often the kernel skipped a program because it was already running on the CPU.

    The kernel has reported this count since Linux 5.12 (``bpf_prog_show_fdinfo``). Returns
    0 if the count cannot be read.
    """
    try:
        with open(f"/proc/self/fdinfo/{program_fd}", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file if ":" in line)
        return int(rows.get("recursion_misses", "0"))
    except (OSError, ValueError):
        return 0
