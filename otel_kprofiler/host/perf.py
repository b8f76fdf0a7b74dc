"""Opens and controls perf events (perf_event_open(2)).

``struct perf_event_attr`` is in include/uapi/linux/perf_event.h (PERF_ATTR_SIZE_VER5).
"""

import ctypes
import errno
import fcntl
import platform
import struct
from typing import Final, NamedTuple

from otel_kprofiler.host.libc import call_libc

TYPE_HARDWARE: Final = 0
TYPE_SOFTWARE: Final = 1
COUNT_SW_CPU_CLOCK: Final = 0
COUNT_SW_DUMMY: Final = 9

DISABLED: Final = 1 << 0
INHERIT: Final = 1 << 1
FREQUENCY: Final = 1 << 10
ENABLE_ON_EXEC: Final = 1 << 12

TIME_ENABLED: Final = 1 << 0
"""Bit in ``read_format``: reads of an event also return the time for which it was enabled."""

_ATTR: Final = struct.Struct("=IIQQQQQIIQQQQIiQIHH")
_FLAG_FD_CLOEXEC: Final = 8
_SYSCALLS: Final = {"x86_64": 298, "aarch64": 241}
# _IO('$', n) and _IOW('$', n, …)
_IOC_ENABLE: Final = 0x2400
_IOC_DISABLE: Final = 0x2401
_IOC_PERIOD: Final = 0x40082404
_IOC_SET_BPF: Final = 0x40042408


class PerfAttributes(NamedTuple):
    """The fields of ``struct perf_event_attr`` that we set; ``flags`` holds the bit-fields.

    With ``FREQUENCY``, ``sample_period`` is a rate, in samples per second.
    """

    config: int
    sample_period: int = 0
    sample_type: int = 0
    read_format: int = 0
    flags: int = 0
    wakeup: int = 0
    clock_id: int = 0
    type: int = TYPE_SOFTWARE

    def pack(self) -> bytes:
        """Pack the struct for the kernel."""
        return _ATTR.pack(
            self.type, _ATTR.size, self.config, self.sample_period, self.sample_type,
            self.read_format, self.flags, self.wakeup, 0, 0, 0, 0, 0, 0, self.clock_id, 0, 0, 0, 0,
        )  # fmt: skip


def open_perf_event(attributes: PerfAttributes, *, pid: int = -1, cpu: int = -1) -> int:
    """Open an event; the caller closes the descriptor (close-on-exec).

    A ``pid`` of -1 selects all threads, and a ``cpu`` of -1 all CPUs. ``pid`` and ``cpu`` must not
    both be -1. Raises ``OSError``, for example ``ENODEV`` if the CPU is offline.
    """
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"perf_event_open is not supported on {platform.machine()}")
    buffer = ctypes.create_string_buffer(attributes.pack())
    return call_libc(
        "perf_event_open", "syscall", ctypes.c_long(number), buffer, ctypes.c_int(pid),
        ctypes.c_int(cpu), ctypes.c_int(-1), ctypes.c_ulong(_FLAG_FD_CLOEXEC),
    )  # fmt: skip


def attach_program(event_fd: int, program_fd: int) -> None:
    """Run a BPF program on every overflow of an event, until the event is closed."""
    fcntl.ioctl(event_fd, _IOC_SET_BPF, program_fd)


def enable_event(event_fd: int) -> None:
    """Enable an event, and the copies that child processes have inherited."""
    fcntl.ioctl(event_fd, _IOC_ENABLE, 0)


def disable_event(event_fd: int) -> None:
    """Disable an event. The event's BPF program no longer runs once this function has returned."""
    fcntl.ioctl(event_fd, _IOC_DISABLE, 0)


def set_period(event_fd: int, period_ns: int) -> None:
    """Change an event's sampling period, and start a new period immediately."""
    fcntl.ioctl(event_fd, _IOC_PERIOD, struct.pack("=Q", period_ns))
