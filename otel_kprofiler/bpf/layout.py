"""Defines the structs shared with sampler.bpf.c and speedups/records.c; change them together."""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, NoReturn

from otel_kprofiler.bpf.locks import LOCK_PHASE
from otel_kprofiler.bpf.map_calls import MMAPABLE, MapShape
from otel_kprofiler.bpf.mapped_words import MappedWords
from otel_kprofiler.bpf.ring import next_record
from otel_kprofiler.bpf.spans import SpanLayout
from otel_kprofiler.bpf.task_offsets import ProgramOffsets
from otel_kprofiler.bpf.thread_contexts import PLACE_BYTES, parse_thread_context
from otel_kprofiler.bpf.wait_maps import (
    THREAD_ENDED,
    WAIT_END_BYTES,
    WAIT_ENDED,
    WaitRecord,
    WaitRecords,
    parse_threads,
    parse_wait_end,
)
from otel_kprofiler.model import (
    KERNEL_SIDE,
    KINDS,
    MAX_FRAMES,
    PYTHON_SIDE,
    STATUS_BY_END,
    STATUS_BY_PYTHON_END,
    USER_SIDE,
    Collected,
    LockHolder,
    LockWait,
    ProfileKind,
    RawSample,
    SideKind,
    SpanLink,
    StackStatus,
    name_lock,
    python_stack_bytes,
    user_stack_bytes,
)
from otel_kprofiler.speedups import parse_samples

RECORD_VERSION: Final = 6
"""Version of ``struct record``, which is stored in recordings."""
MAX_INTERRUPT_RANGES: Final = 4

KERNEL_STACKS: Final = 1
USER_STACKS: Final = 2
KEEP_IDLE: Final = 4
ONLY_TARGETS: Final = 8
START_TIME: Final = 16
SPAN_LINKS: Final = 32
NAMESPACE: Final = 64
DESCENDANTS: Final = 128
A64: Final = 256
ONLY_COMMS: Final = 512
ONLY_CGROUPS: Final = 1024
PROGRAM_AND_OWNER: Final = 2048
THREAD_CONTEXTS: Final = 4096
COMM_BYTES: Final = 16
MAX_CGROUP_LEVEL: Final = 15
FIRST_EVENT: Final = 16
"""Number of the first event's sample kind in records. Further events are numbered consecutively."""

_NO_SPAN: Final = (None, b"")
_NO_PROGRAM: Final = (0,) * len(ProgramOffsets._fields)
_NO_SPANS: Final = (0,) * len(SpanLayout._fields)
_CONFIG: Final = struct.Struct(
    f"={15 + len(_NO_PROGRAM) + len(_NO_SPANS) + 2 * MAX_INTERRUPT_RANGES}Q"
)
_RECORD: Final = struct.Struct("=8Q4I2H3hHI16sI4x")
_HOLDER: Final = struct.Struct("=I")  # the last field
RECORD_HEADER_BYTES: Final = _RECORD.size
STACK_BYTES: Final = MAX_FRAMES * 8
_USER_STACK_BYTES: Final = 1536
"""Maximum size of a user stack in bytes: head, 15 mappings, MAX_FRAMES words."""
_PYTHON_STACK_BYTES: Final = 2048
_CONTEXT_BYTES: Final = 1152
_RECORD_BYTES: Final = (
    RECORD_HEADER_BYTES + STACK_BYTES + _USER_STACK_BYTES + _PYTHON_STACK_BYTES + _CONTEXT_BYTES
)
_NOT_COLLECTED: Final = -32768
_NO_OWNER: Final = 0xFFFFFFFF
_OWN_KINDS: Final = {kind.number: kind for kind in KINDS}

_CPU_LINE_BYTES: Final = 128
_CPU_LINE_WORDS: Final = _CPU_LINE_BYTES // 8
_COUNTERS: Final = 6
_IN_FLIGHT_WORD: Final = 6
_MISSED_WORD: Final = 7
_BUSY_WORD: Final = 8
_SCRATCH_STATE_BYTES: Final = 64
"""Size in bytes of the fields of ``struct scratch`` after ``record``."""


