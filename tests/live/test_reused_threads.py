"""A thread's samples never have the name, span or waits of an earlier thread with the same id."""

import json
import subprocess
import sys
from bisect import bisect_right
from collections import Counter, defaultdict

import pytest

from otel_kprofiler.model import OFF_CPU, ON_CPU
from otel_kprofiler.sampling import OffCpuConfig
from tests.needs import ROOT, X86_64
from tests.reused_threads import NAMES
from tests.thread_contexts import Reader

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("sampling_host"),
    pytest.mark.timeout(180),
    X86_64,
    ROOT,
]
WANTED = 150


def compare(samples, lives):
    """Counts samples of live threads, by whether their thread name, span and waits are correct.

    A wait counts as late if it overlaps the lifetime of the next thread with the same id.
    """
    by_tid = defaultdict(list)
    for tid, *life in lives:
        by_tid[tid].append(life)
    counts = Counter()
    for sample in samples:
        start_ns = sample.wait.start_ns if sample.wait else sample.time_ns
        end_ns = start_ns + sample.wait.duration_ns if sample.wait else sample.time_ns
        on_tid = by_tid.get(sample.tid, ())
        at = bisect_right(on_tid, start_ns, key=lambda life: life[0]) - 1
        if at < 0 or start_ns > on_tid[at][1]:
            continue  # before the thread was named, or after its span ended
        _, _, name, link = on_tid[at]
        counts[sample.kind, "late"] += any(end_ns > life[0] for life in on_tid[at + 1 : at + 2])
        counts[sample.kind, "other name"] += sample.comm.decode() != name
        span = (sample.link[0] + sample.link[1]).hex() if sample.link else None
        counts[sample.kind, "other span"] += span not in (None, link)
        counts[sample.kind, "span" if span else name] += 1
    return counts


def test_a_thread_with_a_reused_id_has_its_own_name_span_and_waits(tmp_path):
    log = tmp_path / "log"
    words = [sys.executable, "-m", "tests.reused_threads", log]
    names = [name.encode() for name in NAMES]
    with (
        Reader(*names, off_cpu=OffCpuConfig(samples_per_second=500)) as reader,
        subprocess.Popen(words, stdin=subprocess.PIPE) as service,
    ):
        reader.collect_until(
            lambda: reader.count_links() >= WANTED and reader.count_links(OFF_CPU) >= WANTED
        )
        service.communicate(timeout=60)
        assert service.returncode == 0
        reader.drain()
    lives = json.loads(log.read_text())
    assert len({tid for tid, *_ in lives}) < len(lives) / 2
    counts = compare(reader.samples, lives)
    for kind in (ON_CPU, OFF_CPU):
        assert counts[kind, "span"] >= WANTED / 2, counts
        assert counts[kind, NAMES[1]] >= WANTED / 4, counts
        assert counts[kind, "other name"] == counts[kind, "other span"] == 0, counts
    assert counts[OFF_CPU, "late"] == 0, counts
