"""Pipelines over what there is to profile: this host, or a recording."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from otel_kprofiler.bpf import get_loader
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import HostError, KProfilerError, PrivilegeError
from otel_kprofiler.host import Access, HostFiles, Uevents
from otel_kprofiler.model import Attributes, ExporterAccount, ProcessKey, Resource
from otel_kprofiler.pipeline.pipeline import Pipeline, WindowSink
from otel_kprofiler.pipeline.windows import WindowSchedule
from otel_kprofiler.processes import ProcessContexts, ProcessResources, read_host_attributes
from otel_kprofiler.recording import (
    EventSink,
    RecordedKsymbols,
    RecordedModules,
    Recording,
    ReplayedKsymbols,
    ReplayedModules,
    ReplaySampler,
)
from otel_kprofiler.sampling import DAMAGED, EbpfSampler, RawSink, SamplerConfig
from otel_kprofiler.symbols import KsymbolSource, ModuleSource, Symbolizer
from otel_kprofiler.tracking import IteratedKallsyms, KsymbolWatch, ModuleWatch

_log = logging.getLogger(__name__)


def open_symbols(
    access: Access,
    *,
    event_sink: EventSink | None = None,
    inherited: Symbolizer | None = None,
    ring_bytes: int | None = None,
) -> Symbolizer:
    """The symbols of this host, with what follows their changes from before they were read.

    No thread runs before they are first asked to advance. The caller closes them.

    Args:
        access: the host's files.
        event_sink: takes the changes of symbols, for recordings.
        inherited: the parent's symbols in a forked child. Reading them again could take seconds:
            in a busy service each read loses the GIL.
        ring_bytes: ring size per CPU for records of BPF programs; see ``KsymbolWatch``.
    """
    since_ns = inherited.complete_until_ns if inherited else None
    ksymbols = _open_ksymbols(access, event_sink, since_ns, ring_bytes)
    files = IteratedKallsyms(access)
    modules = _open_modules(files, event_sink, since_ns, until_bpf=ksymbols is not None)
    if inherited is not None:
        return inherited.copy_for_child(files=files, ksymbols=ksymbols, modules=modules)
    return Symbolizer.live(files, ksymbols=ksymbols, modules=modules)


def open_resources(
    access: Access,
    clock: Clock,
    attributes: Attributes,
    *,
    on_new: Callable[[ProcessKey, Resource], None] | None = None,
) -> ProcessResources:
    """The Resources of all processes of this host, with what they publish about themselves.

    Args:
        access: the host's files.
        clock: the host's clocks.
        attributes: configured resource attributes; they win over what is found out.
        on_new: told of each process and its Resource when it is first seen, and when it changes.
    """
    base = {**read_host_attributes(access), **attributes}
    return ProcessResources(access, clock, base, on_new=on_new, contexts=ProcessContexts(access))


def open_live(
    config: SamplerConfig,
    schedule: WindowSchedule,
    sink: WindowSink,
    *,
    access: Access,
    clock: Clock,
    resources: ProcessResources,
    symbolizer: Symbolizer,
    raw_sink: RawSink | None = None,
    exporters: Callable[[], tuple[ExporterAccount, ...]] = tuple,
    loader: str = "auto",
    pause: Callable[[], None] | None = None,
) -> Pipeline[EbpfSampler]:
    """A pipeline that samples this host; no program is in the kernel before it is started.

    Args:
        config: what to sample; the interrupt ranges are filled in from the kernel's symbols.
        schedule: how long windows last.
        sink: takes each closed window.
        access: the host's files.
        clock: the host's clocks.
        resources: the Resources of processes; closed with the pipeline, or if this fails.
        symbolizer: from :func:`open_symbols`; closed likewise.
        raw_sink: sees the raw records of each drain.
        exporters: what became of the samples that the sink was given.
        loader: what loads the program: ``auto``, ``libbpf`` or ``bcc``.
        pause: called again and again during long work.

    Raises:
        DependencyError: the loader's library is missing.
    """
    try:
        symbolizer.advance(clock.boot_ns())  # they are followed from now on
        ranges = tuple((text.start, text.end) for text in symbolizer.interrupt_ranges())
        config = replace(config, interrupt_ranges=ranges)
        bpf_loader = get_loader(loader)
    except BaseException:
        symbolizer.close()
        resources.close()
        raise
    return Pipeline(
        sampler=EbpfSampler(config, access=access, loader=bpf_loader, raw_sink=raw_sink),
        symbolizer=symbolizer,
        resources=resources,
        schedule=schedule,
        sink=sink,
        exporters=exporters,
        clock=clock,
        pause=pause,
    )


def change_attributes(
    pipeline: Pipeline[EbpfSampler], access: Access, attributes: Attributes
) -> None:
    """Give the Resources of :func:`open_resources` other configured attributes."""
    pipeline.resources.rebase({**read_host_attributes(access), **attributes})


def _open_ksymbols(
    access: Access, sink: EventSink | None, missed_since_ns: int | None, ring_bytes: int | None
) -> KsymbolSource | None:
    """What follows BPF programs, from before kallsyms is read; None where it is not allowed."""
    try:
        watch = KsymbolWatch(access, missed_since_ns=missed_since_ns, ring_bytes=ring_bytes)
    except PrivilegeError:
        return None  # the sampler needs the same, and says so
    except HostError as error:
        _log.warning("BPF programs loaded later will have no names: %s", error.with_fix())
        return None
    return RecordedKsymbols(watch, sink) if sink else watch


def _open_modules(
    files: HostFiles, sink: EventSink | None, missed_since_ns: int | None, *, until_bpf: bool
) -> ModuleSource | None:
    """What follows modules, from before kallsyms is read; None if the kernel has none."""
    try:
        files.read_bytes("/proc/modules")
    except OSError:
        return None
    watch = ModuleWatch(
        files,
        Uevents,
        until_bpf=until_bpf,
        keep_datagrams=sink is not None,
        missed_since_ns=missed_since_ns,
    )
    return RecordedModules(watch, sink) if sink else watch


def replay(
    recording: Recording, schedule: WindowSchedule, sink: WindowSink
) -> Pipeline[ReplaySampler]:
    """Play a recording with the symbols, processes and clock of the recorded host.

    Nothing of this host is looked at. Returns the stopped pipeline, for its account.

    Raises:
        KProfilerError: the recording is damaged.
    """
    try:
        return _replay(recording, schedule, sink)
    except DAMAGED as error:  # nothing but the recording has been read
        raise KProfilerError(f"the recording is damaged: {error!r}") from error


def _replay(
    recording: Recording, schedule: WindowSchedule, sink: WindowSink
) -> Pipeline[ReplaySampler]:
    sampler = ReplaySampler(recording)
    clock = Clock(sampler)
    pipeline = Pipeline(
        sampler=sampler,
        symbolizer=Symbolizer.live(
            recording.files,
            ksymbols=ReplayedKsymbols(recording),
            modules=ReplayedModules(recording),
        ),
        resources=ProcessResources(recording.files, clock, {}, known=recording.resources),
        schedule=schedule,
        sink=sink,
        clock=clock,
    )
    pipeline.start()
    while not sampler.exhausted:
        pipeline.step()
    pipeline.stop()
    return pipeline