class ProgramConfig(NamedTuple):
    """Settings of the sampler; mirrors ``struct config``, whose comments describe the fields."""

    flags: int
    min_age_ns: int
    leader_offset: int
    start_offset: int
    wakeup_bytes: int
    stack_bytes: int
    interrupt_ranges: Sequence[tuple[int, int]]
    namespace_device: int = 0
    namespace_inode: int = 0
    parent_offset: int = 0
    tgid_offset: int = 0
    comm_offset: int = 0
    cgroup_levels: int = 0
    period_ns: int = 0
    regular_since_ns: int = 0
    thread_pointer: int = 0
    program: ProgramOffsets | None = None
    spans: SpanLayout | None = None

    def pack(self) -> bytes:
        """Packs the struct; a half-open range becomes a start and a size."""
        words = [word for start, end in self.interrupt_ranges for word in (start, end - start)]
        words += [0] * (2 * MAX_INTERRUPT_RANGES - len(words))
        return _CONFIG.pack(
            *self[:6],
            *self[7:-2],
            *(self.program or _NO_PROGRAM),
            *(self.spans or _NO_SPANS),
            *words,
        )


MAPS: Final = {
    "config": MapShape(2, 4, _CONFIG.size),
    "cpu_lines": MapShape(2, 4, _CPU_LINE_BYTES, MMAPABLE),
    "reader": MapShape(2, 4, 16, MMAPABLE),
    "thread_contexts": MapShape(1, 4, PLACE_BYTES),
    "context_slots": MapShape(2, 4, 8),
    "targets": MapShape(1, 4, 1),
    "roots": MapShape(1, 4, 1),
    "comms": MapShape(1, COMM_BYTES, 1),
    "cgroups": MapShape(1, 8, 1),
    "scratch": MapShape(6, 4, _RECORD_BYTES + _SCRATCH_STATE_BYTES),
    "ring": MapShape(27, 0, 0),
}


class ProgramCounts(NamedTuple):
    """Event counters since the BPF program was loaded, summed over CPUs (``struct cpu_line``)."""

    taken: int
    ring_full: int
    idle: int
    target: int
    age: int
    empty: int
    missed: int
    busy_ns: int = 0


class CpuLines(MappedWords):
    """The mapped array of ``struct cpu_line``; reads require no system call.

    Reading through bpf(2) would miss samples, because the kernel runs no BPF program on a CPU that
    is executing the call.

    Args:
        cpus: number of CPUs; each event has a line of counters for each CPU.
        events: number of events other than cpu-clock.
    """

    def __init__(self, map_fd: int, cpus: int, events: int = 0) -> None:
        self._cpus, self._events = cpus, events
        super().__init__(map_fd, cpus * (1 + events) * _CPU_LINE_WORDS)

    def parse(self, lines: bytes) -> tuple[list[ProgramCounts], bool]:
        """Sums each event's counters in a copy of the array; see :func:`parse_counts`."""
        size = self._cpus * _CPU_LINE_BYTES
        parts = [parse_counts(lines[at : at + size]) for at in range(0, len(lines), size)]
        return [counts for counts, _ in parts], all(at_rest for _, at_rest in parts)

    def runs(self, cpu: int, event: int = 0) -> int:
        """Returns how often an event's program has run to completion on a CPU."""
        first = (event * self._cpus + cpu) * _CPU_LINE_WORDS
        # Sum of taken and omitted samples. Skips ring_full, whose samples also count as taken.
        return self.words[first] + sum(self.words[first + 2 : first + _COUNTERS])

    def in_flight(self) -> list[int]:
        """Returns the time of each CPU's unfinished record; 0 if none, 1 if it has no time yet."""
        return self.words[_IN_FLIGHT_WORD::_CPU_LINE_WORDS].tolist()


NO_WAKEUP_NS: Final = (1 << 64) - 1
"""A start time after that of any process, so that no record wakes the reader."""
_READER_WORDS: Final = 2


