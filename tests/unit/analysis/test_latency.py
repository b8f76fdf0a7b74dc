"""Latency weights sum to the time during which at least one thread of a process ran."""

import json
import random
from collections import Counter

import pytest

from otel_kprofiler.analysis import LATENCY, load_samples, weigh_latency
from otel_kprofiler.cli import report
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import OFF_CPU, ON_CPU, WindowSample
from tests.commands import invoke
from tests.windows import make_stack, make_window, write_otlp

MS = 1_000_000
START = 1_790_000_000_000 * MS
PERIOD = 10 * MS


STACKS = {name: make_stack(name) for name in ("serial", "parallel", "other")}


def times(start_ms, end_ms, phase_ms, jitter_ms=0.0, seed=0):
    """Returns the times at which a CPU's timer samples a thread that runs continuously."""
    rng = random.Random(seed)
    return [
        START + round((at + rng.uniform(-jitter_ms, jitter_ms)) * MS)
        for at in (phase_ms + 10 * tick for tick in range(10_000))
        if start_ms <= at < end_ms
    ]


def row(name, tid, at, cpu=0):
    return WindowSample(STACKS[name], tid, "worker", cpu, None, at)


def window(*groups, kind=ON_CPU, period=PERIOD):
    processes = (
        ({"process.pid": pid, "process.executable.name": f"p{pid}"}, rows) for pid, rows in groups
    )
    return make_window(START, START + 100_000 * MS, *processes, kind=kind, period_ns=period)


def latencies(*windows):
    samples = weigh_latency(load_samples(windows))
    sums = Counter()
    for stack, weight in zip(samples.stacks, samples.weights(), strict=True):
        sums[samples.tables.stacks[stack].frames[0].function] += weight / MS
    return sums


def program(threads, jitter_ms=0.0):
    """Returns rows for 1 s on one thread, then 1 s on several threads with random timer phases."""
    rows = [row("serial", 1, times(0, 1000, 3.0, jitter_ms))]
    for number in range(threads):
        phase = 10 * random.Random(number).random()
        rows.append(
            row("parallel", number + 1, times(1000, 2000, phase, jitter_ms, number), number)
        )
    return rows


@pytest.mark.parametrize("threads", [1, 2, 8, 64])
@pytest.mark.parametrize("jitter_ms", [0.0, 1.0])
def test_serial_and_parallel_phases_of_equal_duration_have_equal_latency_weight(threads, jitter_ms):
    sums = latencies(window((7, program(threads, jitter_ms))))
    assert sums["serial"] == pytest.approx(1000, abs=20)
    assert sums["parallel"] == pytest.approx(1000, abs=30)


def test_threads_of_other_processes_do_not_affect_the_latency_weight():
    others = [row("other", 9, times(0, 1000, 1.0))]
    sums = latencies(window((7, [row("serial", 1, times(0, 1000, 3.0))]), (9, others)))
    assert sums == {"serial": 1000, "other": 1000}


def test_a_thread_that_migrates_between_cpus_counts_as_one_thread():
    rows = [row("serial", 1, times(0, 500, 3.0)), row("serial", 1, times(500, 1000, 8.0), cpu=1)]
    assert latencies(window((7, rows))) == {"serial": 1000}


def test_threads_of_a_process_are_counted_across_windows():
    first = window((7, [row("parallel", 1, times(0, 1000, 3.0))]))
    second = window((7, [row("parallel", 2, times(0, 1000, 6.0))]))
    assert latencies(first, second)["parallel"] == pytest.approx(1000, abs=10)


def test_only_on_cpu_samples_are_weighted_by_latency():
    waits = window((7, [row("other", 1, times(0, 1000, 1.0))]), kind=OFF_CPU, period=0)
    assert weigh_latency(load_samples([window((7, program(2))), waits])).kinds == (LATENCY,)
    assert "other" not in latencies(window((7, program(2))), waits)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (window((7, [row("other", 1, [START])]), kind=OFF_CPU, period=0), "no on-CPU samples"),
        (window((7, [row("other", 1, [START])._replace(values=[5])])), "contains only totals"),
        (window((7, [row("other", 1, [START])]), period=0), "contains only totals"),
    ],
)
def test_latency_weighting_is_rejected_for_profiles_without_timestamps(profile, message):
    with pytest.raises(KProfilerError, match=message) as refused:
        weigh_latency(load_samples([profile]))
    assert refused.value.hint


@pytest.fixture
def path(tmp_path):
    return write_otlp(tmp_path / "x.otlp", window((7, program(2))))


def run(*words, status=0):
    return invoke(report.command, *words, status=status).output


def test_reports_can_be_weighted_by_latency(path, tmp_path):
    (kind,) = json.loads(run("--weight", "latency", "--json", path))["kinds"]
    groups = {group["name"]: group for group in kind["groups"]}
    assert (kind["kind"], kind["unit"], kind["samples"]) == ("latency", "nanoseconds", 300)
    assert groups["serial"]["self"] == pytest.approx(1000 * MS, rel=0.03)
    assert groups["parallel"]["self"] == pytest.approx(1000 * MS, rel=0.03)
    (plain,) = json.loads(run("--json", path))["kinds"]
    results = {group["name"]: group["self"] for group in plain["groups"]}
    assert results == {"serial": 1000 * MS, "parallel": 2000 * MS}
    folded = tmp_path / "x.folded"
    run("--weight", "latency", path, "-o", folded)
    assert (
        sum(int(line.rpartition(" ")[2]) for line in folded.read_text().splitlines())
        == (kind["total"])
    )


def test_a_filter_does_not_affect_the_number_of_parallel_threads(path):
    (whole,) = json.loads(run("--weight", "latency", "--by", "thread", "--json", path))["kinds"]
    (selected,) = json.loads(run("--weight", "latency", "--json", "-t", "2", path))["kinds"]
    weights = [group["self"] for group in whole["groups"] if "2" in group["name"]]
    assert weights == [selected["total"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--by", "part"], "cannot be combined"), (["clickhouse://h:1/d"], "needs all threads")],
)
def test_latency_weighting_is_rejected_with_by_part_and_for_clickhouse(path, words, message):
    assert message in run("--weight", "latency", path, *words, status=2)
