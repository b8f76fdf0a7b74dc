"""Per-CPU perf events that receive the kernel's records about loaded code and processes.

The kernel writes a record only to the current CPU's events, so every CPU needs an event.
"""

from __future__ import annotations  # gevent removes select.epoll

import enum
import errno
import logging
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from otel_kprofiler.errors import HostError, describe_error
from otel_kprofiler.host import (
    COUNT_SW_DUMMY,
    EventPerCpu,
    HostFiles,
    PerfAttributes,
    find_open_files_error,
    get_privilege_error,
    open_perf_event,
    read_online_cpus,
)
from otel_kprofiler.tracking.ksymbol_records import PerfMemory, PerfRing

SETTLE_NS: Final = 5_000_000
"""Maximum time from a record's timestamp until it is written, including virtual CPU pauses."""
_SAMPLE_TIME: Final = 1 << 2
_FORMAT_TIME_ENABLED: Final = 1 << 0
_FORMAT_LOST: Final = 1 << 4  # since kernel 6.0
# Bits of struct perf_event_attr. Without samples, only a watermark causes wakeups.
_WATERMARK, _SAMPLE_ID_ALL, _USE_CLOCK_ID = (1 << bit for bit in (14, 18, 25))
_BASE_FLAGS: Final = _WATERMARK | _SAMPLE_ID_ALL | _USE_CLOCK_ID
_READING: Final = struct.Struct("=QQQ")  # count, time enabled, lost

_MOST_RING_BYTES: Final = 512 * 1024
_LEAST_RING_BYTES: Final = max(32 * 1024, mmap.PAGESIZE)
_ALL_RINGS_BYTES: Final = 8 << 20

_log = logging.getLogger(__name__)


class RecordLoss(enum.Enum):
    """Reasons why records were lost."""

    RING_FULL = "ring_full"
    QUEUE_FULL = "queue_full"
    CPU_CAME = "cpu_came"
    """A CPU came online. Records written before the CPU's event was opened are missing."""
    DAMAGED = "damaged"


class WantedRecords(NamedTuple):
    """The kinds of records to request.

    Attributes:
        name: name of the tracked code or events in error messages ("… cannot be tracked").
        flags: bits of ``struct perf_event_attr``.
        extra_flags: bits to omit on older kernels that reject them.
    """

    name: str
    flags: int
    largest_bytes: int
    extra_flags: int = 0


KSYMBOLS: Final = WantedRecords("BPF symbols", 1 << 29 | 1 << 30, 1024)  # ksymbol, bpf_event


LossSink = Callable[[RecordLoss, int, int], None]
"""Function that receives the cause, the CPU, and the number of lost records (0 if unknown)."""


class _CpuEvent:
    __slots__ = ("clock", "fd", "lost", "lost_by_records", "ring")

    def __init__(self, fd: int, ring: PerfRing) -> None:
        self.fd = fd
        self.ring = ring
        self.clock = 0
        self.lost = 0
        self.lost_by_records = 0

    def read(self) -> tuple[int, int, int]:
        """Returns the event's count, time enabled in ns, and lost records (0 if not reported)."""
        data = os.read(self.fd, _READING.size)
        count, clock, lost = _READING.unpack(data.ljust(_READING.size, b"\0"))
        return count, clock, lost

    def close(self, epoll: select.epoll | None) -> None:
        if epoll is not None:
            epoll.unregister(self.fd)
        self.ring.close()
        os.close(self.fd)


class _LockLimitError(OSError):
    """Raised if the user cannot lock more memory: mmap(2) of the ring failed with ``EPERM``."""