class ReaderFlag(MappedWords):
    """The mapped ``struct reader``, which selects the records that wake the reader.

    Accesses do not require system calls. A ring filled to its wake-up mark always wakes the reader.
    """

    def __init__(self, map_fd: int) -> None:
        super().__init__(map_fd, _READER_WORDS, writable=True)
        self.wake_since(NO_WAKEUP_NS)

    def wake_since(self, start_time_ns: int) -> None:
        """Wake the reader for records from processes that started at or after ``start_time_ns``.

        Pass 0 to select all records, or :data:`NO_WAKEUP_NS` to select none.
        """
        self.words[0] = start_time_ns

    def newest_start_ns(self) -> int:
        """Returns the latest start time (boottime) of any process with a record."""
        return self.words[1]


def parse_counts(lines: bytes) -> tuple[ProgramCounts, bool]:
    """Returns the counters summed over all CPUs, and whether no record was being written."""
    words = memoryview(lines).cast("Q").tolist()  # a list is added up faster than a view
    places = (*range(_COUNTERS), _MISSED_WORD, _BUSY_WORD)
    totals = (sum(words[place::_CPU_LINE_WORDS]) for place in places)
    return ProgramCounts(*totals), not any(words[_IN_FLIGHT_WORD::_CPU_LINE_WORDS])


def number_kinds(events: Sequence[ProfileKind]) -> dict[int, ProfileKind]:
    """Returns all sample kinds, including those for ``events``, by their number in records."""
    return {**_OWN_KINDS, **dict(enumerate(events, FIRST_EVENT))}


def parse_records(
    chunk: bytes,
    stack_limit: int = STACK_BYTES,
    waits: WaitRecords | None = None,
    kinds: dict[int, ProfileKind] = _OWN_KINDS,
) -> list[RawSample]:
    """Parses all samples in a chunk of the ring. Appends wait records to ``waits``.

    A kernel stack of ``stack_limit`` bytes is marked as truncated, because frames may be missing.
    ``kinds`` is a result of :func:`number_kinds`. Raises ``ValueError`` if the chunk is malformed,
    or contains samples of an unknown kind.
    """
    return _Parser(stack_limit, waits or WaitRecords([], []), kinds).parse(chunk)


