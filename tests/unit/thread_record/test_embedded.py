"""Services with the embedded profiler publish spans by default, even without privileges."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the library is for x86-64"),
]
SERVICE = """
    import contextvars, logging, os, sys
    from opentelemetry.sdk.trace import TracerProvider
    from otel_kprofiler import KernelProfiler
    from otel_kprofiler.processes import read_process_context
    from tests.thread_record import read_record

    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    plain = contextvars.ContextVar.__dict__["set"]
    tracer = TracerProvider().get_tracer("test")

    def is_announced():
        extra = read_process_context(os.getpid()).extra
        return extra.get("threadlocal.schema_version") == "tlsdesc_v1_dev"

    def check():
        with tracer.start_as_current_span("span") as span:
            context = span.get_span_context()
            assert read_record()[:2] == (context.trace_id, context.span_id)
"""


def run(code, *, privileges=False, **environ):
    wrapper = [] if privileges else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    text = textwrap.dedent(SERVICE) + textwrap.dedent(code)
    done = subprocess.run(
        [*wrapper, sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        env={**os.environ, "OTEL_PROFILES_EXPORTER": "console", "OTEL_SERVICE_NAME": "svc"}
        | environ,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("privileges", [False, True])
def test_spans_are_published_by_default(privileges):
    run(
        """
        profiler = KernelProfiler.from_env().start()
        check()
        assert is_announced()
        of_threads = profiler.stats()["thread_contexts"]
        assert of_threads == {"published": True, "problem": "", "failures": 0}
        profiler.stop()
        check()
        assert is_announced()
        """,
        privileges=privileges,
    )


@pytest.mark.parametrize("name", ["PUBLISH_THREAD_CONTEXTS", "PUBLISH_CONTEXT"])
def test_no_hooks_are_installed_if_the_service_disables_publishing(name):
    run(
        """
        profiler = KernelProfiler.from_env().start()
        assert contextvars.ContextVar.__dict__["set"] is plain
        context = read_process_context(os.getpid())
        assert context is None or not is_announced()
        of_threads = profiler.stats()["thread_contexts"]
        assert of_threads == {"published": False, "problem": "", "failures": 0}
        """,
        **{f"OTEL_KPROFILER_{name}": "false"},
    )


def test_a_disabled_sdk_publishes_nothing():
    run(
        """
        KernelProfiler.from_env().start()
        assert contextvars.ContextVar.__dict__["set"] is plain
        """,
        OTEL_SDK_DISABLED="true",
    )


def test_the_log_explains_once_why_spans_are_not_published():
    log = run(
        """
        sys.modules["otel_kprofiler.thread_record._record_x86_64"] = None
        profiler = KernelProfiler.from_env().start()
        profiler.start()
        assert "no library for x86_64" in profiler.stats()["thread_contexts"]["problem"]
        assert read_process_context(os.getpid()).resource["service.name"] == "svc"
        assert not is_announced()
        """
    )
    (line,) = [line for line in log.splitlines() if "current span of each" in line]
    assert line.startswith(
        "INFO cannot publish the current span of each thread: no library for x86_64"
    )
    assert "fix: " in line


def test_a_process_sampled_by_an_ancestors_profiler_still_publishes_its_spans():
    descendant = """
        profiler = KernelProfiler.from_env().start()
        assert profiler.stats()["state"] == "stopped"
        assert profiler.stats()["problem"].startswith(f"sampled by process {os.getppid()} ")
        context = read_process_context(os.getpid())
        assert context.resource["service.name"] == "below"
        assert "otel_kprofiler.target" not in context.extra
        assert is_announced()
        check()
    """
    run(
        """
        import subprocess
        from otel_kprofiler.sdk import publish_process_context
        from otel_kprofiler.sdk.ancestors import SAMPLES_DESCENDANTS

        publish_process_context({"service.name": "svc"}, SAMPLES_DESCENDANTS)
        subprocess.run(
            [sys.executable, "-c", os.environ["DESCENDANT"]], check=True, timeout=60,
            env={**os.environ, "OTEL_SERVICE_NAME": "below"},
        )
        """,
        DESCENDANT=textwrap.dedent(SERVICE) + textwrap.dedent(descendant),
    )


def test_the_error_for_an_interpreter_without_the_cpython_api_suggests_a_fix():
    log = run(
        """
        import ctypes
        from otel_kprofiler import thread_context
        from otel_kprofiler.errors import HostError

        del ctypes.pythonapi  # which PyPy lacks
        assert "needs CPython" in KernelProfiler.from_env().start().stats()["problem"]
        try:
            thread_context.start()
        except HostError as error:
            assert "needs CPython" in error.message
        else:
            raise AssertionError("started without the API")
        """
    )
    (line,) = log.splitlines()
    assert line.startswith("WARNING cannot collect kernel profiles: ")
    assert "fix: run CPython 3.11 or later" in line


def test_a_warning_explains_once_why_spans_have_no_links():
    log = run(
        """
        from otel_kprofiler.host import Access
        from otel_kprofiler.sdk.own_contexts import OwnContexts
        contexts = OwnContexts(Access(), None, follows_spans=False)
        contexts.prepare()
        contexts.prepare()
        assert contexts.as_dict() == {
            "possible": False,
            "problem": "the sampler cannot read thread contexts without the kernel's BTF",
        }
        """
    )
    (line,) = [line for line in log.splitlines() if "will not be linked" in line]
    assert line.startswith("WARNING samples will not be linked to spans: the sampler cannot read")


def test_a_service_reports_that_searching_its_memory_takes_too_long():
    run(
        """
        from otel_kprofiler.host import Access
        from otel_kprofiler.model import ON_CPU, RawSample
        from otel_kprofiler.sdk import own_contexts
        from otel_kprofiler.processes import SearchTooLongError

        def search(*_):
            raise SearchTooLongError

        own_contexts.find_place = search
        contexts = own_contexts.OwnContexts(Access(), object(), follows_spans=False)
        contexts.prepare()
        for pid in (os.getpid() + 1, os.getpid()):
            assert contexts.as_dict() == {"possible": True, "problem": ""}
            sample = RawSample(ON_CPU, 0, 0, 0, pid, pid, 5, 0, b"", (), (), None)
            contexts.look([sample])
        assert contexts.as_dict()["problem"] == "searching this process's memory is taking too long"
        """
    )
