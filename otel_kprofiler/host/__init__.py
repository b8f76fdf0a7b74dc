"""What otel-kprofiler knows about the host: files, kernel, capabilities."""

from otel_kprofiler.host.access import Access, HostFiles
from otel_kprofiler.host.cpus import parse_cpu_list

__all__ = ["Access", "HostFiles", "parse_cpu_list"]
