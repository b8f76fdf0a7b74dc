"""After a profiled service forks, the parent continues and children are profiled as configured."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from services import problems, run

from otel_kprofiler.otlp import read_profiles
from otel_kprofiler.sdk.provider import EXIT_TIMEOUT_MILLIS
from tests.further import further, further_of
from tests.waiting import wait_until

pytestmark = pytest.mark.live

# From 3.12 on, Python warns about every fork in a multithreaded process.
QUIET = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}

LINKED_THREADS = """
    import multiprocessing, subprocess, threading
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import (
        InMemoryProfileExporter, KernelProfiler, ProfilerProvider, SimpleProfileProcessor
    )

    exporter, going, inside = InMemoryProfileExporter(), True, []
    provider = ProfilerProvider(shutdown_on_exit=False)
    provider.add_profile_processor(SimpleProfileProcessor(exporter))
    profiler = KernelProfiler(provider, samples_per_second=499)
    profiler.start("raise")
    tracer = TracerProvider().get_tracer("t")

    def serve():
        with tracer.start_as_current_span("long"):
            inside.append(1)
            while going:
                os.listdir("/proc/self/task")

    def linked():
        "Samples of the other threads by whether they have a link, since the last call."
        assert provider.force_flush(60_000)
        windows = exporter.get_finished_windows()
        exporter.clear()
        counts = {True: 0, False: 0}
        for window in windows:
            for _, sample in window.samples:
                if sample.tid in tids:
                    counts[sample.link is not None] += len(sample.timestamps_unix_ns)
        return counts

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    tids = {thread.native_id for thread in threads}
    while len(inside) < 2:
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


@pytest.mark.parametrize("way", further_of(WAYS_TO_FORK, ("os.fork", "preexec_fn")))
def test_threads_in_the_parent_keep_their_span_links_after_a_fork(way):
    done = run(
        LINKED_THREADS
        + WAYS_TO_FORK[way]
        + """
    after, deadline = linked(), time.monotonic() + 60
    while after[True] <= 50 and time.monotonic() < deadline:
        time.sleep(0.2)
        after = {is_linked: after[is_linked] + count for is_linked, count in linked().items()}
    assert after[True] > 50, after
    assert not after[False], after
    going = False
    for thread in threads:
        thread.join()
    profiler.stop()
        """,
        env=QUIET,
    )
    assert problems(done.stderr) == []


CHILDREN = '''
import multiprocessing, os, sys, time
from otel_kprofiler import KernelProfiler

profiler = KernelProfiler.from_env().start("raise")

def child(_=None):
    """Run until this process was sampled; the profiler reports its samples at the end."""
    deadline = time.monotonic() + 60
    while profiler.stats()["state"] != "running" and profiler.stats()["problem"] == "":
        time.sleep(0.01)
        assert time.monotonic() < deadline
    def is_sampled():
        stats = profiler.stats()
        return stats["state"] != "running" or stats["account"].get("taken", 0) > 20
    end = time.thread_time() + 0.5
    while time.thread_time() < end or not is_sampled():
        os.listdir("/proc/self/task")
    account = profiler.stats()["account"]
    print(os.getpid(), account.get("taken", 0), time.monotonic(), flush=True)

def run(way, method):
    if way == "multiprocessing":
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
    elif way == "futures":
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            pool.submit(child).result()
    elif way == "billiard":
        import billiard
        process = billiard.Process(target=child)
        process.start()
        process.join()
    elif way == "billiard pool":
        from billiard.pool import Pool
        pool = Pool(1)
        pool.apply(child)
        pool.close()
        pool.join()
    else:
        pid = os.fork()
        if not pid:
            child()
            sys.exit()
        os.waitpid(pid, 0)

if __name__ == "__main__":
    run(*sys.argv[1:])
    print(time.monotonic())
'''

WAYS = [
    ("os.fork", ""),
    ("multiprocessing", "fork"),
    ("billiard pool", ""),
    *further(
        ("multiprocessing", "forkserver"),
        ("multiprocessing", "spawn"),
        ("futures", "fork"),
        ("billiard", ""),
    ),
]


