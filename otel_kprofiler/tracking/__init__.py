"""Tracks code that is loaded during sampling: modules, BPF programs and other kernel symbols.

:class:`ProcessEvents` reports the programs that processes execute and the code they map.
"""

from otel_kprofiler.tracking.kallsyms import IteratedKallsyms, find_hidden_symbols
from otel_kprofiler.tracking.ksymbol_readers import ReadMethod, find_ksymbol_method
from otel_kprofiler.tracking.ksymbol_records import make_changes, parse_perf_records
from otel_kprofiler.tracking.ksymbol_watch import KsymbolWatch
from otel_kprofiler.tracking.module_uevents import ModuleEvents, parse_uevent
from otel_kprofiler.tracking.module_watch import ModuleWatch
from otel_kprofiler.tracking.process_events import ProcessEvents
from otel_kprofiler.tracking.process_table import (
    Exec,
    Exited,
    Lost,
    Mapped,
    ProcessEvent,
    Started,
    Unmapped,
)
from otel_kprofiler.tracking.record_events import RecordLoss

__all__ = [
    "Exec",
    "Exited",
    "IteratedKallsyms",
    "KsymbolWatch",
    "Lost",
    "Mapped",
    "ModuleEvents",
    "ModuleWatch",
    "ProcessEvent",
    "ProcessEvents",
    "ReadMethod",
    "RecordLoss",
    "Started",
    "Unmapped",
    "find_hidden_symbols",
    "find_ksymbol_method",
    "make_changes",
    "parse_perf_records",
    "parse_uevent",
]
