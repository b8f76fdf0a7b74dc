"""Opens pipelines for this host or for a recording."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from otel_kprofiler.bpf import get_loader
from otel_kprofiler.clock import Clock
from otel_kprofiler.errors import HostError, KProfilerError, PrivilegeError
from otel_kprofiler.host import Access, HostFiles, Uevents
from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    USER_SIDE,
    Attributes,
    Frame,
    KnownCodes,
    KnownFiles,
    KnownLoops,
    ProcessKey,
    Resource,
    SideKind,
)
from otel_kprofiler.pipeline.options import PipelineOptions
from otel_kprofiler.pipeline.pipeline import Pipeline, WindowSink
from otel_kprofiler.pipeline.python_frames import PythonFrames
from otel_kprofiler.pipeline.schedule import WindowSchedule
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
from otel_kprofiler.symbols import (
    Interleaver,
    KernelSymbolizer,
    KsymbolSource,
    ModuleSource,
    PythonResolver,
    SideResolver,
    StackResolver,
    UserNames,
    UserResolver,
)
from otel_kprofiler.tracking import IteratedKallsyms, KsymbolWatch, ModuleWatch

_log = logging.getLogger(__name__)


def open_symbols(
    access: Access,
    *,
    event_sink: EventSink | None = None,
    inherited: KernelSymbolizer | None = None,
    ring_bytes: int | None = None,
) -> KernelSymbolizer:
    """Starts tracking symbol changes, then reads this host's symbols.

    The symbolizer starts no thread before its first ``advance``. The caller closes the symbolizer.
    ``event_sink`` receives symbol changes, for recordings. In a forked child, ``inherited``
    contains the parent's symbols, because rereading them could take seconds in a busy service,
    where each read releases the GIL. ``ring_bytes`` is passed to ``KsymbolWatch``.
    """
    since_ns = inherited.complete_until_ns if inherited else None
    ksymbols = _open_ksymbols(access, event_sink, since_ns, ring_bytes)
    files = IteratedKallsyms(access)
    modules = _open_modules(files, event_sink, since_ns, until_bpf=ksymbols is not None)
    if inherited is not None:
        return inherited.copy_for_child(files=files, ksymbols=ksymbols, modules=modules)
    return KernelSymbolizer.live(files, ksymbols=ksymbols, modules=modules)


def open_resources(
    access: Access,
    clock: Clock,
    attributes: Attributes,
    *,
    on_new: Callable[[ProcessKey, Resource], None] | None = None,
    service_sources: Sequence[str] = (),
) -> ProcessResources:
    """Opens the Resource cache for this host's processes, including the attributes they publish.

    ``attributes`` are the configured attributes, which override detected ones. ``on_new`` is called
    with a process and its Resource when the process is new or the Resource has changed.
    ``service_sources`` (values in ``SERVICE_SOURCES`` of :mod:`otel_kprofiler.processes`) provide
    service names for processes that do not publish one.
    """
    base = {**read_host_attributes(access), **attributes}
    return ProcessResources(
        access,
        clock,
        base,
        on_new=on_new,
        contexts=ProcessContexts(access),
        service_sources=service_sources,
    )


def open_live(
    config: SamplerConfig,
    schedule: WindowSchedule,
    sink: WindowSink,
    *,
    access: Access,
    clock: Clock,
    resources: ProcessResources,
    symbolizer: KernelSymbolizer,
    user_names: UserNames | None = None,
    resolvers: Mapping[SideKind, SideResolver[Any]] | None = None,
    raw_sink: RawSink | None = None,
    replaced_sink: Callable[[Frame], None] | None = None,
    loader: str = "auto",
    options: PipelineOptions = PipelineOptions(),
) -> Pipeline[EbpfSampler]:
    """Opens a pipeline that samples this host. No BPF program is loaded until the pipeline starts.

    ``resources``, ``symbolizer``, ``user_names`` and ``resolvers`` are closed with the pipeline, or
    if this function fails. Adds the kernel's interrupt ranges to ``config``. ``resolvers`` replace
    the default resolvers for all frames except kernel frames. ``raw_sink`` receives the raw records
    from each drain. ``replaced_sink`` receives symbolized native frames that Python frames may
    replace. ``loader`` is ``auto``, ``libbpf`` or ``bcc``. Raises ``DependencyError`` if the
    loader's library is missing.
    """
    user_files = KnownFiles(on_opened=user_names.add if user_names else None)
    native = UserResolver(user_files, user_names)
    codes, loops = KnownCodes(), KnownLoops()
    stacks = make_stacks(
        symbolizer, native, codes, resolvers or {}, loops=loops, on_replaced=replaced_sink
    )
    try:
        symbolizer.advance(clock.boot_ns())  # starts tracking changes
        ranges = tuple((text.start, text.end) for text in symbolizer.snapshot.interrupt_ranges())
        config = replace(config, interrupt_ranges=ranges)
        bpf_loader = get_loader(loader)
    except BaseException:
        stacks.close()
        resources.close()
        raise
    sampler = EbpfSampler(
        config,
        access=access,
        loader=bpf_loader,
        raw_sink=raw_sink,
        user_files=user_files,
        python_codes=codes,
    )
    return Pipeline(
        sampler=sampler,
        python=PythonFrames(sampler, access, loops),
        on_started=lambda: resources.follow_threads(sampler.contexts),
        stacks=stacks,
        resources=resources,
        schedule=schedule,
        sink=sink,
        clock=clock,
        options=options,
        find_causes=config.off_cpu is None or config.off_cpu.causes,
        scheduler_rvas=symbolizer.snapshot.scheduler_rvas(),
    )


def make_stacks(
    symbolizer: KernelSymbolizer,
    native: UserResolver,
    codes: KnownCodes,
    others: Mapping[SideKind, SideResolver[Any]],
    *,
    loops: KnownLoops | None = None,
    on_replaced: Callable[[Frame], None] | None = None,
) -> StackResolver:
    """Returns a resolver for whole stacks.

    The resolver's ``close`` also closes the resolvers that it combines.
    """
    resolvers: dict[SideKind, SideResolver[Any]] = {
        KERNEL_SIDE: symbolizer,
        USER_SIDE: native,
        PYTHON_SIDE: PythonResolver(codes),
    }
    return StackResolver({**resolvers, **others}, Interleaver(loops, on_replaced))


def change_attributes(
    pipeline: Pipeline[EbpfSampler],
    access: Access,
    attributes: Attributes,
    service_sources: Sequence[str] = (),
) -> None:
    """Change the settings of a pipeline's Resource cache (see :func:`open_resources`)."""
    pipeline.resources.rebase({**read_host_attributes(access), **attributes}, service_sources)


