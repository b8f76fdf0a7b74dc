"""Tracks what processes publish about themselves, in the environment and in process contexts.

Published attributes are unverified claims by the process.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from functools import partial
from typing import Final, NamedTuple

from otel_kprofiler.bpf import ThreadContexts
from otel_kprofiler.host import TICK_NS, HostFiles, ProcessStat, read_stat
from otel_kprofiler.model import Attributes, AttributeValue, LabelSet, ProcessKey
from otel_kprofiler.otlp import PROGRAM, ProcessContext
from otel_kprofiler.processes.hanging_processes import HangingProcesses
from otel_kprofiler.processes.programs import read_program
from otel_kprofiler.processes.published_context import Published, find_context, opened
from otel_kprofiler.processes.self_profiled import SELF_PROFILED, TARGET, profiles_itself
from otel_kprofiler.processes.service_variables import read_environment
from otel_kprofiler.processes.thread_contexts import ANNOUNCED, PublishedThreads, decode_context
from otel_kprofiler.processes.unread_contexts import UnreadContexts
from otel_kprofiler.text import decode_name

MAX_VALUES: Final = 128
"""Maximum number of values used from a context, including list items."""
RESERVED: Final = ("container.", "host.", "k8s.", "otel_kprofiler.", "systemd.")
"""Prefixes of attribute names that are never accepted from the process itself."""
_FIRST_LOOK_S: Final = 0.5
_BATCH_S: Final = 0.5
_ANSWER_TIMEOUT_S: Final = 0.1
_SCAN_SHARE: Final = 200
_MAX_PAUSE_S: Final = 30.0
_CAPACITY: Final = 8192
_MAX_KNOWN_BYTES: Final = 16 * 1024 * 1024

_THREAD: Final = "kprofiler-contexts"

_log = logging.getLogger(__name__)


class _Program(NamedTuple):
    """Facts about a process that was read, valid until it executes another program.

    Attributes:
        executable: the name of the executable file.
        has_variables: whether the environment may contain service attributes.
        first_read_s: when the process was first read, in monotonic time.
        not_before_s: when the process may be read again.
        read_s: when its mappings were last read.
        mapped_bytes: the size of its virtual memory before that; 0 if its mappings must be read
            again in any case.
    """

    executable: str
    has_variables: bool
    first_read_s: float
    not_before_s: float
    read_s: float
    mapped_bytes: int


class Claims(NamedTuple):
    """The attributes that a process publishes about itself.

    Attributes:
        published: the process context; None if it is absent or cannot be read.
        environment: the service attributes from the environment (omitted if the context contains
            the service name), and the program that an interpreter runs.
    """

    published: Published | None
    environment: Attributes

    @property
    def attributes(self) -> Attributes:
        """Returns all attributes. The context takes precedence over the environment."""
        if self.published is None:
            return self.environment
        context = self.published.context
        mark = {SELF_PROFILED: True} if TARGET in context.extra else {}
        return {**self.environment, **context.resource, **mark}

    @property
    def size(self) -> int:
        """Returns the approximate size of the attributes, in bytes."""
        size = sum(len(key) + len(str(value)) for key, value in self.environment.items())
        return size + (self.published.size if self.published else 0)


def filter_claims(resource: Attributes) -> dict[str, AttributeValue]:
    """Returns the accepted attributes: no reserved names, and at most :data:`MAX_VALUES` values."""
    claims: dict[str, AttributeValue] = {}
    left = MAX_VALUES
    for key, value in resource.items():
        left -= len(value) if isinstance(value, tuple) else 1
        if left < 0:
            break
        if not key.startswith(RESERVED):
            claims[key] = value
    return claims


def _find_pause_s(known_s: float) -> float:
    """Returns the pause after a read. Most programs publish a context soon after their start."""
    return min(known_s / 2, _MAX_PAUSE_S)


class ProcessContexts:
    """Reads the contexts and environments of sampled processes. Thread-safe.

    A process's memory may be backed by a hung file system, so dedicated threads read it, and
    callers wait only briefly; see :class:`HangingProcesses`. Processes that exit within
    ``first_look_s`` seconds after :meth:`expect` are not read. ``answer_timeout_s`` limits how long
    :meth:`look` waits.
    """

    def __init__(
        self,
        files: HostFiles,
        *,
        first_look_s: float = _FIRST_LOOK_S,
        answer_timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> None:
        self._files = files
        self._first_look_s = first_look_s
        self._answer_timeout_s = answer_timeout_s
        self._known: OrderedDict[ProcessKey, Claims] = OrderedDict()
        self._known_bytes = 0
        self._programs: dict[ProcessKey, _Program] = {}
        self._expected: deque[tuple[float, ProcessKey]] = deque(maxlen=_CAPACITY)
        self._asked: deque[ProcessKey] = deque()
        self._stack_starts: OrderedDict[ProcessKey, int] = OrderedDict()
        self._gone: set[ProcessKey] = set()  # exited since the last call to look()
        self._changed = threading.Condition()
        self._busy = False
        self._late = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._calls = HangingProcesses(files, _THREAD)
        self._threads: PublishedThreads | None = None
        self.unread = UnreadContexts(files)

    def follow_threads(self, reader: ThreadContexts) -> None:
        """Register processes that publish thread contexts; call before the first sample."""
        self._threads = PublishedThreads(self._files, reader, self.unread)

    def decode(self, key: ProcessKey, context: bytes, *, has_span: bool) -> LabelSet:
        """Returns the attributes of a sample with a thread context; see :func:`decode_context`."""
        if self._threads is None:
            return decode_context(context, (), has_span=has_span)
        return self._threads.decode(key, context, has_span=has_span)

    def expect(self, key: ProcessKey, stack_start: int = 0) -> None:
        """Schedule the first read of a newly sampled process.

        ``stack_start`` identifies the sampled program, as in :class:`RawSample`; 0 if unknown. Once
        the process executes another program, it is treated as exited.
        """
        if not key.tgid or key.start_time_ns is None:
            return
        with self._changed:
            if self._closed or (self._thread is None and not self._start()):
                return
            self._programs.pop(key, None)
            if stack_start:
                self._stack_starts[key] = stack_start
                if len(self._stack_starts) > _CAPACITY:
                    self._stack_starts.popitem(last=False)
            self._expected.append((time.monotonic() + self._first_look_s, key))
            if len(self._expected) == 1:  # otherwise, the thread will wake up anyway
                self._changed.notify_all()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # thread limit reached: samples have no contexts
            self._closed = True
            _log.warning("process contexts will not be read: %s; raise the thread limit", error)
            return False
        self._thread = thread
        return True

    def look(self, keys: Collection[ProcessKey]) -> Mapping[ProcessKey, Attributes]:
        """Returns the attributes that processes currently publish about themselves.

        The last attributes of an exited process are returned once and then dropped.
        """
        with self._changed:
            if self._thread is not None and not self._asked:
                self._asked.extend(
                    key for key in keys if key.start_time_ns is not None and key not in self._gone
                )
                self._gone.clear()
                self._changed.notify_all()
            last = self._get(keys)
            answered = self._changed.wait_for(
                lambda: not self._asked and not self._busy, self._answer_timeout_s
            )
            if not answered and not self._late:
                _log.info(
                    "process contexts were not read in time; they will be added in a later window"
                )
            self._late = not answered
            answer = {key: published for key, published in last.items() if key in self._gone}
            answer |= self._get(keys)
        return {key: published.attributes for key, published in answer.items()}

    def _get(self, keys: Collection[ProcessKey]) -> dict[ProcessKey, Claims]:
        return {key: published for key in keys if (published := self._known.get(key))}

    def close(self) -> None:
        """Stop the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._calls.stop()

    def _run(self) -> None:
        while keys := self._next():
            for key in keys:
                if not self._is_due(key):
                    self._keep(key, self._known.get(key))
                elif not self._calls.call(key, partial(self._renew, key)) and self._has_ended(key):
                    self._forget(key)
                    self._keep(key, None)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _renew(self, key: ProcessKey) -> None:
        """Read a process's attributes. Runs in a separate thread, because the read may hang."""
        claims = None
        try:
            claims = self._read_claims(key)
        except (FileNotFoundError, ProcessLookupError):
            self._forget(key)
        except OSError:
            pass  # not permitted
        self._keep(key, claims)

    def _forget(self, key: ProcessKey) -> None:
        self._gone.add(key)
        self._programs.pop(key, None)
        if self._threads:
            self._threads.release(key)

    def _has_ended(self, key: ProcessKey) -> bool:
        try:
            self._check(key)
        except ProcessLookupError:
            return True
        return False

    def _keep(self, key: ProcessKey, claims: Claims | None) -> None:
        with self._changed:
            last = self._known.pop(key, None)
            self._known_bytes -= last.size if last else 0
            if claims:
                self._known[key] = claims
                self._known_bytes += claims.size
            while len(self._known) > _CAPACITY or self._known_bytes > _MAX_KNOWN_BYTES:
                self._known_bytes -= self._known.popitem(last=False)[1].size

    def _next(self) -> list[ProcessKey]:
        """Waits for processes that are due to be read; returns an empty list after closing."""
        with self._changed:
            while not self._closed:
                keys, now = [*self._asked], time.monotonic()
                self._asked.clear()
                while self._expected and self._expected[0][0] <= now:
                    keys.append(self._expected.popleft()[1])
                if keys:
                    self._busy = True
                    return keys
                wait_s = self._expected[0][0] - now if self._expected else None
                # Processes start in bursts, so one wakeup reads all processes that are due.
                self._changed.wait(wait_s and max(wait_s, _BATCH_S))
        return []

    def _is_due(self, key: ProcessKey) -> bool:
        program = self._programs.get(key)
        return (
            program is None or self._is_published(key) or time.monotonic() >= program.not_before_s
        )

    def _is_published(self, key: ProcessKey) -> bool:
        claims = self._known.get(key)
        return claims is not None and claims.published is not None

    def _read_claims(self, key: ProcessKey) -> Claims | None:
        """Raises ``ProcessLookupError`` if the process is no longer the sampled program."""
        mapped_bytes = 0
        if not self._is_published(key):
            mapped_bytes = self._check(key).mapped_bytes
            if self._maps_as_before(key, mapped_bytes):
                return self._known.get(key)
        try:
            with opened(self._files, f"/proc/{key.tgid}/mem") as memory:
                return self._read(key, memory, mapped_bytes)
        except PermissionError:  # not fatal: reading the environment requires fewer privileges
            self.unread.deny(key)
            return self._read(key, None, mapped_bytes)

    def _maps_as_before(self, key: ProcessKey, mapped_bytes: int) -> bool:
        """Returns whether to assume that a process has mapped no context; schedules the next look.

        A context adds a mapping, and reading all mappings is slow. They are read from time to time,
        because the size remains the same if another mapping is removed.
        """
        program, now_s = self._programs.get(key), time.monotonic()
        if program is None or not mapped_bytes or mapped_bytes != program.mapped_bytes:
            return False
        if now_s >= program.read_s + _MAX_PAUSE_S:
            return False
        pause_s = _find_pause_s(now_s - program.first_read_s)
        until_s = min(now_s + pause_s, program.read_s + _MAX_PAUSE_S)
        self._programs[key] = program._replace(not_before_s=until_s)
        return True

    def _read(self, key: ProcessKey, memory: int | None, mapped_bytes: int) -> Claims | None:
        started = time.monotonic()
        last_claims, program = self._known.get(key), self._programs.get(key)
        last = last_claims.published if last_claims else None
        published, is_mapped = None, True
        if memory is not None:
            published, is_mapped = find_context(self._files, key.tgid, memory, last)
        if is_mapped:
            mapped_bytes = 0  # the context can change although the size of the memory does not
        if published and published is last:
            self._check_and_follow(key, memory, published)
            return last_claims
        accepted = self._accept(key, published) if published else None
        claims = Claims(accepted, {})
        has_variables = not program or program.has_variables
        if has_variables and "service.name" not in claims.attributes:
            claims = Claims(accepted, read_environment(self._files, key.tgid))
            has_variables = bool(claims.environment)
        executable = program.executable if program else self._read_executable(key.tgid)
        if name := read_program(self._files, key.tgid, executable):
            claims = Claims(accepted, {**claims.environment, PROGRAM: name})
        self._check_and_follow(key, memory, published)
        # Processes that are slow to read, such as those with many mappings, are read less often.
        first_s = program.first_read_s if program else started
        took_s = time.monotonic() - started
        pause_s = max(took_s * _SCAN_SHARE, _find_pause_s(started - first_s))
        if len(self._programs) > _CAPACITY:
            self._programs.clear()
        self._programs[key] = _Program(
            executable, has_variables, first_s, started + pause_s, started, mapped_bytes
        )
        return claims if claims.attributes or accepted else None

    def _read_executable(self, pid: int) -> str:
        try:
            link = self._files.read_link(f"/proc/{pid}/exe")
        except OSError:  # not permitted: fall back to the main thread's name
            stat = read_stat(self._files, pid)
            return decode_name(stat.name) if stat else ""
        return link.removesuffix(" (deleted)").rpartition("/")[2]

    def _accept(self, key: ProcessKey, published: Published) -> Published:
        claims = filter_claims(published.context.resource)
        extra = published.context.extra
        proven = profiles_itself(self._files, key.tgid, extra)
        kept = {name: extra[name] for name in ANNOUNCED if name in extra}
        kept |= {TARGET: extra[TARGET]} if proven else {}
        return published._replace(context=ProcessContext(claims, kept))

    def _check_and_follow(
        self, key: ProcessKey, memory: int | None, published: Published | None
    ) -> None:
        # A descriptor stays bound to the opened process, and other files are read by process id, so
        # a single check after all reads covers them.
        stat = self._check(key)
        if self._threads and memory is not None:
            extra = published.context.extra if published else {}
            self._threads.update(key, stat.stack_start, extra, memory)

    def _check(self, key: ProcessKey) -> ProcessStat:
        """Raises ``ProcessLookupError`` if the process has exited or called execve(2)."""
        stat = read_stat(self._files, key.tgid)
        if stat is None or stat.start_ticks != (key.start_time_ns or 0) // TICK_NS:
            raise ProcessLookupError(f"process {key.tgid} has exited")
        expected = self._stack_starts.get(key)
        if expected and stat.stack_start and stat.stack_start != expected:
            raise ProcessLookupError(f"process {key.tgid} has executed another program")
        return stat
