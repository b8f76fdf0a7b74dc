"""Spans published in thread contexts are read correctly on this kernel."""

import pytest

from otel_kprofiler.model import OFF_CPU, ON_CPU
from otel_kprofiler.sampling import OffCpuConfig
from tests.thread_contexts import GUEST_MODELS, Program, Reader, compare, find_overlong_waits

pytestmark = [pytest.mark.kernel, pytest.mark.one_boot]

THREADS = 4
ENOUGH = 200


@pytest.mark.parametrize("model", GUEST_MODELS)
def test_samples_are_linked_to_the_current_span_of_the_sampled_thread(tmp_path, model):
    """Samples are linked to the span that their thread publishes, in all TLS models."""
    with Reader(b"program") as reader, Program(tmp_path, model, THREADS) as program:
        reader.collect_until(lambda: reader.count_links() >= ENOUGH)
        log = program.read_log()
        reader.drain()
    counts = compare([sample for sample in reader.samples if sample.kind is ON_CPU], log)
    assert counts["right"] >= ENOUGH
    assert (counts["wrong"], counts["missing"]) == (0, 0), counts


def test_waits_are_linked_to_the_waiting_threads_span(tmp_path):
    """A wait is linked to its thread's span at the start of the wait, and ends before that span."""
    with (
        Reader(b"program", off_cpu=OffCpuConfig(samples_per_second=500)) as reader,
        Program(tmp_path, "descriptor", THREADS) as program,
    ):
        reader.collect_until(lambda: reader.count_links(OFF_CPU) >= ENOUGH)
        log = program.read_log()
        reader.drain()
    counts = compare([sample for sample in reader.samples if sample.kind is OFF_CPU], log)
    assert counts["right"] >= ENOUGH
    assert counts["wrong"] == 0, counts
    assert not find_overlong_waits(reader.samples)
