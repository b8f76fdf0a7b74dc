"""Links of services in short, against what these know of their spans; `make test-span-truth`."""

import subprocess
import sys
import textwrap

import pytest

from tests.spans.__main__ import run

pytestmark = pytest.mark.live


SHORT = (
    "threads", "contexts", "asyncio", "flask", "fastapi uvloop", "django uvloop", "asgiref",
    "celery threads", "multiprocessing", "wrapped", "wrapped asyncio",
)  # fmt: skip
ENOUGH = 50


@pytest.mark.parametrize("name", SHORT)
def test_samples_are_linked_to_the_span_that_is_current(name):
    outcome, seconds = run(name, 0.5), 2
    while outcome.right < ENOUGH and seconds < 20:  # a busy machine
        outcome += run(name, seconds)
        seconds *= 2
    assert outcome.wrong == 0
    assert outcome.right >= ENOUGH
    assert outcome.linked_share >= 0.99


@pytest.mark.parametrize("name", ["asgiref", "contexts"])
def test_hooks_leave_out_links_but_give_no_wrong_one(name):
    outcome = run(name, 1, hooks=True)
    assert outcome.wrong == 0
    assert outcome.right > 0


def test_nothing_is_hooked():
    code = """
        import asyncio, concurrent.futures.thread as executor
        from opentelemetry import context
        from otel_kprofiler import KernelProfiler, ProfilerProvider

        def hookable():
            return context._RUNTIME_CONTEXT, asyncio.Handle._run, executor._WorkItem.run

        before = hookable()
        with KernelProfiler(ProfilerProvider(shutdown_on_exit=False)) as profiler:
            stats = profiler.stats()
            assert stats["state"] == "running", stats
            assert stats["span_links"]["source"] == "interpreter", stats
            assert hookable() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
