"""Writes ``record --raw`` files: raw samples, and the data needed to replay them on any host."""

import contextlib
from collections.abc import Iterator
from typing import Final, Self

from otel_kprofiler.cli.output import refusal
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import ExportError
from otel_kprofiler.host import Access
from otel_kprofiler.model import (
    KINDS,
    NO_WAITS,
    Attributes,
    Frame,
    ProcessKey,
    Resource,
    WaitTotals,
    Window,
)
from otel_kprofiler.recording import (
    CodeNameCollector,
    RecordingFacts,
    RecordingWriter,
    UserNameCollector,
)
from otel_kprofiler.sampling import EbpfSampler
from otel_kprofiler.symbols import NamedAddress
from otel_kprofiler.tracking import IteratedKallsyms

_ENDED: Final = ProcessKey((1 << 32) - 1, None)
"""Key of the Resource shared by all processes that exited before their first sample. No process has
this pid (``PID_MAX_LIMIT``, include/linux/threads.h)."""


class RawOutput:
    """Writes a raw recording. Leaving the context before :meth:`finish` deletes the file.

    The constructor copies the host's kernel symbol files, so call it before sampling starts. Raises
    ``ExportError`` if the file cannot be written.
    """

    def __init__(self, path: str, access: Access, *, force: bool) -> None:
        self._path = path
        try:
            self._writer = RecordingWriter(path, replace=force)
        except OSError as error:
            raise refusal(path, "--raw", error) from error
        self._finished = False
        self._since_unix_ns = self._until_unix_ns = 0
        self._processes: dict[ProcessKey, Attributes] = {}
        self._keys: dict[Resource, ProcessKey] = {}
        self._waits: dict[ProcessKey, WaitTotals] = {}
        self._threshold_ns = 0
        self._names = UserNameCollector()
        self._code = CodeNameCollector()
        try:
            with self._convert_errors():
                self._writer.capture(IteratedKallsyms(access))
        except BaseException:
            self._writer.abandon()
            raise

    def add_records(self, data: bytes, complete_until_ns: int) -> None:
        """Append raw records from the sampler's ring buffer."""
        with self._convert_errors():
            self._writer.add_records(data, complete_until_ns)

    def add_event(self, stream: str, time_ns: int, payload: bytes) -> None:
        """Append an event to a stream of symbol changes."""
        with self._convert_errors():
            self._writer.add_event(stream, time_ns, payload)

    def add_process(self, key: ProcessKey, resource: Resource) -> None:
        """Record a process's Resource."""
        self._processes[key] = resource.attributes
        self._keys[resource] = key

    def add_window(self, window: Window) -> None:
        """Record the start and end of a window, the names of its frames, and its wait totals."""
        self._since_unix_ns = self._since_unix_ns or window.start_unix_ns
        self._until_unix_ns = window.end_unix_ns
        self._names.add(window)
        for profile in window.profiles:
            self._threshold_ns = profile.threshold_ns or self._threshold_ns
            for resource, _, totals in profile.resources:
                if totals:
                    process = self._keys.get(resource, _ENDED)
                    self._waits[process] = self._waits.get(process, NO_WAITS).plus(totals)

    def add_frame(self, frame: Frame) -> None:
        """Record the name of a native frame that Python frames replace."""
        self._names.add_frame(frame)

    def add_code(self, process: ProcessKey, address: int, at_ns: int, named: NamedAddress) -> None:
        """Record the name of JIT-compiled code."""
        self._code.add(process, address, at_ns, named)

    def finish(self, clock: Clock, sampler: EbpfSampler) -> None:
        """Complete the file after sampling has stopped."""
        offset_ns = clock.to_unix_ns(0)
        facts = RecordingFacts(
            offset_ns=offset_ns,
            period_ns=sampler.period_ns,
            stack_limit=sampler.stack_limit,
            until_ns=max(0, self._until_unix_ns - offset_ns),
            counts=sampler.counts(),
            since_ns=max(0, self._since_unix_ns - offset_ns),
            waits=self._waits,
            wait_threshold_ns=self._threshold_ns,
            events=sampler.kinds[len(KINDS) :],
        )
        with self._convert_errors():
            self._writer.add_resources(self._processes)
            self._writer.add_user_files(sampler.user_files)
            self._writer.add_python_codes(sampler.python_codes)
            self._writer.add_user_names(self._names, self._code)
            self._writer.finish(facts)
        self._finished = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            self._writer.abandon()

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ExportError(
                f"cannot write {self._path}: {error.strerror}",
                hint="set --raw to a path on a disk with free space",
            ) from error
