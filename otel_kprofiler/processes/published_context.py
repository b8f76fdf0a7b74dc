"""Reads the context that a process publishes about itself.

OTEP 4719 (oteps/profiles/4719-process-ctx.md in the OpenTelemetry specification) defines the
format, version 2, and the reading protocol. A mapping with ``OTEL_CTX`` in its name starts with a
32-byte header in the host's byte order::

    0  signature "OTEL_CTX"    8  version (u32)      12  size of the payload (u32)
    16 published at (u64, boottime in ns, 0 during an update)    24  address of the payload
"""

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from otel_kprofiler.host import Access, HostFiles, parse_mappings, read_maps
from otel_kprofiler.otlp import ProcessContext, decode_process_context

CONTEXT_SIGNATURE: Final = b"OTEL_CTX"
CONTEXT_VERSION: Final = 2
CONTEXT_HEADER: Final = struct.Struct("=8sIIQQ")
MAX_PAYLOAD_BYTES: Final = 16 * 1024
_NAMES: Final = ("[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]", "/memfd:OTEL_CTX")
_TRIES: Final = 4
_UPDATE_S: Final = 0.0002  # an update takes a few microseconds unless preempted
_END_OF_USER_SPACE: Final = 1 << 63


class Published(NamedTuple):
    """A process context: header address, timestamp (changed by every update), size and content."""

    address: int
    published_at_ns: int
    size: int
    context: ProcessContext


def parse_context_addresses(maps: bytes) -> list[int]:
    """Returns the start addresses of mappings in ``/proc/PID/maps`` that may contain a context."""
    if CONTEXT_SIGNATURE not in maps:
        return []
    return [
        mapping.start
        for mapping in parse_mappings(maps)
        if mapping.path.startswith(_NAMES) and not mapping.is_executable
    ]


def read_process_context(pid: int, files: HostFiles | None = None) -> ProcessContext | None:
    """Returns the context of a process; None if it has no readable context.

    Reads ``/proc/PID/maps`` and ``/proc/PID/mem``, which requires permission to trace the process
    (the same user, or CAP_SYS_PTRACE). Never raises, regardless of what the process does.
    """
    files = files or Access()
    try:
        with opened(files, f"/proc/{pid}/mem") as memory:
            published, _ = find_context(files, pid, memory, None)
    except OSError:
        return None
    return published.context if published else None


def find_context(
    files: HostFiles, pid: int, memory: int, last: Published | None
) -> tuple[Published | None, bool]:
    """Finds a process's context, at its previous address or at a new address.

    ``memory`` is a descriptor of ``/proc/PID/mem``. ``last`` is the most recently read context, if
    any. Returns the context, and whether the process has mapped memory for a context: None and True
    if it has withdrawn the context, or is writing it. Raises ``OSError`` if the mappings cannot be
    read.
    """
    if last:
        published = _read(memory, last.address, last)
        if published:
            return published, True
    addresses = parse_context_addresses(read_maps(files, pid))
    for address in addresses:
        published = _read(memory, address, None)
        if published:
            return published, True
    return None, bool(addresses)


def _read(memory: int, address: int, last: Published | None) -> Published | None:
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_UPDATE_S)
        try:
            signature, version, size, at_ns, payload_at = _header(memory, address)
            if signature != CONTEXT_SIGNATURE or version != CONTEXT_VERSION:
                return None
            if last and last.published_at_ns == at_ns:
                return last
            if not at_ns or not 0 < size <= MAX_PAYLOAD_BYTES or payload_at >= _END_OF_USER_SPACE:
                continue
            payload = os.pread(memory, size, payload_at)
            if _header(memory, address)[3] == at_ns and len(payload) == size:
                return Published(address, at_ns, size, decode_process_context(payload))
        except (OSError, ValueError, struct.error):
            continue  # unmapped, changed while being read, or invalid
    return None


def _header(memory: int, address: int) -> tuple[bytes, int, int, int, int]:
    if address >= _END_OF_USER_SPACE:
        raise ValueError("the address of the context is not in user space")
    fields: tuple[bytes, int, int, int, int] = CONTEXT_HEADER.unpack(
        os.pread(memory, CONTEXT_HEADER.size, address)
    )
    return fields


@contextmanager
def opened(files: HostFiles, path: str) -> Iterator[int]:
    """Opens a file for reading, as a context manager. Raises ``OSError``."""
    fd = files.open_fd(path)
    try:
        yield fd
    finally:
        os.close(fd)
