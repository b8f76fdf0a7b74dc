"""Lock waits are measured correctly on this kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from otel_kprofiler.errors import KernelFeatureError
from otel_kprofiler.host import Access, parse_event, read_release
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

pytestmark = [pytest.mark.kernel, pytest.mark.one_boot]

ROUNDS, WAITERS, SECONDS = 3, 2, 0.5
PROGRAM = str(Path(__file__).parents[1] / "lock_holder.py")
HAS_TRACEPOINTS = read_release(Access())[:2] >= (5, 19)


def start_sampler():
    config = SamplerConfig(
        on_cpu=False, stacks="both", events=(parse_event("lock-contention", 99),)
    )
    sampler = EbpfSampler(config)
    try:
        sampler.start()
    except BaseException:
        sampler.close()
        raise
    return sampler


@pytest.mark.skipif(not HAS_TRACEPOINTS, reason="the tracepoints exist since Linux 5.19")
def test_lock_waits_have_the_measured_duration_and_identify_the_lock_holder():
    """Lock waits report the duration measured by the program, and the lock holder's thread."""
    sampler = start_sampler()
    try:
        words = [sys.executable, PROGRAM, str(ROUNDS), str(WAITERS), str(SECONDS)]
        measured = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
        sampler.stop()
        samples = sampler.drain()
        counts = sampler.counts()["lock_contention"]
    finally:
        sampler.close()
    assert counts.taken == counts.received + sum(counts.lost.values())
    long = [sample for sample in samples if sample.value >= SECONDS * 1e9 / 2]
    assert len(long) >= ROUNDS
    assert {sample.wait.type for sample in long} == {"rwsem:W"}
    assert sum(sample.value for sample in long) <= sum(measured["waits_ns"])
    holders = {sample.wait.holder.tid for sample in long if sample.wait.holder}
    assert set(measured["holders"]) <= holders
    assert counts.locks["rwsem:W"].total_ns >= sum(sample.value for sample in long)


@pytest.mark.skipif(HAS_TRACEPOINTS, reason="this kernel has the tracepoints")
def test_the_error_for_lock_waits_on_old_kernels_names_the_required_version():
    """On kernels before 5.19, the error for lock contention names version 5.19."""
    with pytest.raises(KernelFeatureError, match="contention_begin") as raised:
        start_sampler()
    assert "5.19" in raised.value.hint