def _open_ksymbols(
    access: Access, sink: EventSink | None, missed_since_ns: int | None, ring_bytes: int | None
) -> KsymbolSource | None:
    """Opens a source of ksymbol changes before kallsyms is read; None if not permitted."""
    try:
        watch = KsymbolWatch(access, missed_since_ns=missed_since_ns, ring_bytes=ring_bytes)
    except PrivilegeError:
        return None  # the sampler will fail for the same reason and report it
    except HostError as error:
        _log.warning("BPF programs loaded from now on will have no names: %s", error.with_fix())
        return None
    return RecordedKsymbols(watch, sink) if sink else watch


def _open_modules(
    files: HostFiles, sink: EventSink | None, missed_since_ns: int | None, *, until_bpf: bool
) -> ModuleSource | None:
    """Opens a source of module changes; None if modules are disabled.

    Call before reading kallsyms.
    """
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
    recording: Recording,
    schedule: WindowSchedule,
    sink: WindowSink,
    *,
    whole_sink: WindowSink | None = None,
    resolvers: Mapping[SideKind, SideResolver[Any]] | None = None,
) -> Pipeline[ReplaySampler]:
    """Replay a recording with the symbols, processes and clock of the recorded host.

    Reads nothing from this host. Returns the stopped pipeline, whose counts include all samples. At
    the end, ``whole_sink`` receives all samples again, in a single window. ``resolvers`` are closed
    with the pipeline. Raises ``KProfilerError`` if the recording is corrupt.
    """
    try:
        return _replay(recording, schedule, sink, whole_sink, resolvers or {})
    except DAMAGED as error:  # all input comes from the recording
        raise KProfilerError(f"the recording is corrupt: {error!r}") from error


def _replay(
    recording: Recording,
    schedule: WindowSchedule,
    sink: WindowSink,
    whole_sink: WindowSink | None,
    resolvers: Mapping[SideKind, SideResolver[Any]],
) -> Pipeline[ReplaySampler]:
    sampler = ReplaySampler(recording)
    clock = Clock(sampler)
    symbolizer = KernelSymbolizer.live(
        recording.files, ksymbols=ReplayedKsymbols(recording), modules=ReplayedModules(recording)
    )
    native = UserResolver(recording.user_files, recording.user_names)
    pipeline = Pipeline(
        sampler=sampler,
        stacks=make_stacks(symbolizer, native, recording.python_codes, resolvers),
        resources=ProcessResources(recording.files, clock, {}, attributes_of=recording.resources),
        schedule=schedule,
        sink=sink,
        clock=clock,
        options=PipelineOptions(whole_sink=whole_sink),
    )
    pipeline.start()
    while not sampler.exhausted:
        pipeline.step()
    pipeline.stop()
    return pipeline
