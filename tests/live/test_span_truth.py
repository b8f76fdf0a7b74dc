"""Span links match the span logs that services write. ``make test-span-truth`` runs more cases."""

import math
import subprocess
import sys
import textwrap

import pytest

from tests.further import further_of
from tests.spans.__main__ import run

pytestmark = pytest.mark.live


SHORT = (
    "threads", "contexts", "asyncio", "flask", "fastapi uvloop", "django uvloop", "asgiref",
    "celery threads", "multiprocessing", "wrapped", "wrapped asyncio",
)  # fmt: skip
FIRST = ("threads", "contexts", "asyncio", "fastapi uvloop", "asgiref", "wrapped")
ENOUGH = 50


def assert_linked(outcome, least):
    """Asserts that at least a fraction ``least`` of samples in spans is linked, within 5 sigma."""
    expected = (1 - least) * (outcome.right + outcome.unlinked)
    assert outcome.unlinked <= expected + 5 * math.sqrt(expected), outcome


def run_until_enough(name, source):
    outcome, seconds = run(name, 0.5, source), 2
    while outcome.right < ENOUGH and seconds < 20:  # the machine may be busy
        outcome += run(name, seconds, source)
        seconds *= 2
    assert outcome.right >= ENOUGH
    return outcome


@pytest.mark.parametrize("name", further_of(SHORT, FIRST))
def test_samples_are_linked_to_their_threads_current_span(name):
    outcome = run_until_enough(name, "interpreter")
    assert outcome.wrong == 0
    assert_linked(outcome, 0.99)


@pytest.mark.parametrize("name", [*further_of(SHORT, FIRST), "uvloop", "greenlets"])
def test_thread_records_identify_the_current_span(name):
    outcome = run_until_enough(name, "record")
    assert outcome.wrong == 0
    assert_linked(outcome, 0.98)


def test_reading_spans_from_the_interpreters_objects_installs_no_hooks():
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