class RecordEvents(EventPerCpu[_CpuEvent]):
    """One perf event per CPU.

    The constructor opens all events; on failure, it closes them and raises. The size of each ring
    is ``ring_bytes``, or by default :func:`plan_ring_bytes`. The size is halved repeatedly until
    the kernel allows that much memory to be locked. ``epoll`` wakes when a ring is half full.
    """

    def __init__(
        self, files: HostFiles, wanted: WantedRecords, ring_bytes: int | None, lose: LossSink
    ) -> None:
        super().__init__(files)
        self._wanted_records, self._extra = wanted, wanted.extra_flags
        self._lose = lose
        self._formats = _FORMAT_TIME_ENABLED | _FORMAT_LOST
        self.epoll = select.epoll()
        try:
            self._ring_bytes = ring_bytes or plan_ring_bytes(len(read_online_cpus(files)))
            for error in self.update().refused.values():
                raise error
        except _LockLimitError as error:
            self.close()
            raise HostError(
                f"{wanted.name} cannot be tracked: {error}",
                hint="raise kernel.perf_event_mlock_kb or RLIMIT_MEMLOCK (systemd: LimitMEMLOCK), "
                "or grant CAP_IPC_LOCK",
            ) from error
        except OSError as error:
            self.close()
            if error.errno in (errno.EPERM, errno.EACCES):
                raise get_privilege_error(f"following {wanted.name}", files) from error
            raise find_open_files_error(f"following {wanted.name}", error) or HostError(
                f"{wanted.name} cannot be tracked: {describe_error(error)}"
            ) from error

    def take(self) -> Iterator[tuple[int, bytes]]:
        """Drain the rings, yielding their data by CPU, and count lost records."""
        for cpu, event in self._events.items():
            data, was_full = event.ring.take()
            if was_full:
                if self._formats & _FORMAT_LOST:
                    self._count(cpu, event, event.read()[2])
                else:  # the count is in the next record, which may never be written
                    self._lose(RecordLoss.RING_FULL, cpu, 0)
            if data:
                yield cpu, data

    def note_lost_record(self, cpu: int, count: int) -> None:
        """Handle a record that reports lost records."""
        event = self._events.get(cpu)
        if event is None:
            self._lose(RecordLoss.RING_FULL, cpu, count)
            return
        event.lost_by_records += count
        self._count(cpu, event, event.lost_by_records)

    def follow(self) -> None:
        """Adapt to CPUs that came online or went offline. The caller must first drain the rings."""
        try:
            changes = self.update()
        except OSError as error:
            name = self._wanted_records.name
            _log.warning("%s on new CPUs cannot be tracked: %s", name, describe_error(error))
            return
        for cpu in changes.opened:
            self._lose(RecordLoss.CPU_CAME, cpu, 0)
        for cpu, refusal in changes.refused.items():
            name = self._wanted_records.name
            _log.warning("%s on CPU %d cannot be tracked: %s", name, cpu, refusal)

    def close(self) -> None:
        """Close descriptors and mappings; idempotent."""
        while self._events:
            self._events.popitem()[1].close(None)
        self.epoll.close()

    def _is_dead(self, cpu: int) -> bool:
        event = self._events[cpu]
        last_clock, event.clock = event.clock, event.read()[1]
        return event.clock == last_clock

    def _close_event(self, event: _CpuEvent) -> None:
        event.close(self.epoll)

    def _open_event(self, cpu: int) -> _CpuEvent:
        while True:
            attributes = PerfAttributes(
                COUNT_SW_DUMMY,
                sample_type=_SAMPLE_TIME,
                read_format=self._formats,
                flags=_BASE_FLAGS | self._wanted_records.flags | self._extra,
                wakeup=self._ring_bytes // 2,
                clock_id=time.CLOCK_BOOTTIME,
            )
            try:
                fd = open_perf_event(attributes, cpu=cpu)
                break
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if self._extra:
                    self._extra = 0
                elif self._formats & _FORMAT_LOST:
                    self._formats &= ~_FORMAT_LOST
                else:
                    raise
        try:
            self.epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            memory = PerfMemory(fd, self._ring_bytes)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EPERM:
                raise
            if self._ring_bytes <= mmap.PAGESIZE:
                raise _LockLimitError(
                    "this user has reached the locked-memory limit for perf events"
                ) from error
            self._ring_bytes //= 2  # locked-memory limit reached
            return self._open_event(cpu)
        largest = self._wanted_records.largest_bytes
        return _CpuEvent(fd, PerfRing(memory, self._ring_bytes, largest))

    def _count(self, cpu: int, event: _CpuEvent, total: int) -> None:
        if total > event.lost:
            self._lose(RecordLoss.RING_FULL, cpu, total - event.lost)
            event.lost = total


def plan_ring_bytes(cpus: int) -> int:
    """Returns the ring size per CPU: 512 KiB (about 5,000 records), but at most 8 MiB in total."""
    size = _MOST_RING_BYTES
    while size > _LEAST_RING_BYTES and size * cpus > _ALL_RINGS_BYTES:
        size //= 2
    return size
