"""A sample from a native program is linked only to the span that its thread publishes."""

import bisect
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
from samplers import spawned

from otel_kprofiler.bpf import ContextPlace
from otel_kprofiler.model import OFF_CPU
from otel_kprofiler.sampling import OffCpuConfig
from tests.commands import run_checked
from tests.further import further, further_of
from tests.interpreters import environment, find_pythons
from tests.needs import X86_64
from tests.thread_contexts import (
    LATEST_S,
    MODELS,
    MUSL_MODELS,
    NODEJS_SCHEMA,
    SCHEMA,
    SOURCES,
    WANTED,
    Program,
    Reader,
    compare,
    compile_with,
    find_overlong_waits,
    write_payload,
)
from tests.waiting import wait_until
from tests.windows import read_samples

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("sampling_host"),
    pytest.mark.timeout(300),
    X86_64,
]
THREADS = 24
PYTHONS = [python for python in find_pythons() if not python.version.startswith("3.15")]


def with_packages(environ):
    """Adds the OpenTelemetry packages' directory to an environment's PYTHONPATH."""
    packages = os.path.dirname(os.path.dirname(importlib.util.find_spec("click").origin))
    return {**environ, "PYTHONPATH": f"{environ['PYTHONPATH']}:{packages}"}


@pytest.mark.parametrize(
    ("compiler", "name"),
    further_of(
        [*product(["gcc"], MODELS), *product(["musl-gcc"], MUSL_MODELS)],
        [("gcc", "general_dynamic"), ("gcc", "opened_behind_others"), ("musl-gcc", "local_exec")],
    ),
)
def test_samples_are_linked_to_the_current_span_of_the_sampled_thread(tmp_path, compiler, name):
    with (
        Reader(b"program") as reader,
        Program(tmp_path, name, THREADS, compiler=compiler) as program,
    ):
        reader.collect_until(lambda: reader.count_links() >= WANTED)
        log = program.read_log()
        reader.drain()
        counts = compare(reader.samples, log)
        assert counts["right"] >= WANTED
        assert (counts["wrong"], counts["missing"]) == (0, 0)
        assert counts["none"] > WANTED / 10
        for sample in [sample for sample in reader.samples if sample.link]:
            assert reader.decode(sample) == {
                "span.hex": sample.link.span_id.hex(),
                "trace_flags": f"{sample.link.trace_id[0] & 1:02x}",
            }


def test_waits_are_linked_to_the_waiting_threads_span(tmp_path):
    with (
        Reader(b"program", off_cpu=OffCpuConfig(samples_per_second=500)) as reader,
        Program(tmp_path, "descriptor", THREADS) as program,
    ):
        reader.collect_until(lambda: reader.count_links(OFF_CPU) >= 500)
        log = program.read_log()
        reader.drain()
        counts = compare([sample for sample in reader.samples if sample.kind is OFF_CPU], log)
        assert counts["right"] >= 500
        assert counts["wrong"] == 0
        assert not find_overlong_waits(reader.samples)


def test_thread_contexts_with_an_unsupported_schema_are_not_read(tmp_path):
    extra = {**SCHEMA, "threadlocal.schema_version": "go_pprof_labels_v1"}
    with Reader(b"program") as reader, Program(tmp_path, "local_exec", 4, extra):
        reader.collect_until(lambda: len(reader.samples) > 1000)
        assert reader.count_links() == 0


@pytest.fixture
def run(tmp_path):
    with contextlib.ExitStack() as stack:

        def run_program(name, kind, extra, *sources):
            words = ["gcc", "-O2", "-rdynamic", "-pthread", "-o", tmp_path / name]
            compile_with([*words, *(SOURCES / source for source in (f"{name}.c", *sources))])
            command = tmp_path / name, write_payload(tmp_path, extra), kind
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(spawned(*command, **pipes))
            assert process.stdout.readline() == b"ready\n"
            return process

        yield run_program


@pytest.fixture
def run_hostile(run):
    return lambda kind: run("hostile", kind, None, "variable.c")


@pytest.mark.parametrize("kind", ["far", *further("whole", "early")])
def test_a_context_in_the_v8_heap_is_found(run, kind):
    with Reader(b"heap") as reader:
        run("heap", kind, NODEJS_SCHEMA)
        reader.collect_until(lambda: reader.count_links() > 500)
        assert {sample.link.span_id for sample in reader.samples if sample.link} == {b"\7" * 8}


@pytest.mark.parametrize(
    "kind",
    [
        "loop", "wild_value",
        *further("none", "other", "undefined", "number", "field", "too_far", "odd", "wild_table"),
    ],
)  # fmt: skip
def test_v8_heap_objects_that_are_not_contexts_yield_no_span(run, kind):
    with Reader(b"heap") as reader:
        pid = run("heap", kind, NODEJS_SCHEMA).pid
        reader.collect_until(lambda: len(reader.samples) > 200)
        count = len(reader.samples)
        reader.collect_until(lambda: len(reader.samples) > count + 500)
        assert not [sample for sample in reader.samples if sample.link or sample.context]
        assert reader.sampler.contexts.release(pid)  # the process was registered


@pytest.mark.parametrize("kind", ["itself", *further("none", "wild", "kernel", "invalid")])
def test_pointers_that_do_not_lead_to_a_context_yield_no_span(run_hostile, kind):
    with Reader(b"hostile") as reader:
        run_hostile(kind)
        reader.collect_until(lambda: len(reader.samples) > 1500)
        assert not [sample for sample in reader.samples if sample.link or sample.context]


