"""Accesses host files, the kernel, capabilities and perf events, and runs ``doctor`` checks."""

from otel_kprofiler.host.access import Access, HostFiles, read_limited
from otel_kprofiler.host.cache_directory import CacheDirectory, find_cache_path
from otel_kprofiler.host.capabilities import (
    CONTEXTS,
    get_capability_fix,
    is_in_user_namespace,
    read_capabilities,
)
from otel_kprofiler.host.cgroup_names import (
    CgroupNames,
    parse_cgroup,
    parse_cgroup_path,
    parse_unified_path,
)
from otel_kprofiler.host.cgroups import (
    Cgroup,
    find_cgroup,
    find_cgroup_root,
    is_in_cgroup_namespace,
    is_populated,
    parse_mount_points,
    walk_cgroups,
)
from otel_kprofiler.host.child import child_command, limit_resources
from otel_kprofiler.host.child_cpu import CpuRate, children_time_ns
from otel_kprofiler.host.child_memory import grant_memory, limit_memory
from otel_kprofiler.host.container_names import (
    KnownContainers,
    OwnContainer,
    parse_own_container,
    read_pods,
)
from otel_kprofiler.host.containers import Container, find_containers
from otel_kprofiler.host.cpu_share import CpuShare
from otel_kprofiler.host.cpus import parse_cpu_list, read_online_cpus, read_possible_cpus
from otel_kprofiler.host.descriptors import create_memfd, open_in_memory, open_pidfd, signal_pidfd
from otel_kprofiler.host.doctor import doctor, find_unreadable
from otel_kprofiler.host.event_per_cpu import EventPerCpu
from otel_kprofiler.host.event_specs import (
    CPU_CLOCK,
    MAX_EVENTS,
    AnyEventSpec,
    EventSpec,
    find_event_error,
    find_repeated_event,
    list_events,
    parse_event,
    suggest_events,
)
from otel_kprofiler.host.fair_queue import FairQueue, Turn, find_user
from otel_kprofiler.host.file_places import FilePlaces
from otel_kprofiler.host.growing_holds import FIRST_HOLD_S, GrowingHolds
from otel_kprofiler.host.kernel import (
    OLDEST_KERNEL,
    KernelRelease,
    SymbolsVisibility,
    find_sysctl,
    read_release,
    read_symbols_visibility,
)
from otel_kprofiler.host.limited_children import (
    DONE,
    ChildFailed,
    ChildLimits,
    ChildProblem,
    LimitedChildren,
)
from otel_kprofiler.host.lock_spec import LOCK_EVENT, LockSpec
from otel_kprofiler.host.mapped_files import (
    FileProblem,
    FileRequest,
    MappedFileError,
    OpenedFile,
    ReferableFiles,
    modification_time,
    open_mapped,
    open_regular,
)
from otel_kprofiler.host.maps import (
    MemoryMapping,
    ProcessMaps,
    find_vdso,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.host.open_files import find_open_files_error, raise_open_files_limit
from otel_kprofiler.host.patient_calls import MAX_LEFT, PATIENCE_S, PatientCalls
from otel_kprofiler.host.patient_children import DEVICE_RETRY_S
from otel_kprofiler.host.patient_maps import PatientMaps
from otel_kprofiler.host.perf import (
    COUNT_SW_CPU_CLOCK,
    COUNT_SW_DUMMY,
    DISABLED,
    ENABLE_ON_EXEC,
    INHERIT,
    TIME_ENABLED,
    PerfAttributes,
    attach_program,
    disable_event,
    enable_event,
    open_perf_event,
    set_period,
)
from otel_kprofiler.host.privilege_errors import get_privilege_error
from otel_kprofiler.host.privileges import (
    PURPOSES,
    Privileges,
    check_imports_without_capabilities,
    give_up_capabilities,
    keep_only,
    read_threads,
    run_unprivileged,
)
from otel_kprofiler.host.process_stat import (
    TICK_NS,
    ProcessStat,
    parse_stat,
    read_owner,
    read_start_ticks,
    read_stat,
)
from otel_kprofiler.host.process_tree import find_descendants, read_process, read_processes
from otel_kprofiler.host.refused_files import RefusedFiles, identify_content
from otel_kprofiler.host.special_files import open_special
from otel_kprofiler.host.throttling import find_throttling, get_tick_rate
from otel_kprofiler.host.tracepoint_specs import VALUES, TracepointSpec, ValueSource
from otel_kprofiler.host.uevents import Uevents
from otel_kprofiler.host.writing import AppendedFile, NewFile, PrivateDirectory, write_all
