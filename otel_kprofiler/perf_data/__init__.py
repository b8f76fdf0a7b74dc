"""Reads ``perf.data`` files from ``perf record``, without perf."""

from otel_kprofiler.perf_data.file import MAGIC
from otel_kprofiler.perf_data.windows import read_perf_data
