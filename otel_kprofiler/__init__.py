"""Kernel-first continuous profiler for OpenTelemetry."""

from otel_kprofiler.version import __version__

__all__ = ["__version__"]
