"""Samples from Go programs have exactly the labels and the span of their goroutine."""

import logging
import os
import shutil
import subprocess
from collections import Counter, defaultdict

import pytest
from samplers import spawned

from otel_kprofiler.model import OFF_CPU, ON_CPU
from otel_kprofiler.sampling import OffCpuConfig
from tests.agents import Agent, ask_agent
from tests.further import further_between, further_of
from tests.needs import X86_64
from tests.servers import free_port
from tests.thread_contexts import SOURCES, WANTED, Reader, Service, write_payload

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("sampling_host"),
    pytest.mark.timeout(300),
    X86_64,
    pytest.mark.skipif(shutil.which("go") is None, reason="needs go"),
]
GO_SCHEMA = {"threadlocal.schema_version": "go_pprof_labels_v1"}
GOROUTINES = 50
OLD = ("1.21.0", "1.21.13", "1.22.12", "1.23.12", "1.24.0", "1.24.13", "1.25.7")
BUILDS = {
    "static": ({"CGO_ENABLED": "0"}, ()),
    "stripped": ({"CGO_ENABLED": "0"}, ("-ldflags=-s -w",)),
    "pie": ({"CGO_ENABLED": "0"}, ("-buildmode=pie",)),
    "cgo": ({"CGO_ENABLED": "1"}, ("-tags=withcgo",)),
    "cgo-pie": ({"CGO_ENABLED": "1"}, ("-tags=withcgo", "-buildmode=pie")),
}


