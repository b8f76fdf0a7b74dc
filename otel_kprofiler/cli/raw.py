"""The file of ``record --raw``: raw samples and all that is needed to read them anywhere."""

from __future__ import annotations

import os
from typing import Self

from otel_kprofiler.bpf import IteratedKallsyms
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import ExportError
from otel_kprofiler.host import Access
from otel_kprofiler.model import Attributes, ProcessKey, Resource
from otel_kprofiler.sampling import EbpfSampler, RecordingFacts, RecordingWriter


class RawOutput:
    """Writes a recording; leaving the context without :meth:`finish` leaves no trace.

    The files that symbols are made of are copied at once, before the first sample.

    Args:
        path: where to write.
        access: the host's files.
        force: replace an existing file.
    """

    def __init__(self, path: str, access: Access, *, force: bool) -> None:
        if os.path.exists(path) and not force:
            raise ExportError(
                f"{path} exists already", hint="give --force to replace it, or another --raw"
            )
        try:
            self._writer = RecordingWriter(path)
        except OSError as error:
            raise ExportError(
                f"cannot write {path}: {error.strerror}",
                hint="give a --raw in a directory that exists and that you may write to",
            ) from error
        self._finished = False
        self._processes: dict[ProcessKey, Attributes] = {}
        self._writer.capture(IteratedKallsyms(access))
        self.add_records = self._writer.add_records
        self.add_event = self._writer.add_event

    def add_process(self, key: ProcessKey, resource: Resource) -> None:
        """Remember what is known of a process."""
        self._processes[key] = resource.attributes

    def finish(self, clock: Clock, sampler: EbpfSampler) -> None:
        """Complete the file; sampling has ended."""
        self._writer.add_resources(self._processes)
        self._writer.finish(
            RecordingFacts(
                offset_ns=clock.to_unix_ns(0),
                period_ns=sampler.period_ns,
                stack_limit=sampler.stack_limit,
                until_ns=clock.boot_ns(),
                counts=sampler.counts(),
            )
        )
        self._finished = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            self._writer.abandon()
