"""Reads this process's thread contexts to find spans that the sampler cannot read directly.

Spans are unreadable if their class is not the SDK's, or if they are active in an interpreter whose
objects the sampler cannot traverse (:mod:`.span_path`). Reading thread contexts of this process
requires neither a process context nor privileges.
"""

import logging
import os
from collections.abc import Iterable

from otel_kprofiler.bpf import ThreadContexts
from otel_kprofiler.errors import describe_error
from otel_kprofiler.host import HostFiles
from otel_kprofiler.model import RawSample
from otel_kprofiler.processes import SearchTooLongError, find_place
from otel_kprofiler.sdk.span_path import find_other_classes
from otel_kprofiler.sdk.thread_contexts import write_records

_log = logging.getLogger(__name__)


class OwnContexts:
    """Configures the sampler to read this process's thread contexts if spans appear only there.

    Not thread-safe.

    Args:
        reader: the sampler's reader for thread contexts; None if the sampler cannot read them.
        follows_spans: whether the sampler reads the SDK's spans from the interpreter.

    Attributes:
        is_needed: whether there are spans that appear only in thread contexts.
        problem: why thread contexts are not read; empty if there is no problem.
    """

    def __init__(
        self, files: HostFiles, reader: ThreadContexts | None, *, follows_spans: bool
    ) -> None:
        self._files = files
        self._reader = reader
        self._follows_spans = follows_spans
        self._sample: RawSample | None = None
        self.is_needed = self.is_registered = False
        self.problem = ""

    def prepare(self) -> None:
        """Write thread contexts if necessary. Call often, because imports may add span classes."""
        if self.is_needed:
            return
        others = find_other_classes() if self._follows_spans else frozenset()
        if self._follows_spans and not others:
            return
        self.is_needed = True
        if others:
            _log.info(
                "spans of these classes are read from thread contexts: %s",
                ", ".join(sorted(others)),
            )
        self.problem = write_records()
        if not self.problem and self._reader is None:
            self.problem = "the sampler cannot read thread contexts without the kernel's BTF"
        if self.problem:
            spans = "spans of other classes" if others else "spans"
            _log.warning("samples will not be linked to %s: %s", spans, self.problem)
        self._register()

    def look(self, samples: Iterable[RawSample]) -> None:
        """Keep this process's first sample, for the start time that registration requires."""
        if self._sample is None:
            self._sample = next((sample for sample in samples if sample.tgid == os.getpid()), None)
            self._register()

    def _register(self) -> None:
        sample, reader = self._sample, self._reader
        if sample is None or reader is None or self.problem:
            return
        if not self.is_needed or self.is_registered:
            return
        self.is_registered = True
        try:
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                place = find_place(self._files, os.getpid(), memory.fileno())
            if place is None:
                self.problem = "the location of the writer's variable is unknown"
            elif sample.start_time_ns is None:
                self.problem = "samples lack the start time of the process"
            else:
                reader.register(sample.tgid, sample.start_time_ns, sample.stack_start, place)
        except OSError as error:
            self.problem = f"this process's memory cannot be searched ({describe_error(error)})"
        except SearchTooLongError:
            self.problem = "searching this process's memory is taking too long"
        if self.problem:
            _log.warning(
                "samples will not be linked to spans through thread contexts: %s", self.problem
            )

    def as_dict(self) -> dict[str, object]:
        """Returns ``possible`` (whether thread contexts can be read) and ``problem``."""
        return {"possible": not self.problem, "problem": self.problem}