def test_releasing_a_process_does_not_affect_spans_of_adjacent_pids(run_hostile):
    with Reader(b"hostile") as reader:
        pid = run_hostile("long").pid
        reader.collect_until(reader.count_links)
        for other in (pid + 32768, pid ^ 1):
            reader.sampler.contexts.register(other, 1, 1, ContextPlace(-8))
            assert reader.sampler.contexts.release(other)
        reader.drain()
        count = reader.count_links()

        def has_more():  # contexts.look() would register the process again
            reader.drain()
            return reader.count_links() >= count + 100

        wait_until(has_more, LATEST_S)


@pytest.mark.parametrize(("kind", "kept"), [("long", 612), ("end_of_memory", 0)])
def test_attributes_are_truncated_if_they_are_too_long_or_unmapped(run_hostile, kind, kept):
    with Reader(b"hostile") as reader:
        run_hostile(kind)
        reader.collect_until(lambda: reader.count_links() > 500)
        linked = [sample for sample in reader.samples if sample.link]
        assert {len(sample.context) - 2 for sample in linked} == {kept}
        assert {sample.link.span_id for sample in linked} == {b"\7" * 8}


@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs, the second without interrupts")
def test_a_record_being_changed_by_another_thread_yields_no_span(run_hostile):
    with Reader(b"hostile", pin_cpu_ids=(0,)) as reader:
        process = run_hostile("changing")

        def is_dropped():
            linked = [sample.time_ns for sample in reader.samples if sample.link]
            return linked and any(
                sample.tid == process.pid and sample.time_ns > linked[0] and not sample.link
                for sample in reader.samples
            )

        reader.collect_until(is_dropped)


def test_a_program_does_not_inherit_the_span_from_before_exec(run_hostile):
    with Reader(b"hostile") as reader:
        process = run_hostile("exec")
        reader.collect_until(reader.count_links)
        process.stdin.write(b"\n")
        process.stdin.flush()
        reader.collect_until(lambda: len({sample.exec_id for sample in reader.samples}) == 2)
        first = min(sample.exec_id for sample in reader.samples)
        of_first = [sample for sample in reader.samples if sample.exec_id == first]
        assert any(sample.link for sample in of_first)
        count = len(reader.samples)
        reader.collect_until(lambda: len(reader.samples) > count + 500)
        assert not [sample for sample in reader.samples if sample.link and sample.exec_id != first]


@pytest.mark.parametrize(
    "python",
    [*further(*((each,) for each in PYTHONS[:-1])), *PYTHONS[-1:]],
    ids=lambda python: python.version,
)
def test_samples_from_python_services_are_linked_to_the_published_span(tmp_path, python):
    notes = tmp_path / "notes"
    command = [python.command, "-m", "tests.published_spans", notes]
    options = {"stdin": subprocess.PIPE, "env": with_packages(environment())}
    with Reader(b"published") as reader, spawned(*command, **options) as service:
        reader.collect_until(lambda: reader.count_links() >= WANTED)
        service.communicate(timeout=60)
        assert service.returncode == 0
        reader.drain()
    threads = json.loads(notes.read_text())
    first_ns = min(sample.time_ns for sample in reader.samples if sample.link)
    counts = Counter()
    for sample in reader.samples:
        of_thread = threads.get(str(sample.tid), [])
        at = bisect.bisect_right(of_thread, sample.time_ns, key=lambda note: note[0]) - 1
        if at < 0 or sample.time_ns < first_ns or sample.time_ns >= of_thread[at][1]:
            continue  # the thread is changing its context
        expected = of_thread[at][2]
        link = sample.link and (sample.link.trace_id + sample.link.span_id).hex()
        counts["right" if link == expected else "wrong" if link else "missing"] += 1
        if link:
            attributes = reader.decode(sample)
            assert attributes["endpoint"] == "GET /"
            assert attributes["otel_kprofiler.local_root_span.name"] in {"outer", "task"}
    assert counts["wrong"] == 0, counts
    assert counts["right"] > WANTED / 2, counts
    assert counts["missing"] <= counts["right"] / 200, counts


def record(pid, out):
    """Records a process until enough samples have a span, and returns these samples."""
    for duration in ("2s", "8s", "30s"):
        run_checked("record", "--force", "-F", 499, "-d", duration, "-p", pid, "-o", out)
        linked = [sample for _, sample in read_samples(out) if sample.link]
        if len(linked) > 20:
            break
    return linked


def test_recordings_contain_the_endpoints_and_labels_of_python_services(tmp_path):
    notes = tmp_path / "notes"
    command = [sys.executable, "-m", "tests.published_spans", notes]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as service:
        linked = record(service.pid, tmp_path / "out.otlp")
        service.communicate(timeout=60)
    spans = {link for of_thread in json.loads(notes.read_text()).values() for *_, link in of_thread}
    assert len(linked) > 20
    assert {(sample.link.trace_id + sample.link.span_id).hex() for sample in linked} <= spans
    assert {sample.link.local_root for sample in linked} == {"outer", "task"}
    for sample in linked:
        labels = dict(sample.labels)
        assert int(labels.pop("trace_flags"), 16) & 1
        assert labels == {"endpoint": "GET /"}


@pytest.mark.long
def test_recordings_contain_the_spans_and_attributes_of_native_programs(tmp_path):
    with Program(tmp_path, "general_dynamic", 4) as program:
        linked = record(program.pid, tmp_path / "out.otlp")
        log = program.read_log()
    spans = {(trace, span) for lines in log.values() for _, trace, span in lines}
    assert len(linked) > 20
    assert {sample.link[:2] for sample in linked} <= spans
    assert all(dict(sample.labels)["span.hex"] == sample.link.span_id.hex() for sample in linked)
    assert {dict(sample.labels)["trace_flags"] for sample in linked} == {"00", "01"}
