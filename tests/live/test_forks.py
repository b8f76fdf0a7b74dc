"""Forks of profiled services: what the parent keeps, and what its children do."""

import pytest
from services import run

pytestmark = pytest.mark.live

# Python warns of every fork beside threads from 3.12 on.
QUIET = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}

LINKED_THREADS = """
    import multiprocessing, subprocess, threading
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import (
        InMemoryProfileExporter, KernelProfiler, ProfilerProvider, SimpleProfileProcessor
    )

    exporter, going = InMemoryProfileExporter(), True
    provider = ProfilerProvider(shutdown_on_exit=False)
    provider.add_profile_processor(SimpleProfileProcessor(exporter))
    profiler = KernelProfiler(provider, samples_per_second=499)
    profiler.start("raise")
    tracer = TracerProvider().get_tracer("t")

    def serve():
        with tracer.start_as_current_span("long"):
            while going:
                os.listdir("/proc/self/task")

    def linked():
        "Samples of the other threads by whether they have a link, since the last call."
        assert provider.force_flush(60_000)
        windows = exporter.get_finished_windows()
        exporter.clear()
        counts = {True: 0, False: 0}
        for window in windows:
            for group in window.resources:
                for sample in group.samples:
                    if sample.tid in tids:
                        counts[sample.link is not None] += len(sample.timestamps_unix_ns)
        return counts

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    tids = {thread.native_id for thread in threads}
    while profiler.stats()["span_links"]["threads"] < 2:
        time.sleep(0.01)
    linked()
"""

WAYS_TO_FORK = {
    "os.fork": """
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    """,
    "preexec_fn": """
    subprocess.run(["true"], preexec_fn=lambda: None, check=True)
    """,
    "multiprocessing": """
    child = multiprocessing.get_context("fork").Process(target=time.time)
    child.start()
    child.join()
    """,
}


@pytest.mark.parametrize("way", WAYS_TO_FORK)
def test_threads_of_the_parent_keep_their_links(way):
    done = run(
        LINKED_THREADS
        + WAYS_TO_FORK[way]
        + """
    time.sleep(2)
    after = linked()
    assert after[True] > 50, after
    assert not after[False], after
    assert profiler.stats()["span_links"]["threads"] == 2
    going = False
    for thread in threads:
        thread.join()
    assert profiler.stats()["span_links"]["threads"] == 0
    profiler.stop()
        """,
        env=QUIET,
    )
    assert done.stderr == ""
