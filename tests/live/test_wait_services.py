"""A service that samples its own waits: causes, spans and totals of its threads alone."""

import json
from collections import Counter

import pytest
from services import ToFile, run

from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.model import OFF_CPU
from otel_kprofiler.otlp import read_profiles

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not LibbpfLoader.is_installed(), reason="libbpf1 is not installed"),
]

SERVICE = """
    import json, os, time
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import KernelProfiler

    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    profiler = KernelProfiler.from_env().start("raise")
    truth = {}
    for _ in range(40):
        with trace.get_tracer("service").start_as_current_span("request") as span:
            start = time.monotonic_ns()
            time.sleep(0.05)
            truth[f"{span.get_span_context().span_id:016x}"] = time.monotonic_ns() - start
    profiler.stop()
    print(json.dumps([os.getpid(), truth]))
"""


def test_spans_have_the_waits_of_their_thread(tmp_path):
    file = ToFile(tmp_path / "profiles.jsonl")
    done = run(SERVICE, env={**file.env, "OTEL_KPROFILER_OFF_CPU": "true"})
    pid, truth = json.loads(done.stdout)
    slept, pids = Counter(), set()
    exact = 0
    for window in read_profiles(str(file.path)):
        for profile in window.profiles:
            if profile.kind != OFF_CPU:
                continue
            for group in profile.resources:
                pids.add(group.resource.attributes["process.pid"])
                exact += group.waits.total_ns if group.waits else 0
            for _, sample in profile.samples:
                if sample.link and sample.wait.cause.label == "sleep":
                    slept[sample.link.span_id.hex()] += sample.weight
    assert pids == {pid}
    assert exact >= sum(truth.values())
    # Sleeps of 50 ms are above the first threshold, so that each is sampled, as long as it was.
    # A busy machine gives the profiler's first windows more waits, and a higher threshold.
    known = [span for span in truth if span in slept]
    assert len(known) >= len(truth) // 2, (len(known), len(truth))
    close = [span for span in known if abs(slept[span] - truth[span]) <= 0.3 * truth[span]]
    assert len(close) >= 0.8 * len(known), {span: (slept[span], truth[span]) for span in known}


def test_waits_are_not_sampled_unless_asked_for(tmp_path):
    file = ToFile(tmp_path / "profiles.jsonl")
    run(SERVICE, env=file.env)
    if file.exists():  # a service that only sleeps may have no sample of what runs
        kinds = {one.kind for window in read_profiles(str(file.path)) for one in window.profiles}
        assert OFF_CPU not in kinds
