"""For perf events other than the clock, the sample values sum to the number of events."""

import json
import math
import os
import shutil
import subprocess
import sys
import time

import pytest
from samplers import sampling

from otel_kprofiler.cli.record import command
from otel_kprofiler.host import EventSpec
from otel_kprofiler.model import LossCause
from tests.commands import invoke

pytestmark = pytest.mark.live

PAGES, MOVES, SLEEPS = 20_000, 1_000, 2_000
TOLERANCE = 0.02
LOAD = f"""
import mmap, os, sys, time
with open("/proc/self/comm", "w") as comm:
    comm.write("events_load")
memory = mmap.mmap(-1, {PAGES} * mmap.PAGESIZE)
memory.madvise(mmap.MADV_NOHUGEPAGE)
def touch():
    for page in range({PAGES}):
        memory[page * mmap.PAGESIZE] = 1
def move():
    for number in range({MOVES}):
        os.sched_setaffinity(0, {{number % 2}})
def sleep():
    for _ in range({SLEEPS}):
        time.sleep(1e-5)
for _ in range(int(sys.argv[1])):
    memory.madvise(mmap.MADV_DONTNEED)
    touch()
if os.cpu_count() > 1:
    move()
sleep()
"""


def record(path, *options, run=()):
    return subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", "record", *options, "-o", path, "--force",
         *(("--", *run) if run else ())],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def report(path, *options):
    done = subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", "report", "--json", *options, path],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return {part["kind"]: part for part in json.loads(done.stdout)["kinds"]}


def count_touched(part):
    """Returns the highest page-fault self count, which belongs to the function touching pages."""
    return max(group["self"] for group in part["groups"])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Returns the reports of a workload, and perf's counts for the same run."""
    if shutil.which("perf") is None:
        pytest.skip("perf is not installed (package linux-perf)")
    directory = tmp_path_factory.mktemp("events")
    counts, path = directory / "counts", str(directory / "events.otlp")
    names = ("page-faults", "context-switches", "cpu-migrations")
    done = record(
        path,
        "-c", "1", *(word for name in names for word in ("-e", name)),
        run=("perf", "stat", "-x", ",", "-o", counts, "-e", ",".join(names),
             sys.executable, "-c", LOAD, "1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "accounting gap" not in done.stderr
    assert "lost 0" in done.stderr
    rows = [line.split(",") for line in counts.read_text().splitlines() if line[:1].isdigit()]
    by_perf = {row[2].partition(":")[0]: int(row[0]) for row in rows}
    return report(path, "--by", "process"), report(path), by_perf


def test_each_recorded_event_is_a_separate_sample_kind(compared):
    assert compared[0].keys() == {"page_faults", "context_switches", "cpu_migrations"}


@pytest.mark.parametrize("name", ["page-faults", "context-switches", "cpu-migrations"])
def test_event_counts_match_perf(compared, name):
    by_process, _, by_perf = compared
    kind = name.replace("-", "_")
    if name == "cpu-migrations" and os.cpu_count() == 1:
        pytest.skip("needs two CPUs, so that threads migrate")
    groups = by_process[kind]["groups"]
    ours = sum(group["self"] for group in groups if not group["name"].startswith("perf ("))
    assert by_perf[name] >= {"page-faults": PAGES, "cpu-migrations": MOVES - 1}.get(name, SLEEPS)
    assert ours == pytest.approx(by_perf[name], rel=TOLERANCE)


def test_page_faults_are_attributed_to_the_function_that_touched_the_page(compared):
    assert PAGES <= count_touched(compared[1]["page_faults"]) <= PAGES * 1.01


def test_period_and_frequency_sampling_yield_the_same_event_estimate():
    rounds = 20  # enough for the kernel to adapt the period, and for hundreds of samples
    events = EventSpec("page-faults", 64), EventSpec("minor-faults", rate=499)
    with sampling(samples_per_second=5, stacks="both", events=events) as sampler:
        samples = []
        with subprocess.Popen([sys.executable, "-c", LOAD, str(rounds)]) as process:
            while process.poll() is None:
                samples += sampler.drain()
                time.sleep(0.05)
        sampler.stop()
        samples += sampler.drain()
        counts = sampler.counts()
    assert process.returncode == 0
    every = rounds * PAGES
    for event in events:
        kind = event.kind
        assert not any(counts[kind.name].lost.values())
        of_kind = [sample for sample in samples if sample.kind == kind]
        ours = [sample.value for sample in of_kind if sample.tgid == process.pid]
        assert len(of_kind) < every / 2
        # A sample's value includes events caused by other processes on the same CPU.
        deviation = math.sqrt(sum(value**2 for value in ours))
        assert every - 5 * deviation <= sum(ours) <= every * 1.01 + 5 * deviation


def test_samples_that_do_not_fit_into_the_ring_buffer_are_counted():
    held = f"import sys\nsys.stdin.readline()\n{LOAD}"
    with (
        subprocess.Popen([sys.executable, "-c", held, "2"], stdin=subprocess.PIPE) as load,
        # A quarter of the ring is reserved for clock samples, enough for several seconds.
        sampling(
            samples_per_second=49,
            stacks="both",
            events=(EventSpec("page-faults", 1),),
            max_ring_bytes=1 << 18,
            target_pids=(load.pid,),
        ) as sampler,
    ):
        load.communicate(b"\n")
        assert load.returncode == 0
        sampler.stop()
        samples = sampler.drain()
        clock, counts = map(sampler.counts().get, ("on_cpu", "page_faults"))
    assert clock.received + counts.received == len(samples)
    assert clock.received
    assert not clock.lost, "events leave a quarter of the ring to other kinds"
    assert counts.lost[LossCause.RING_FULL] > 0
    assert counts.taken == counts.received + counts.lost[LossCause.RING_FULL]
    assert counts.taken + counts.missed >= PAGES


def test_the_help_lists_events_and_explains_why_some_are_unavailable():
    done = invoke(command, "-e", "help")
    assert "page-faults" in done.output
    assert ("(not available)" in done.output) == ("fix: " in done.output)


@pytest.mark.skipif(
    any(name.startswith("cpu") for name in os.listdir("/sys/bus/event_source/devices")),
    reason="the processor has performance counters",
)
def test_an_event_that_needs_unavailable_counters_is_rejected_before_recording(tmp_path):
    path = tmp_path / "x.html"
    done = record(path, "-e", "cycles", "-d", "1s")
    assert done.returncode == 3
    assert "error: cycles cannot be counted" in done.stderr
    assert "pmu=on" in done.stderr
    assert not path.exists()
