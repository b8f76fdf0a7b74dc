"""Measures how long reports take to load and group 1,000,000 samples from 5 s windows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.bench_otlp import mixed_load_window
from benchmarks.rows import Row
from otel_kprofiler.analysis import GROUPINGS, Filter, load_samples
from otel_kprofiler.formats import FORMATS
from otel_kprofiler.otlp import decode_windows
from tests.windows import move_window

SAMPLES = 1_000_000
_WINDOW_NS = 5_000_000_000


def rows(quick: bool) -> Iterator[Row]:
    """Yields CPU times in seconds, with garbage collection disabled as in ``report``."""
    window = mixed_load_window(user=True)
    count = SAMPLES // (10 if quick else 1) // window.sample_count
    (write,) = (row.write for row in FORMATS if row.name == "otlp")
    content = write([move_window(window, number * _WINDOW_NS) for number in range(count)])
    gc.disable()
    try:
        seconds, windows = _measure(lambda: decode_windows(content))
        size = f"{count * window.sample_count:,} samples in {count} windows"
        yield Row(f"decode {size}, {len(content) >> 20} MiB", f"{seconds:.2f} s")
        seconds, samples = _measure(lambda: load_samples(windows))
        goal = "" if quick else "<= 3 s"
        yield Row(f"load them, {len(samples):,} rows", f"{seconds:.2f} s", goal=goal)
        for by in ("function", "syscall", "process"):
            seconds, _ = _measure(partial(GROUPINGS[by], samples))
            yield Row(f"group by {by}", f"{seconds:.2f} s")
        seconds, _ = _measure(partial(Filter(functions=("vfs_*",)).apply, samples))
        yield Row("keep one function", f"{seconds:.2f} s")
    finally:
        gc.enable()


def _measure(work):
    start = time.process_time()
    done = work()
    return time.process_time() - start, done
