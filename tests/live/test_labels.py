"""Samples carry the labels set in the context in which they were taken."""

import json
from collections import Counter

import pytest
from services import run

from tests.windows import read_samples

pytestmark = pytest.mark.live

CONTEXTS = """
    import asyncio, contextvars, json, threading
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import KernelProfiler
    from otel_kprofiler.sdk import labels

    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    tracer = trace.get_tracer("service")
    truth = {}

    def observe(seconds, **expected):
        "Work for a while, and note which labels it has: by thread, and from when to when."
        for _ in range(int(seconds / 0.002)):
            start = time.time_ns()
            work(0.002)
            found = truth.setdefault(threading.get_native_id(), [])
            found.append((start, time.time_ns(), expected))

    @labels(kind="decorated")
    def decorated():
        observe(0.1, kind="decorated")

    async def task(number):
        with labels(task=number):
            for _ in range(20):
                observe(0.01, tenant="acme", task=f"{number}")
                await asyncio.sleep(0)

    async def tasks():
        with labels(tenant="acme"):
            await asyncio.gather(*(task(number) for number in range(4)))
            await asyncio.to_thread(observe, 0.2, tenant="acme")
        observe(0.1)

    def thread(number):
        for turn in range(40):
            with tracer.start_as_current_span("span"):
                with labels({"tenant.id": number}, turn=turn % 3):
                    observe(0.004, **{"tenant.id": f"{number}", "turn": f"{turn % 3}"})
                    with labels(turn="inner"), tracer.start_as_current_span("inner"):
                        observe(0.004, **{"tenant.id": f"{number}", "turn": "inner"})
                observe(0.004)

    with KernelProfiler.from_env() as profiler:
        observe(0.2)
        decorated()
        asyncio.run(tasks())
        threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        with labels(outside=1):
            context = contextvars.copy_context()
        context.run(observe, 0.2, outside="1")
        try:
            with labels(failed="yes"):
                raise RuntimeError
        except RuntimeError:
            observe(0.2)
        profiler.flush_window(60_000)
        stats = profiler.stats()["labels"]
    print(json.dumps({"truth": truth, "stats": stats}))
"""


def test_samples_carry_the_labels_from_their_context(to_file):
    said = json.loads(run(CONTEXTS, env=to_file.env).stdout)
    right, wrong, labelled = 0, [], 0
    for _, sample in read_samples(to_file.path):
        notes = said["truth"].get(f"{sample.tid}", [])
        for time_ns in sample.timestamps_unix_ns:
            labelled += bool(sample.labels)
            expected = next((ls for start, end, ls in notes if start < time_ns < end), None)
            if expected is not None and dict(sample.labels) != expected:
                wrong.append((sample.labels, expected))
            right += expected is not None and dict(sample.labels) == expected
    assert right > 1500
    assert not wrong
    stats = said["stats"]
    assert stats["possible"]
    assert stats["left_out"] == {"forgotten_set": 0, "too_many_sets": 0}
    assert 0.9 * labelled <= stats["samples"] <= labelled


BAGGAGE = """
    from opentelemetry import baggage, trace
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import KernelProfiler, labels

    trace.set_tracer_provider(TracerProvider())
    tracer = trace.get_tracer("service")
    with KernelProfiler.from_env():
        context = W3CBaggagePropagator().extract({"baggage": "tenant.id=acme,secret=7"})
        with tracer.start_as_current_span("GET", context=context):
            work(0.2)
            with labels(step="query"), tracer.start_as_current_span("query"):
                work(0.2)
        with tracer.start_as_current_span("GET"):
            work(0.2)
"""


def test_all_samples_in_a_request_carry_its_selected_baggage(to_file):
    run(BAGGAGE, env={**to_file.env, "OTEL_KPROFILER_BAGGAGE_KEYS": "tenant.id,absent"})
    results = Counter()
    for _, sample in read_samples(to_file.path):
        if sample.link:
            results[sample.link.span_id, sample.labels] += len(sample.timestamps_unix_ns)
    acme = ("tenant.id", "acme")
    wanted = {(acme,), (("step", "query"), acme), ()}
    assert {labels for _, labels in results} == wanted
    often = [key for key, count in results.items() if count > 20]  # inside ``with`` blocks
    assert len(often) == len({span for span, _ in often}) == 3
    assert {labels for _, labels in often} == wanted
