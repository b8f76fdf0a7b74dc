"""The host: files, kernel, capabilities, perf events, checks of ``doctor``."""

from otel_kprofiler.host.access import Access, HostFiles
from otel_kprofiler.host.capabilities import (
    Capabilities,
    get_capability_fix,
    get_privilege_error,
    is_in_user_namespace,
    parse_capabilities,
    read_capabilities,
)
from otel_kprofiler.host.cpus import parse_cpu_list, read_online_cpus, read_possible_cpus
from otel_kprofiler.host.doctor import doctor
from otel_kprofiler.host.event_per_cpu import CpuChanges, EventPerCpu
from otel_kprofiler.host.kernel import (
    OLDEST_KERNEL,
    KernelRelease,
    SymbolsVisibility,
    find_lockdown,
    find_sysctl,
    parse_release,
    read_release,
    read_symbols_visibility,
)
from otel_kprofiler.host.open_files import find_open_files_error
from otel_kprofiler.host.perf import (
    COUNT_SW_CPU_CLOCK,
    COUNT_SW_DUMMY,
    DISABLED,
    ENABLE_ON_EXEC,
    INHERIT,
    PerfAttributes,
    attach_program,
    disable_event,
    enable_event,
    open_perf_event,
    set_period,
)
from otel_kprofiler.host.privileges import (
    PURPOSES,
    SAMPLING,
    Privileges,
    held_capabilities,
    keep_only,
    read_threads,
    run_unprivileged,
)
from otel_kprofiler.host.uevents import Uevents
from otel_kprofiler.host.writing import AppendedFile, NewFile, PrivateDirectory

__all__ = [
    "COUNT_SW_CPU_CLOCK",
    "COUNT_SW_DUMMY",
    "DISABLED",
    "ENABLE_ON_EXEC",
    "INHERIT",
    "OLDEST_KERNEL",
    "PURPOSES",
    "SAMPLING",
    "Access",
    "AppendedFile",
    "Capabilities",
    "CpuChanges",
    "EventPerCpu",
    "HostFiles",
    "KernelRelease",
    "NewFile",
    "PerfAttributes",
    "PrivateDirectory",
    "Privileges",
    "SymbolsVisibility",
    "Uevents",
    "attach_program",
    "disable_event",
    "doctor",
    "enable_event",
    "find_lockdown",
    "find_open_files_error",
    "find_sysctl",
    "get_capability_fix",
    "get_privilege_error",
    "held_capabilities",
    "is_in_user_namespace",
    "keep_only",
    "open_perf_event",
    "parse_capabilities",
    "parse_cpu_list",
    "parse_release",
    "read_capabilities",
    "read_online_cpus",
    "read_possible_cpus",
    "read_release",
    "read_symbols_visibility",
    "read_threads",
    "run_unprivileged",
    "set_period",
]
