"""Loads the unwind tables of user-space binaries into the BPF program's maps."""

from otel_kprofiler.unwinding.counts import TableCounts
from otel_kprofiler.unwinding.eviction import Limits
from otel_kprofiler.unwinding.maps import MapSizes, TableMaps
from otel_kprofiler.unwinding.running import list_running, map_files
from otel_kprofiler.unwinding.store import TableStore
