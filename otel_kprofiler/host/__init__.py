"""What otel-kprofiler knows about the host: files, kernel, capabilities."""

from otel_kprofiler.host.access import Access, HostFiles

__all__ = ["Access", "HostFiles"]
