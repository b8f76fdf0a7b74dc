"""Kernel time of each span, out of OTLP profiles in a file.

Takes what the Collector's file exporter or ``OTEL_PROFILES_EXPORTER=otlp_json_file`` wrote::

    python kernel_time_by_span.py profiles.jsonl
"""

import sys
from collections import Counter

from otel_kprofiler.model import ON_CPU
from otel_kprofiler.otlp import read_profiles


def kernel_time_by_span(path: str) -> Counter[tuple[str, str]]:
    """Nanoseconds by (trace id, span id): each sample stands for one sampling period."""
    times: Counter[tuple[str, str]] = Counter()
    for window in read_profiles(path):
        for profile in window.profiles:
            for _, sample in profile.samples:
                if sample.link is not None and profile.kind == ON_CPU:
                    span = sample.link.trace_id.hex(), sample.link.span_id.hex()
                    times[span] += profile.measure(sample.weight)
    return times


if __name__ == "__main__":
    for (trace_id, span_id), time_ns in kernel_time_by_span(sys.argv[1]).most_common(20):
        print(f"{time_ns / 1e6:8.1f} ms  trace {trace_id}  span {span_id}")