class _Parser:
    """Parses the records in a chunk; the arguments are those of :func:`parse_records`."""

    def __init__(self, stack_limit: int, waits: WaitRecords, kinds: dict[int, ProfileKind]) -> None:
        self._stack_limit = stack_limit
        self._waits = waits
        self._kinds = kinds
        # Most stacks in a chunk repeat. If they were not shared, a backlog would use far more
        # memory.
        self._shared: dict[bytes, bytes] = {}

    def parse(self, chunk: bytes) -> list[RawSample]:
        samples: list[RawSample] = []
        shared, kinds, limit = self._shared, self._kinds, self._stack_limit
        at = 0
        while True:
            if parse_samples:
                at = parse_samples(chunk, at, samples, shared, kinds, _collect, limit, RawSample)
            if at >= len(chunk):
                return samples
            start, end, at = next_record(chunk, at)
            if end:
                sample = self._parse(chunk, start, end)
                if sample is not None:
                    samples.append(sample)

    def _parse(self, chunk: bytes, start: int, end: int) -> RawSample | None:
        """Returns the sample in a record; None if the record was added to the wait records."""
        if end - start < RECORD_HEADER_BYTES:
            raise ValueError(f"the record at byte {start} is too short")
        (
            time_ns, start_time_ns, cgroup_id, trace_high, trace_low, span_id, value,
            stack_start, tgid, tid, exec_id, owner, cpu, number,
            kernel_bytes, user_bytes, python_bytes,
            phase, labels, comm, context_bytes,
        ) = _RECORD.unpack_from(chunk, start)  # fmt: skip
        kernel = start + RECORD_HEADER_BYTES
        stacks_end = end - COMM_BYTES if phase >= LOCK_PHASE else end
        if phase == THREAD_ENDED:
            self._waits.ended.extend(parse_threads(chunk[kernel:end], time_ns))
            return None
        wait_end = parse_wait_end(chunk, kernel, end) if phase == WAIT_ENDED else None
        kernel += WAIT_END_BYTES if wait_end else 0
        user = kernel + kernel_bytes if kernel_bytes > 0 else kernel
        python = user + user_bytes if user_bytes > 0 else user
        last = python + python_bytes if python_bytes > 0 else python
        if last + context_bytes != stacks_end:
            raise ValueError(f"the length of the record at byte {start} does not match its stacks")
        user_damaged = user_bytes > 0 and user_stack_bytes(chunk, user) != user_bytes
        if user_damaged or (python_bytes > 0 and python_stack_bytes(chunk, python) != python_bytes):
            side = "user" if user_damaged else "Python"
            raise ValueError(f"the {side} stack in the record at byte {start} is malformed")
        stacks: tuple[bytes, ...] = ()
        if kernel_bytes != _NOT_COLLECTED:
            stacks = (chunk[kernel:user],)
        if user_bytes != _NOT_COLLECTED:
            stacks = (*stacks, chunk[user:python])
        if python_bytes > 0:
            stacks = (*stacks, chunk[python:last])
        has_span = span_id or context_bytes
        link, context = (
            _find_span(trace_high, trace_low, span_id, chunk[last:stacks_end])
            if has_span
            else _NO_SPAN
        )
        lock = _find_lock(phase, chunk, start, stacks_end) if phase >= LOCK_PHASE else None
        fields = (
            self._kinds.get(number) or _refuse_kind(number),
            value,
            time_ns,
            cpu,
            tgid,
            tid,
            start_time_ns or None,
            cgroup_id,
            comm[: comm.find(b"\0")],
            _collect(
                kernel_bytes >= self._stack_limit if kernel_bytes > 0 else kernel_bytes,
                chunk[user] if user_bytes > 0 else user_bytes,
                chunk[python] if python_bytes > 0 else -1,
            ),
            tuple([self._shared.setdefault(words, words) for words in stacks]),
            link,
            labels,
            lock,
            exec_id,
            owner if owner != _NO_OWNER else None,
            stack_start,
            self._shared.setdefault(context, context),
        )
        sample: RawSample = tuple.__new__(
            RawSample, fields
        )  # takes a third as long as RawSample(…)
        if phase and lock is None:
            self._waits.waits.append(WaitRecord(sample, wait_end))
            return None
        return sample


def _find_lock(phase: int, chunk: bytes, start: int, end: int) -> LockWait:
    """Parses the lock wait in a record. The lock holder's name follows the stacks, at ``end``."""
    (tid,) = _HOLDER.unpack_from(chunk, start + RECORD_HEADER_BYTES - _HOLDER.size)
    comm = chunk[end : end + COMM_BYTES].partition(b"\0")[0]
    return LockWait(name_lock(phase - LOCK_PHASE), LockHolder(tid, comm) if tid else None)


def _refuse_kind(number: int) -> NoReturn:
    raise ValueError(f"unknown sample kind {number}")


def _find_span(
    trace_high: int, trace_low: int, span_id: int, context: bytes
) -> tuple[SpanLink | None, bytes]:
    """Returns a record's span and attributes; the attributes are empty without a thread context."""
    if context:
        return parse_thread_context(context)
    if not (trace_high or trace_low):
        return _NO_SPAN
    trace_id = (trace_high << 64 | trace_low).to_bytes(16, "big")
    return SpanLink(trace_id, span_id.to_bytes(8, "big")), b""


@lru_cache(256)
def _collect(kernel: int, user: int, python: int) -> Collected:
    """Returns the kinds of the collected stacks, each with its outcome.

    Args:
        kernel: whether the kernel stack is truncated; a negative ``errno``; or not collected.
        user: number of the user stack's end; a negative ``errno``; or not collected.
        python: number of the Python stack's end; -1 if not collected.
    """
    sides: list[tuple[SideKind, StackStatus]] = []
    if kernel != _NOT_COLLECTED:
        sides.append((KERNEL_SIDE, StackStatus(int(kernel))))
    if user != _NOT_COLLECTED:
        sides.append((USER_SIDE, STATUS_BY_END[user] if user >= 0 else StackStatus(user)))
    if python >= 0:
        sides.append((PYTHON_SIDE, STATUS_BY_PYTHON_END[python]))
    return tuple(sides)