def build(directory, name="static", version="local", source="labels"):
    environ, options = BUILDS[name]
    path = directory / "goroutines"
    environ = {
        **os.environ,
        **environ,
        "GOTOOLCHAIN": version if version == "local" else f"go{version}",
    }
    done = subprocess.run(
        ["go", "build", *options, "-o", path, f"./{source}"],
        cwd=SOURCES / "go", env=environ, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode and "download go" in done.stderr:
        pytest.skip(f"Go {version} cannot be downloaded")
    assert done.returncode == 0, done.stderr
    return path


class Goroutines(Service):
    """A running program whose goroutines log the labels that they set."""

    def __init__(self, program, directory, extra=None):
        payload = "-" if extra is None else write_payload(directory, extra)
        log = directory / "log"
        super().__init__([program, payload, log, str(GOROUTINES)], log)


def compare(reader, log, kind=ON_CPU):
    """Checks the samples' links against the goroutines' log; counts samples by outcome."""
    spans, threads = {}, defaultdict(list)
    for tid, lines in log.items():
        for times, trace, span in lines:
            spans[span] = (tid, trace, times)
            if tid:
                threads[tid].append(times)
    samples = [sample for sample in reader.samples if sample.kind is kind]
    first_ns = min(sample.time_ns for sample in samples if sample.link)
    counts = Counter()
    for sample in samples:
        # A wait's end is reported late, when the thread may have new labels, so use the midpoint.
        wait = sample.wait
        time_ns = wait.start_ns + wait.duration_ns // 2 if wait else sample.time_ns
        if sample.link:
            tid, trace, (begin, _, _, end) = spans[sample.link.span_id]
            labels = set(reader.decode(sample).values())
            is_right = (
                begin <= time_ns <= end
                and sample.link.trace_id == trace
                and tid in {0, sample.tid}
                and labels <= {str(int.from_bytes(sample.link.span_id, "big"))}
            )
            counts["right" if is_right else "wrong"] += 1
            counts["labels"] += len(labels)
        elif time_ns >= first_ns:
            times = threads.get(sample.tid, ())
            is_inside = any(since <= time_ns <= until for _, since, until, _ in times)
            counts["missing" if is_inside else "none"] += 1
    return counts


def check(directory, program, extra=None):
    with Reader(b"goroutines") as reader, Goroutines(program, directory, extra) as service:
        service.wait_ready()
        reader.collect_until(lambda: reader.count_links() >= WANTED)
        log = service.read_log()
        reader.drain()
    counts = compare(reader, log)
    assert counts["right"] >= WANTED, counts
    assert counts["wrong"] == 0, counts
    assert counts["missing"] <= counts["right"] / 100, counts  # a goroutine was being preempted
    assert counts["none"] > 0, counts
    assert counts["labels"] > WANTED / 2, counts


@pytest.mark.parametrize("name", further_of(BUILDS, ("static",)))
def test_samples_carry_the_labels_of_their_goroutine(tmp_path, name):
    check(tmp_path, build(tmp_path, name))


def test_goroutine_labels_are_read_from_programs_that_announce_them(tmp_path):
    check(tmp_path, build(tmp_path), GO_SCHEMA)


@pytest.mark.long
@pytest.mark.parametrize("version", OLD)
def test_labels_are_read_for_each_supported_go_version(tmp_path, version):
    check(tmp_path, build(tmp_path, version=version))


def test_waits_carry_the_labels_of_their_goroutine(tmp_path):
    off_cpu = OffCpuConfig(samples_per_second=5000)
    program = build(tmp_path)
    with Reader(b"goroutines", off_cpu=off_cpu) as reader, Goroutines(program, tmp_path) as service:
        service.wait_ready()
        reader.collect_until(lambda: reader.count_links(OFF_CPU) >= 200)
        log = service.read_log()
        reader.drain()
    counts = compare(reader, log, OFF_CPU)
    assert counts["right"] >= 200, counts
    assert counts["wrong"] == 0, counts


@pytest.fixture
def unsupported(tmp_path):
    """Runs a program that declares a Go version whose layout is unknown."""
    path = build(tmp_path)
    content = path.read_bytes()
    at = content.index(b"\xff Go buildinf:")
    size = content[at + 32]
    assert content[at + 33 : at + 36] == b"go1"
    changed = b"go1.99.9".ljust(size, b" ")
    path.write_bytes(content[: at + 33] + changed + content[at + 33 + size :])
    with Goroutines(path, tmp_path) as service:
        service.wait_ready()
        yield service


def test_programs_built_with_an_unsupported_go_version_have_no_labels(unsupported, caplog):
    caplog.set_level(logging.INFO)
    with Reader(b"goroutines") as reader:
        reader.collect_until(lambda: len(reader.samples) > 500 and reader.contexts.unread.remarks())
        assert not [sample for sample in reader.samples if sample.link or sample.context]
        reader.contexts.unread.count(1, "goroutine labels", "go1.99.9 is not supported")
        (remark,) = reader.contexts.unread.remarks()
    assert remark == "goroutine labels of 2 processes not read: go1.99.9 is not supported"
    (line,) = [text for text in caplog.messages if "goroutine" in text]
    assert line == (
        f"goroutine labels of process {unsupported.pid} were not read: go1.99.9 is not supported"
    )


AGENT = """
receivers: {{kprofiler: {{reporter_interval: 1s, stacks: both, target_pids: [{pid}]}}}}
exporters: {{debug: {{}}}}
service:
  health: {{endpoint: "{health}"}}
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [debug]}}}}
"""


def test_the_agent_counts_programs_built_with_an_unsupported_go_version(unsupported, tmp_path):
    health = f"127.0.0.1:{free_port()}"
    with Agent(tmp_path, AGENT.format(pid=unsupported.pid, health=health)) as agent:
        unread = agent.wait_until(lambda: ask_agent(health, "/status")[1].get("unread_contexts"))
    assert unread == {"goroutine labels: go1.99.9 is not supported": 1}


@pytest.mark.parametrize(
    "kind", further_between(["wild", "kernel", "itself", "long", "huge", "many"])
)
def test_hostile_labels_are_limited_in_size_and_yield_no_link(tmp_path, kind):
    path = build(tmp_path, source="hostile")
    with (
        Reader(b"goroutines") as reader,
        spawned(path, kind, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout.readline() == b"ready\n"
        reader.collect_until(lambda: len(reader.samples) > 500)
        assert reader.sampler.contexts.release(process.pid)  # the process was registered
    contexts = [sample.context for sample in reader.samples if sample.context]
    assert all(len(context) <= 2 + 612 for context in contexts)
    assert not [sample for sample in reader.samples if sample.link]
    assert bool(contexts) == (kind in {"long", "many"})
