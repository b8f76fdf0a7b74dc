"""Samples are linked to the spans that other projects' writers publish, and to no other span."""

import pytest

from otel_kprofiler.processes import thread_contexts
from tests import java_writer, nodejs_writer, rust_writer
from tests.further import further
from tests.needs import X86_64
from tests.thread_contexts import WANTED, Reader, Service, compare

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("sampling_host"),
    pytest.mark.timeout(600),
    X86_64,
]
THREADS = 8


def check(name, words, log, missing=0.0):
    """Runs a program, and checks that samples carry the spans and attributes that the program logs.

    Up to a fraction ``missing`` of the samples in spans may lack a link, because garbage collectors
    move the objects that are read. Yields each link and its trace flags.
    """
    with Reader(name.encode()) as reader, Service(words, log) as service:
        reader.collect_until(lambda: reader.count_links() >= WANTED)
        lines = service.read_log()
        reader.drain()
    counts = compare(reader.samples, lines)
    assert counts["right"] >= WANTED
    assert counts["wrong"] == 0, counts
    assert counts["missing"] <= missing * counts["right"], counts
    assert counts["none"] > WANTED / 10
    for sample in reader.samples:
        if sample.link:
            span = sample.link.span_id.hex()
            labels = reader.decode(sample)
            flags = labels.pop("trace_flags")
            assert labels == {"datadog.local_root_span_id": span, "span.hex": span}
            yield sample.link, flags


@pytest.mark.parametrize("name", ["program", *further("opener")])
def test_samples_carry_the_span_published_by_libdd_otel_thread_ctx(tmp_path, name):
    rust_writer.build(tmp_path)
    log = tmp_path / "log"
    words = [tmp_path / name, log, str(THREADS), tmp_path / "libspans.so"]
    for link, flags in check(name, words, log):
        assert flags == f"{link.trace_id[0] & 1:02x}"


def test_samples_are_linked_to_the_span_published_by_ddprof(tmp_path):
    log = tmp_path / "log"
    words = java_writer.command(tmp_path, log, THREADS)
    # ddprof does not set flags
    assert {flags for _, flags in check("program", words, log)} == {"00"}


@pytest.mark.parametrize("writer", nodejs_writer.WRITERS)
def test_samples_carry_the_span_published_by_pprof_for_nodejs(tmp_path, monkeypatch, writer):
    for name in ("_AGAIN_S", "_SHARE"):  # search for the variable at each check
        monkeypatch.setattr(thread_contexts, name, 0)
    log = tmp_path / "log"
    words = nodejs_writer.command(writer, log, THREADS)
    for link, flags in check("program", words, log, missing=0.01):
        assert flags == ("00" if writer == "pprof-wrapped" else f"{link.trace_id[0] & 1:02x}")
