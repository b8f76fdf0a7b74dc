"""Reads ``perf.data`` files from ``perf record``, without perf."""

from otel_kprofiler.perf_data.naming import CodeNames
from otel_kprofiler.perf_data.windows import read_perf_data

__all__ = ["CodeNames", "read_perf_data"]
