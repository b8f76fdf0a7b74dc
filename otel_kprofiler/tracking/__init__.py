"""Tracks modules, BPF programs and other kernel symbols while samples are taken."""

from otel_kprofiler.tracking.cpu_share import CpuShare
from otel_kprofiler.tracking.kallsyms import IteratedKallsyms, find_hidden_symbols
from otel_kprofiler.tracking.ksymbol_events import KsymbolLoss
from otel_kprofiler.tracking.ksymbol_readers import ReadMethod, find_ksymbol_method
from otel_kprofiler.tracking.ksymbol_records import (
    KsymbolRecord,
    LostRecord,
    ProgramRecord,
    make_changes,
    parse_perf_records,
)
from otel_kprofiler.tracking.ksymbol_watch import KsymbolCounts, KsymbolWatch
from otel_kprofiler.tracking.module_uevents import (
    ModuleAction,
    ModuleEvent,
    ModuleEvents,
    NoEvents,
    parse_uevent,
)
from otel_kprofiler.tracking.module_watch import ModuleWatch

__all__ = [
    "CpuShare",
    "IteratedKallsyms",
    "KsymbolCounts",
    "KsymbolLoss",
    "KsymbolRecord",
    "KsymbolWatch",
    "LostRecord",
    "ModuleAction",
    "ModuleEvent",
    "ModuleEvents",
    "ModuleWatch",
    "NoEvents",
    "ProgramRecord",
    "ReadMethod",
    "find_hidden_symbols",
    "find_ksymbol_method",
    "make_changes",
    "parse_perf_records",
    "parse_uevent",
]
