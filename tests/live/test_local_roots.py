"""Samples from services carry the names of their local root spans."""

import json

import pytest
from services import run

from otel_kprofiler.cli.report import command
from tests.commands import invoke
from tests.windows import read_samples

pytestmark = pytest.mark.live

SERVICE = """
    import json, threading
    from concurrent.futures import ThreadPoolExecutor
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext, NonRecordingSpan, TraceFlags
    from opentelemetry.trace import set_span_in_context
    from otel_kprofiler import KernelProfiler

    profiler = KernelProfiler.from_env().start("raise")
    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))  # after the profiler
    tracer = trace.get_tracer("service")
    truth = {}

    def note(span, name):
        context = span.get_span_context()
        truth[f"{context.trace_id:032x} {context.span_id:016x}"] = name

    def application(environ, start_response):
        "A WSGI application, instrumented as frameworks are: the route is known after the start."
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        caller = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(1))
        parent = set_span_in_context(NonRecordingSpan(caller)) if environ["called"] else None
        with tracer.start_as_current_span(method, context=parent) as top:
            route = "/orders/{id}" if path.startswith("/orders/") else path
            name = f"{method} {route}"
            note(top, name)
            work(0.005)
            top.set_attribute("http.request.method", method)
            top.set_attribute("http.route", route)
            with tracer.start_as_current_span("query") as query:
                note(query, name)
                work(0.005)
                with tracer.start_as_current_span("parse") as parse:
                    note(parse, name)
                    work(0.005)
            work(0.005)
        start_response("200 OK", [])
        return [b""]

    def serve(number):
        for turn in range(60):
            path = ("/orders/%d" % turn, "/carts", "/")[number % 3]
            environ = {"REQUEST_METHOD": ("GET", "POST")[turn % 2], "PATH_INFO": path,
                       "called": turn % 3 == 0}
            list(application(environ, lambda status, headers: None))

    with tracer.start_as_current_span("batch job") as job:
        note(job, "batch job")
        profiler.flush_window(10_000)  # makes the profiler watch the late provider
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(serve, range(6)))
        with tracer.start_as_current_span("step") as step:
            note(step, "batch job")
            work(0.3)
    profiler.flush_window(10_000)
    print(json.dumps({"truth": truth, "stats": profiler.stats()["span_links"]}))
    profiler.stop()
"""


@pytest.mark.long
def test_every_sample_linked_to_a_span_contains_the_name_of_its_local_root(to_file):
    said = json.loads(run(SERVICE, env=to_file.env).stdout)
    truth, counts = said["truth"], said["stats"]["local_roots"]
    right, wrong, unnamed = 0, [], 0
    for _, sample in read_samples(to_file.path):
        if sample.link is None:
            continue
        name = truth[f"{sample.link.trace_id.hex()} {sample.link.span_id.hex()}"]
        count = len(sample.timestamps_unix_ns)
        if sample.link.local_root == name:
            right += count
        elif sample.link.local_root:
            wrong.append((sample.link.local_root, name))
        else:
            unnamed += count
    # Samples have the span's initial name if their window ended before the route was known.
    assert all(name.startswith(result) for result, name in wrong)
    assert len(wrong) <= 0.01 * right
    assert right > 1000
    assert unnamed <= 0.01 * right, "the job began before its provider was watched"
    assert counts["named"] == right + len(wrong)
    assert counts["failures"] == counts["forgotten_spans"] == 0
    report = invoke(command, "--json", "--by", "endpoint", to_file.path)
    (kind,) = json.loads(report.output)["kinds"]
    assert {one["name"] for one in kind["groups"]} >= {
        *(f"{method} {path}" for method in ("GET", "POST") for path in ("/orders/{id}", "/carts")),
        "batch job",
    }


FORKED = """
    import os
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import KernelProfiler

    trace.set_tracer_provider(TracerProvider())
    tracer = trace.get_tracer("service")
    profiler = KernelProfiler.from_env().start("raise")
    with tracer.start_as_current_span("parent's"):
        pid = os.fork()
        if not pid:
            while profiler.stats()["state"] != "running":
                time.sleep(0.01)
            work(0.4)
            with tracer.start_as_current_span("child's"):
                work(0.4)
        else:
            os.waitpid(pid, 0)
    profiler.stop()
    if not pid:
        os._exit(0)
"""


def test_samples_from_a_forked_child_have_the_local_root_active_at_fork(to_file):
    run(FORKED, env=to_file.env)
    spans = {sample.link for _, sample in read_samples(to_file.path) if sample.link}
    assert len(spans) == 2
    assert {link.local_root for link in spans} == {"parent's"}


@pytest.mark.long
def test_local_root_names_can_be_disabled(to_file):
    code = """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from otel_kprofiler import KernelProfiler

        provider = TracerProvider()
        trace.set_tracer_provider(provider)
        with KernelProfiler.from_env() as profiler:
            with trace.get_tracer("service").start_as_current_span("top"):
                work(0.3)
            assert "local_roots" not in profiler.stats()["span_links"]
        assert not provider._active_span_processor._span_processors
    """
    run(code, env={**to_file.env, "OTEL_KPROFILER_LOCAL_ROOT_NAMES": "false"})
    links = {sample.link for _, sample in read_samples(to_file.path)}
    assert any(links)
    assert not any(link.local_root for link in links if link)