@pytest.fixture
def children(tmp_path):
    """Returns a function that runs a service and returns the child's pid, samples and exit time."""

    def run_children(way, method, env):
        if way.startswith("billiard"):
            pytest.importorskip("billiard")
        script = tmp_path / "service.py"
        script.write_text(CHILDREN)
        env = {"OTEL_KPROFILER_SAMPLES_PER_SECOND": "499", **QUIET, **env}
        done = subprocess.run(
            [sys.executable, str(script), way, method],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert (done.returncode, problems(done.stderr)) == (0, [])
        pid, taken, exiting, gone = done.stdout.split()
        return int(pid), int(taken), float(gone) - float(exiting)

    return run_children


@pytest.mark.parametrize(("way", "method"), WAYS)
def test_the_last_window_from_a_forked_child_is_delivered(children, to_file, way, method):
    """Children of multiprocessing and billiard exit with os._exit, which skips atexit.

    The test is retried, because on a busy machine an export may outlast the exiting process's wait.
    """
    env = {**to_file.env, "OTEL_KPROFILER_REPORTER_INTERVAL": "60s"}
    for _ in range(5):
        pid, taken, exit_s = children(way, method, env)
        assert taken > 20, "the samples of half a second that were drained by then"
        if exit_s < EXIT_TIMEOUT_MILLIS / 1000:
            break
    assert to_file.pids()[pid] >= taken


@pytest.mark.parametrize(
    ("way", "method"),
    [("os.fork", ""), ("multiprocessing", "spawn"), *further(("multiprocessing", "forkserver"))],
)
def test_children_sampled_by_their_parent_do_not_sample_themselves(children, to_file, way, method):
    pid, taken, _ = children(way, method, {**to_file.env, "OTEL_KPROFILER_TARGET": "children"})
    assert taken == 0
    streams = {window.profiles[0].totals.stream_id for window in read_profiles(str(to_file.path))}
    assert len(streams) == 1
    assert to_file.pids()[pid] > 100


def test_a_profiler_stopped_in_a_child_does_not_start_in_the_childs_children(to_file):
    code = """
        import threading
        from otel_kprofiler import KernelProfiler
        profiler = KernelProfiler.from_env().start("raise")

        def in_child(work):
            if pid := os.fork():
                assert os.waitpid(pid, 0)[1] == 0
            else:
                work()
                os._exit(0)

        def stop():
            profiler.stop()
            in_child(lambda: print([thread.name for thread in threading.enumerate()], flush=True))

        in_child(stop)
    """
    assert run(code, env={**to_file.env, **QUIET}).stdout == "['MainThread']\n"


GUNICORN = """
import json, os, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler.sdk import KernelProfiler, read_process_context

IMPORTED
trace.set_tracer_provider(TracerProvider())
profiler = KernelProfiler.from_env().start("raise")

def app(environ, start_response):
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        os.listdir("/proc/self/task")
    ids = [
        trace.get_tracer_provider().resource.attributes["service.instance.id"],
        read_process_context(os.getpid()).resource["service.instance.id"],
    ]
    start_response("200 OK", [])
    return [json.dumps([profiler.stats()["state"], os.getpid(), *ids]).encode()]
"""


@pytest.mark.parametrize("first", ["profiler", *further("sdk")])
def test_gunicorn_workers_have_the_same_instance_id_as_their_traces(to_file, tmp_path, first):
    """The profiler and the SDK update the Resource in fork hooks, which run in import order."""
    sdk = "from otel_kprofiler import ProfilerProvider; ProfilerProvider()"
    (tmp_path / "shop.py").write_text(GUNICORN.replace("IMPORTED", sdk * (first == "profiler")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        bind = f"--bind=fd://{listener.fileno()}"
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--preload", "--workers=2", bind, "shop:app"],
            cwd=tmp_path,
            env={**os.environ, **to_file.env, **QUIET, "OTEL_KPROFILER_SAMPLES_PER_SECOND": "499"},
            stderr=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    answers = {}

    def ask(_):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}") as got:
            state, pid, *ids = json.load(got)
            answers[pid] = state, *ids

    try:
        # A single worker might handle all requests if they were sequential.
        with ThreadPoolExecutor(4) as clients:

            def are_running():
                assert server.poll() is None, server.stderr.read().decode()
                list(clients.map(ask, range(4)))
                states = {answer[0] for answer in answers.values()}
                return len(answers) >= 2 and states == {"running"}

            wait_until(are_running, 120, lambda: answers)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    published = {}
    for window in read_profiles(str(to_file.path)):
        for group in window.profiles[0].resources:
            attributes = group.resource.attributes
            published[attributes["process.pid"]] = attributes["service.instance.id"]
    for pid, (_, traced, in_context) in answers.items():
        assert published[pid] == traced == in_context
    assert len(set(published.values())) == len(published)


def test_an_explicit_resource_receives_the_instance_id_from_the_childs_traces():
    """An instance id shared with traces is replaced by the child's new id. Any other id is kept."""
    done = run(
        """
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from otel_kprofiler import ProfilerProvider

        shared, own = Resource.create(), Resource({"service.instance.id": "of its own"})
        providers = [ProfilerProvider(shared), ProfilerProvider(own)]
        trace.set_tracer_provider(TracerProvider(resource=shared))
        pid = os.fork()
        ids = [one.resource.attributes["service.instance.id"] for one in providers]
        traced = trace.get_tracer_provider().resource.attributes["service.instance.id"]
        assert ids == [traced, "of its own"], (ids, traced)
        assert bool(pid) == (traced == shared.attributes["service.instance.id"])
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
        """
    )
    assert problems(done.stderr) == []


def test_a_tracer_provider_set_after_startup_supplies_the_resource_of_the_next_window(to_file):
    run(
        """
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from otel_kprofiler.sdk import KernelProfiler, read_process_context

        profiler = KernelProfiler.from_env().start("raise")
        work(0.3)
        late = Resource.create({"service.name": "late"})
        trace.set_tracer_provider(TracerProvider(resource=late))
        assert profiler.flush_window(60_000)
        work(0.3)
        profiler.stop()
        assert read_process_context(os.getpid()).resource["service.name"] == "late"
        """,
        env={**to_file.env, "OTEL_SERVICE_NAME": "early", "OTEL_KPROFILER_REPORTER_INTERVAL": "1h"},
    )
    names = [
        group.resource.attributes["service.name"]
        for window in read_profiles(str(to_file.path))
        for group in window.profiles[0].resources
    ]
    assert names[0] == "early"
    assert names[-1] == "late"
    assert names == sorted(names)
